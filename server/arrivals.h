// What has arrived of one rank's blocks in one attempt: interval sets, never the bytes themselves.
#ifndef STIEFEL_SERVER_ARRIVALS_H_
#define STIEFEL_SERVER_ARRIVALS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/interval_set.h"

namespace stiefel {

// What to do with a piece.
enum class PieceVerdict {
  kPlace,      // new: copy it to its place, then report Placed
  kDuplicate,  // seen before with the same bounds and checksum: acknowledge, add nothing
  kStale,      // of a decided step or an older attempt: acknowledge, discard
};

// One part of one block. Bounds are in elements of the block, row-major.
struct PartArrival {
  bool absent = false;
  IntervalSet reserved;  // accepted; the copy may still be running
  std::map<std::pair<int64_t, int64_t>, std::optional<uint32_t>> checksums;  // by (offset, count)
  int64_t placed = 0;  // elements whose copy has ended
};

// Copyable value. Not thread-safe.
class RankArrivals {
 public:
  using Key = std::pair<int32_t, int32_t>;  // block, part

  // Accepts the piece [offset, offset + count) of a part of `part_elements` elements, or recognises
  // it. Errors change nothing: OUT_OF_RANGE past the end; DATA_LOSS equal bounds with another
  // checksum; INVALID_ARGUMENT bounds that overlap others without being equal, data for an absent
  // part, absence of a part that has data.
  absl::StatusOr<PieceVerdict> Reserve(int32_t block, int32_t part, int64_t part_elements,
                                       int64_t offset, int64_t count,
                                       std::optional<uint32_t> checksum, bool absent);

  // The bytes of an accepted piece were not those that its checksum names: it may come again.
  void Unreserve(int32_t block, int32_t part, int64_t offset, int64_t count);

  // The copy of an accepted piece has ended.
  void Placed(int32_t block, int32_t part, int64_t count);

  // All `part_elements` are in place, or the part is absent.
  bool Complete(int32_t block, int32_t part, int64_t part_elements) const;
  bool Absent(int32_t block, int32_t part) const;

  const std::map<Key, PartArrival>& parts() const { return parts_; }
  void AppendCanonical(std::string* out) const;

 private:
  std::map<Key, PartArrival> parts_;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_ARRIVALS_H_
