#include "kernels/cpu/scratch.h"

#include <new>

namespace stiefel {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Piece {
  ~Piece() { ::operator delete(data, kAlignment); }
  void* data = nullptr;
  int64_t bytes = 0;
};

}  // namespace

void* ThreadScratch(ScratchUse use, int64_t bytes) {
  thread_local Piece pieces[4];
  Piece& piece = pieces[static_cast<int>(use)];
  if (piece.bytes < bytes) {
    ::operator delete(piece.data, kAlignment);
    piece.data = nullptr;
    piece.bytes = 0;
    piece.data = ::operator new(bytes, kAlignment);
    piece.bytes = bytes;
  }
  return piece.data;
}

}  // namespace stiefel
