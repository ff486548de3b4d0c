// What is sent to one rank: a queue of blocks, cut into chunks on a fixed grid when a stream is
// free to take one. What the rank named first among its pull blocks goes first. Pieces of a block
// always have the same bounds, so that a trainer recognises what it gets twice.
#ifndef STIEFEL_SERVER_PUBLISHER_H_
#define STIEFEL_SERVER_PUBLISHER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "common/dtype.h"
#include "common/rect.h"
#include "proto/chunk.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

// Payload of a piece, and of a chunk of several pieces, at most.
inline constexpr int64_t kPieceBytes = 2 << 20;
inline constexpr int kMaxPiecesPerChunk = 2048;
// Rows of a block shorter than this are gathered into one span.
inline constexpr int64_t kMinSpanBytes = 4096;

// One block to send.
struct PullItem {
  v1::ChunkHeader::Type type = v1::ChunkHeader::UPDATE;
  int64_t step = 0;
  int32_t attempt = 0;
  int32_t round = 0;
  int32_t block = 0;    // position among the rank's pull blocks
  bool absent = false;  // then the rest says nothing
  Rect rect;            // of the block in its matrix
  int64_t matrix_cols = 0;
  const char* matrix = nullptr;  // row-major, in `source`
  DType source = DType::kFp32;
  DType wire = DType::kFp32;
  std::shared_ptr<const void> pin;  // of the matrix's memory
};

// A chunk that was taken from the queue but not put together yet.
struct ChunkPlan {
  struct Piece {
    PullItem item;
    int64_t offset = 0;
    int64_t count = 0;
  };
  std::vector<Piece> pieces;  // of one type, step, attempt and round
  int64_t payload_bytes = 0;
};

// Thread-compatible.
class PullQueue {
 public:
  // Behind what is of an older version (step, attempt, round), or of the same and not after it
  // among the rank's pull blocks. A block that is being sent is interrupted for one that is needed
  // sooner.
  void Push(PullItem item);
  void Clear() { items_.clear(); }
  // Forgets updates of the step up to this attempt and round, which nobody can use any more.
  void DropUpdates(int64_t step, int32_t attempt, int32_t round);
  bool empty() const { return items_.empty(); }

  // Removes the next chunk's worth. REQUIRES: not empty().
  ChunkPlan TakeChunk();

 private:
  struct Entry {
    PullItem item;
    int64_t offset;
  };
  std::deque<Entry> items_;
};

// Header, checksums, and spans into the matrices themselves where rows are long enough and of the
// wire's type; elsewhere into a copy. Reads the payload once.
OutgoingChunk BuildChunk(ChunkPlan plan, const v1::Sender& receiver);

}  // namespace stiefel

#endif  // STIEFEL_SERVER_PUBLISHER_H_
