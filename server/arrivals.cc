#include "server/arrivals.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace stiefel {

absl::StatusOr<PieceVerdict> RankArrivals::Reserve(int32_t block, int32_t part,
                                                   int64_t part_elements, int64_t offset,
                                                   int64_t count, std::optional<uint32_t> checksum,
                                                   bool absent) {
  const Key key(block, part);
  const auto found = parts_.find(key);
  const bool has_data = found != parts_.end() && !found->second.absent;
  const auto where = [&] { return absl::StrCat("block ", block, " part ", part); };
  if (absent) {
    if (has_data)
      return absl::InvalidArgumentError(
          absl::StrCat(where(), " cannot be absent: data of it arrived before"));
    const bool seen = found != parts_.end();
    parts_[key].absent = true;
    return seen ? PieceVerdict::kDuplicate : PieceVerdict::kPlace;
  }
  if (offset < 0 || count <= 0 || offset > part_elements || count > part_elements - offset) {
    return absl::OutOfRangeError(absl::StrCat(where(), ": piece of ", count, " elements at offset ",
                                              offset, " does not lie in the block's ",
                                              part_elements, " elements"));
  }
  if (found != parts_.end() && found->second.absent) {
    return absl::InvalidArgumentError(
        absl::StrCat(where(), " was declared absent; data of it is refused"));
  }
  if (found != parts_.end()) {
    const PartArrival& arrived = found->second;
    const auto same = arrived.checksums.find({offset, count});
    if (same != arrived.checksums.end()) {
      if (same->second && checksum && *same->second != *checksum) {
        return absl::DataLossError(absl::StrCat(where(), ": elements [", offset, ", ",
                                                offset + count, ") came again with crc32c ",
                                                *checksum, ", before it was ", *same->second));
      }
      return PieceVerdict::kDuplicate;
    }
    if (arrived.reserved.Intersects(offset, offset + count)) {
      return absl::InvalidArgumentError(absl::StrCat(
          where(), ": elements [", offset, ", ", offset + count,
          ") overlap others that arrived with other bounds; send a piece again with equal bounds"));
    }
  }
  PartArrival& arrived = parts_[key];
  arrived.reserved.Add(offset, offset + count);
  arrived.checksums[{offset, count}] = checksum;
  return PieceVerdict::kPlace;
}

void RankArrivals::Unreserve(int32_t block, int32_t part, int64_t offset, int64_t count) {
  const auto found = parts_.find({block, part});
  if (found == parts_.end() || found->second.checksums.erase({offset, count}) == 0) return;
  PartArrival& arrived = found->second;
  arrived.reserved.Clear();
  for (const auto& [bounds, checksum] : arrived.checksums)
    arrived.reserved.Add(bounds.first, bounds.first + bounds.second);
}

void RankArrivals::Placed(int32_t block, int32_t part, int64_t count) {
  const auto found = parts_.find({block, part});
  if (found != parts_.end()) found->second.placed += count;
}

bool RankArrivals::Complete(int32_t block, int32_t part, int64_t part_elements) const {
  const auto found = parts_.find({block, part});
  return found != parts_.end() && (found->second.absent || found->second.placed >= part_elements);
}

bool RankArrivals::Absent(int32_t block, int32_t part) const {
  const auto found = parts_.find({block, part});
  return found != parts_.end() && found->second.absent;
}

void RankArrivals::AppendCanonical(std::string* out) const {
  for (const auto& [key, part] : parts_) {
    absl::StrAppend(out, "b", key.first, ".", key.second, part.absent ? "-" : "+", part.placed);
    for (const auto& [bounds, checksum] : part.checksums) {
      absl::StrAppend(out, "[", bounds.first, "+", bounds.second, ":", checksum.value_or(0), "]");
    }
  }
}

}  // namespace stiefel
