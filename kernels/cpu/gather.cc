#include "kernels/cpu/gather.h"

#include <algorithm>

namespace stiefel {

namespace {

constexpr int64_t kCacheLine = 64;

// The bytes after those from `data` on, which are most likely read next. Addresses beyond the piece
// do no harm.
void FetchAhead(const void* data, int64_t bytes) {
  for (int64_t i = bytes; i < 2 * bytes; i += kCacheLine)
    __builtin_prefetch(static_cast<const char*>(data) + i);
}

int64_t OffsetIn(const GradientPiece& piece, int64_t row, int64_t col) {
  return (row - piece.rect.row_begin) * piece.rect.cols() + (col - piece.rect.col_begin);
}

}  // namespace

const float* Gatherer::InPlace(const GradientPlan::Span& span, int64_t row, int64_t col) const {
  if (span.terms.size() != 1 || plan_.inverse_scale() != 1) return nullptr;
  const GradientPiece& piece = *span.terms[0].piece;
  if (piece.dtype != DType::kFp32) return nullptr;
  return static_cast<const float*>(piece.data) + OffsetIn(piece, row, col);
}

void Gatherer::Read(const GradientPlan::Term& term, int64_t row, int64_t col, int64_t n,
                    float* out) {
  const GradientPiece& piece = *term.piece;
  const int64_t offset = OffsetIn(piece, row, col);
  const char* data = static_cast<const char*>(piece.data) + offset * DTypeSize(piece.dtype);
  FetchAhead(data, n * DTypeSize(piece.dtype));
  Convert(data, piece.dtype, out, DType::kFp32, n);
}

void Gatherer::GatherRun(const GradientPlan::Span& span, int64_t row, int64_t col, int64_t n,
                         float* out) {
  const std::vector<GradientPlan::Term>& terms = span.terms;
  if (terms.empty()) {
    std::fill_n(out, n, 0.0f);
    return;
  }
  if (terms.size() == 1) {
    Read(terms[0], row, col, n, out);
  } else {
    for (size_t i = 0; i < terms.size();) {
      const float coefficient = terms[i].coefficient;
      const bool first = i == 0;
      Read(terms[i], row, col, n, group_);
      for (++i; i < terms.size() && !terms[i].opens_group; ++i) {
        Read(terms[i], row, col, n, piece_);
        kernels_.add(piece_, group_, n);
      }
      if (first) {
        kernels_.scale(coefficient, group_, out, n);
      } else {
        kernels_.add_scaled(coefficient, group_, out, n);
      }
    }
  }
  if (plan_.inverse_scale() != 1) kernels_.scale(plan_.inverse_scale(), out, out, n);
}

const float* Gatherer::Gather(int64_t begin, int64_t n, float* buffer) {
  float* out = buffer;
  const std::vector<GradientPlan::Band>& bands = plan_.bands();
  const int64_t cols = plan_.cols();
  int64_t row = begin / cols, col = begin % cols;
  if (row < bands[band_].row_begin || row >= bands[band_].row_end) {
    const auto above = [](int64_t r, const GradientPlan::Band& band) { return r < band.row_end; };
    band_ = std::upper_bound(bands.begin(), bands.end(), row, above) - bands.begin();
  }
  while (n > 0) {
    if (row >= bands[band_].row_end) ++band_;
    const GradientPlan::Band& band = bands[band_];
    const auto right = [](int64_t c, const GradientPlan::Span& span) { return c < span.col_end; };
    const auto span = std::upper_bound(band.spans.begin(), band.spans.end(), col, right);
    // The pieces of a span as wide as the matrix are contiguous over rows.
    const int64_t run = band.spans.size() == 1 ? std::min(n, (band.row_end - row) * cols - col)
                                               : std::min(n, span->col_end - col);
    const float* in_place = out == buffer && run == n ? InPlace(*span, row, col) : nullptr;
    if (in_place != nullptr) return in_place;
    GatherRun(*span, row, col, run, out);
    out += run;
    n -= run;
    row += (col + run) / cols;
    col = (col + run) % cols;
  }
  return buffer;
}

}  // namespace stiefel
