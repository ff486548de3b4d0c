#include "server/publisher.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/checksum.h"

namespace stiefel {
namespace {

// What the spans of a chunk point into.
struct Keepalive {
  std::vector<std::shared_ptr<const void>> pins;
  std::vector<std::unique_ptr<char[]>> copies;
};

// Calls visit(first element in the matrix, elements) for every run of contiguous elements of
// [offset, offset + count) of the block.
template <typename Visit>
void ForEachRun(const PullItem& item, int64_t offset, int64_t count, Visit visit) {
  const int64_t width = item.rect.cols();
  if (width == item.matrix_cols)
    return visit(item.rect.row_begin * item.matrix_cols + offset, count);
  while (count > 0) {
    const int64_t row = item.rect.row_begin + offset / width;
    const int64_t col = offset % width;
    const int64_t here = std::min(width - col, count);
    visit(row * item.matrix_cols + item.rect.col_begin + col, here);
    offset += here;
    count -= here;
  }
}

bool PointsIntoMatrix(const PullItem& item) {
  return item.source == item.wire && (item.rect.cols() == item.matrix_cols ||
                                      item.rect.cols() * DTypeSize(item.wire) >= kMinSpanBytes);
}

uint32_t AddPayload(const ChunkPlan::Piece& piece, OutgoingChunk* chunk, Keepalive* keepalive) {
  const PullItem& item = piece.item;
  const int64_t source = DTypeSize(item.source), wire = DTypeSize(item.wire);
  uint32_t crc = 0;
  if (PointsIntoMatrix(item)) {
    ForEachRun(item, piece.offset, piece.count, [&](int64_t first, int64_t count) {
      const char* data = item.matrix + first * source;
      const auto bytes = static_cast<size_t>(count * wire);
      crc = ExtendCrc32c(crc, data, bytes);
      chunk->payload.push_back({data, bytes});
    });
    keepalive->pins.push_back(item.pin);
    return crc;
  }
  const auto bytes = static_cast<size_t>(piece.count * wire);
  keepalive->copies.emplace_back(new char[bytes]);
  char* const copy = keepalive->copies.back().get();
  char* out = copy;
  ForEachRun(item, piece.offset, piece.count, [&](int64_t first, int64_t count) {
    Convert(item.matrix + first * source, item.source, out, item.wire, count);
    out += count * wire;
  });
  chunk->payload.push_back({copy, bytes});
  return Crc32c(copy, bytes);
}

}  // namespace

void PullQueue::Push(PullItem item) {
  const auto key = [](const PullItem& of) {
    return std::make_tuple(of.step, of.attempt, of.round, of.block);
  };
  const auto place =
      std::upper_bound(items_.begin(), items_.end(), item,
                       [&key](const PullItem& a, const Entry& b) { return key(a) < key(b.item); });
  items_.insert(place, {std::move(item), 0});
}

void PullQueue::DropUpdates(int64_t step, int32_t attempt, int32_t round) {
  items_.erase(std::remove_if(items_.begin(), items_.end(),
                              [&](const Entry& entry) {
                                const PullItem& item = entry.item;
                                return item.type == v1::ChunkHeader::UPDATE && item.step == step &&
                                       (item.attempt < attempt ||
                                        (item.attempt == attempt && item.round <= round));
                              }),
               items_.end());
}

ChunkPlan PullQueue::TakeChunk() {
  ChunkPlan plan;
  while (!items_.empty() && static_cast<int>(plan.pieces.size()) < kMaxPiecesPerChunk) {
    Entry& entry = items_.front();
    PullItem& item = entry.item;
    if (!plan.pieces.empty()) {
      const PullItem& first = plan.pieces.front().item;
      if (first.type != item.type || first.step != item.step || first.attempt != item.attempt ||
          first.round != item.round)
        break;
    }
    if (item.absent) {
      plan.pieces.push_back({std::move(item), 0, 0});
      items_.pop_front();
      continue;
    }
    const int64_t element = DTypeSize(item.wire);
    const int64_t left = item.rect.Area() - entry.offset;
    const int64_t count = std::min(left, kPieceBytes / element);
    if (!plan.pieces.empty() && plan.payload_bytes + count * element > kPieceBytes) break;
    plan.payload_bytes += count * element;
    plan.pieces.push_back({item, entry.offset, count});
    entry.offset += count;
    if (count == left) items_.pop_front();
  }
  return plan;
}

OutgoingChunk BuildChunk(ChunkPlan plan, const v1::Sender& receiver) {
  OutgoingChunk chunk;
  auto keepalive = std::make_shared<Keepalive>();
  const PullItem& first = plan.pieces.front().item;
  chunk.header.set_type(first.type);
  *chunk.header.mutable_sender() = receiver;
  chunk.header.set_step(first.step);
  chunk.header.set_attempt(first.attempt);
  chunk.header.set_round(first.round);
  for (const ChunkPlan::Piece& piece : plan.pieces) {
    v1::Piece* wire = chunk.header.add_pieces();
    wire->set_block(piece.item.block);
    if (piece.item.absent) {
      wire->set_absent(true);
      continue;
    }
    wire->set_offset(piece.offset);
    wire->set_count(piece.count);
    wire->set_crc32c(AddPayload(piece, &chunk, keepalive.get()));
  }
  chunk.keepalive = std::move(keepalive);
  return chunk;
}

}  // namespace stiefel
