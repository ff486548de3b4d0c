#include "kernels/cpu/amx/polar.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cpu/amx/tile_matrix.h"
#include "kernels/cpu/aol.h"
#include "kernels/cpu/segment_kernels.h"

namespace stiefel {
namespace {

constexpr int64_t kBlockBytes = kBlockValues * static_cast<int64_t>(sizeof(uint16_t));

// Columns of U that are brought into tile layout at once.
constexpr int64_t kImportCols = 256;

// X as the left operand of X X^T, as its right one (X^T), and as the right operand of B X; the last
// twice, since a product reads all of one while it writes the next.
struct TileX {
  TileOperand rows, transpose, pairs, next_pairs;
};

// Hands out the workspace of a unit.
class Carver {
 public:
  explicit Carver(void* workspace) : next_(static_cast<char*>(workspace)) {}

  TileOperand Operand(int64_t panels, int64_t steps) {
    return {static_cast<uint16_t*>(Take(panels * steps * kBlockBytes)), panels, steps};
  }
  SymmetricTiles Symmetric(int64_t panels) {
    const TileOperand rows = Operand(panels, panels);
    return {rows, Operand(panels, panels)};
  }
  void* Take(int64_t bytes) { return std::exchange(next_, next_ + bytes); }

 private:
  char* next_;
};

// The map of one m x n matrix X.
class TileMap {
 public:
  TileMap(const TileKernels& kernels, ThreadPool* pool, const PolarPass& pass)
      : kernels_(kernels),
        products_(kernels, pool),
        pass_(pass),
        m_(BlocksOf(pass.normalise.x.rows)),
        n_(BlocksOf(pass.normalise.x.cols)),
        carver_(pass.workspace) {
    x_ = {carver_.Operand(m_, n_), carver_.Operand(m_, n_), carver_.Operand(n_, m_),
          carver_.Operand(n_, m_)};
    scales_ = static_cast<double*>(carver_.Take(m_ * kBlockSide * sizeof(double)));
  }

  // factor != 0
  void Run(double factor) {
    Import(factor);
    if (pass_.gram) {
      GramForm();
    } else {
      StandardForm();
    }
  }

 private:
  static float Float(double value) { return static_cast<float>(value); }

  // A = X X^T;  B = b A + c A^2;  X <- a X + B X
  void StandardForm() {
    const SymmetricTiles gram = carver_.Symmetric(m_);
    const SymmetricTiles poly = {carver_.Operand(m_, m_), {}};
    FirstGram(gram);
    for (size_t t = 0; t < pass_.coefficients.size(); ++t) {
      const Coefficients& k = pass_.coefficients[t];
      if (t > 0) GramOfX(gram);
      Square(gram, k, poly, nullptr);
      AdvanceX(poly.rows, Float(k.a), t + 1 == pass_.coefficients.size());
    }
  }

  // R = X X^T, Q = I; at a restart X <- Q X and again. Z = b R + c R^2;  Q <- Q Z + a Q;  R <- (Z +
  // a) R (Z + a).
  void GramForm() {
    const SymmetricTiles r = carver_.Symmetric(m_), z = carver_.Symmetric(m_),
                         rz = carver_.Symmetric(m_);
    SymmetricTiles q = {carver_.Operand(m_, m_), {}}, next_q = {carver_.Operand(m_, m_), {}};
    const int64_t steps = static_cast<int64_t>(pass_.coefficients.size());
    bool q_is_identity = true;
    FirstGram(r);
    for (int64_t t = 0; t < steps; ++t) {
      if (t > 0 && RestartsAt(t)) {
        AdvanceX(q.rows, 0, /*last=*/false);
        GramOfX(r);
        q_is_identity = true;
      }
      const Coefficients& k = pass_.coefficients[t];
      const float a = Float(k.a);
      Square(r, k, z, q_is_identity ? &q : nullptr);
      if (!q_is_identity) {
        SymmetricProduct(q.rows, z.pairs, a, q.rows, next_q);
        std::swap(q, next_q);
      }
      q_is_identity = false;
      if (t + 1 < steps && !RestartsAt(t + 1)) {
        SymmetricProduct(r.rows, z.pairs, a, r.rows, rz);
        SymmetricProduct(z.rows, rz.pairs, a, rz.rows, r);
      }
    }
    AdvanceX(q.rows, 0, /*last=*/true);
  }

  bool RestartsAt(int64_t t) const {
    return std::find(pass_.restarts.begin(), pass_.restarts.end(), t) != pass_.restarts.end();
  }

  // c = a b + beta d, where all commute.
  void SymmetricProduct(const TileOperand& a, const TileOperand& b, float beta,
                        const TileOperand& d, const SymmetricTiles& c) const {
    products_.Multiply(a, b, /*symmetric=*/true, [&](float* block, int64_t i, int64_t j) {
      kernels_.combine(1, beta, d.At(i, j), block);
      StoreSymmetric(kernels_, block, i, j, c);
    });
  }

  void GramOfX(const SymmetricTiles& gram) const {
    products_.Multiply(
        x_.rows, x_.transpose, /*symmetric=*/true,
        [&](float* block, int64_t i, int64_t j) { StoreSymmetric(kernels_, block, i, j, gram); });
  }

  // out = b R + c R^2; and Q = a I + out, where wanted.
  void Square(const SymmetricTiles& r, const Coefficients& k, const SymmetricTiles& out,
              const SymmetricTiles* q) const {
    products_.Multiply(r.rows, r.pairs, /*symmetric=*/true,
                       [&](float* block, int64_t i, int64_t j) {
                         kernels_.combine(Float(k.c), Float(k.b), r.rows.At(i, j), block);
                         StoreSymmetric(kernels_, block, i, j, out);
                         if (q == nullptr) return;
                         if (i == j) AddToDiagonal(Float(k.a), block);
                         StoreSymmetric(kernels_, block, i, j, *q);
                       });
  }

  static void AddToDiagonal(float value, float* block) {
    for (int64_t row = 0; row < kBlockSide; ++row) {
      block[row / kTileSide * 768 + row % kTileSide * (kTileSide + 1)] += value;
    }
  }

  // X <- left X + a X, or out of the tiles where it is the last.
  void AdvanceX(const TileOperand& left, float a, bool last) {
    products_.Multiply(left, x_.pairs, /*symmetric=*/false,
                       [&](float* block, int64_t i, int64_t j) {
                         if (a != 0) kernels_.combine(1, a, x_.rows.At(i, j), block);
                         if (last) {
                           Export(block, i, j);
                         } else {
                           kernels_.to_row_tiles(block, x_.rows.At(i, j));
                           Spread(i, j, x_.next_pairs);
                         }
                       });
    std::swap(x_.pairs, x_.next_pairs);
  }

  // The other operands of block (i, j) of X from its row tiles.
  void Spread(int64_t i, int64_t j, const TileOperand& pairs) const {
    kernels_.transpose(x_.rows.At(i, j), x_.transpose.At(i, j));
    kernels_.to_pair_tiles(x_.rows.At(i, j), pairs.At(j, i));
  }

  void FirstGram(const SymmetricTiles& gram) {
    GramOfX(gram);
    if (!pass_.aol) return;
    products_.ForEach(m_, [&](int64_t i) { AbsoluteSums(gram.rows, i); });
    AolScales(m_ * kBlockSide, scales_);
    products_.ForEach(m_, [&](int64_t i) {
      for (int64_t j = 0; j <= i; ++j) ScaleGram(gram, i, j);
      for (int64_t j = 0; j < n_; ++j) ScaleX(i, j);
    });
  }

  void AbsoluteSums(const TileOperand& gram, int64_t i) {
    for (int64_t row = 0; row < kBlockSide; ++row) {
      double sum = 0;
      for (int64_t j = 0; j < m_; ++j) {
        const uint16_t* values = gram.At(i, j) + row * kBlockSide;
        for (int64_t col = 0; col < kBlockSide; ++col)
          sum += Bf16ToFloat(static_cast<uint16_t>(values[col] & 0x7FFF));
      }
      scales_[i * kBlockSide + row] = sum;
    }
  }

  // Block (i, j) of X or A as fp32 with row r and column c times row_scales[r] and col_scales[c]
  // (ones where null).
  void ScaledBlock(const uint16_t* row_tiles, const double* row_scales, const double* col_scales,
                   float* block) const {
    std::fill_n(block, kBlockValues, 0.0f);
    kernels_.combine(0, 1, row_tiles, block);
    for (int64_t place = 0; place < kBlockValues; ++place) {
      const int64_t row = place / 512 * kTileSide + place % 256 / kTileSide;
      const int64_t col = place / 256 % 2 * kTileSide + place % kTileSide;
      const double scale = row_scales[row] * (col_scales == nullptr ? 1.0 : col_scales[col]);
      block[place] = static_cast<float>(scale * block[place]);
    }
  }

  void ScaleGram(const SymmetricTiles& gram, int64_t i, int64_t j) const {
    alignas(64) float block[kBlockValues];
    ScaledBlock(gram.rows.At(i, j), scales_ + i * kBlockSide, scales_ + j * kBlockSide, block);
    StoreSymmetric(kernels_, block, i, j, gram);
  }

  void ScaleX(int64_t i, int64_t j) const {
    alignas(64) float block[kBlockValues];
    ScaledBlock(x_.rows.At(i, j), scales_ + i * kBlockSide, nullptr, block);
    kernels_.to_row_tiles(block, x_.rows.At(i, j));
    Spread(i, j, x_.pairs);
  }

  // U, times the factor and rounded to bf16, as the operands that hold X.
  void Import(double factor) const {
    const NormalisePass& u = pass_.normalise;
    const int64_t chunks = (u.cols + kImportCols - 1) / kImportCols;
    products_.ForEach(BlocksOf(u.rows) * chunks, [&](int64_t task) {
      ImportChunk(factor, task / chunks, task % chunks * kImportCols);
    });
  }

  // The 32 rows of U in block row `top`, and up to kImportCols columns.
  void ImportChunk(double factor, int64_t top, int64_t left) const {
    const NormalisePass& u = pass_.normalise;
    const SegmentKernels& segments = BestSegmentKernels();
    alignas(64) float scaled[kImportCols];
    alignas(64) uint16_t chunk[kBlockSide][kImportCols];
    const int64_t rows = std::min(kBlockSide, u.rows - top * kBlockSide);
    const int64_t cols = std::min(kImportCols, u.cols - left);
    if (rows < kBlockSide || cols < kImportCols) std::memset(chunk, 0, sizeof(chunk));
    for (int64_t row = 0; row < rows; ++row) {
      segments.scale_wide(factor, u.u + (top * kBlockSide + row) * u.stride + left, scaled, cols);
      segments.round_bf16(1, scaled, 0, nullptr, chunk[row], cols);
    }
    for (int64_t block = 0; block < BlocksOf(cols); ++block) {
      alignas(64) uint16_t tiles[kBlockValues];
      for (int64_t row = 0; row < kBlockSide; ++row) {
        std::memcpy(tiles + row * kBlockSide, chunk[row] + block * kBlockSide,
                    kBlockSide * sizeof(uint16_t));
      }
      ImportBlock(tiles, top, left / kBlockSide + block);
    }
  }

  // Block (i, j) of U, as row tiles.
  void ImportBlock(const uint16_t* tiles, int64_t i, int64_t j) const {
    if (pass_.normalise.transpose) {
      kernels_.to_pair_tiles(tiles, x_.transpose.At(j, i));
      kernels_.transpose(x_.transpose.At(j, i), x_.rows.At(j, i));
      kernels_.transpose(tiles, x_.pairs.At(i, j));
    } else {
      std::memcpy(x_.rows.At(i, j), tiles, kBlockBytes);
      Spread(i, j, x_.pairs);
    }
  }

  void Export(const float* block, int64_t i, int64_t j) const {
    alignas(64) uint16_t tiles[kBlockValues];
    kernels_.to_row_tiles(block, tiles);
    const MatrixView& x = pass_.normalise.x;
    const int64_t rows = std::min(kBlockSide, x.rows - i * kBlockSide);
    const int64_t cols = std::min(kBlockSide, x.cols - j * kBlockSide);
    uint16_t* to = static_cast<uint16_t*>(x.data) + i * kBlockSide * x.cols + j * kBlockSide;
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(to + row * x.cols, tiles + row * kBlockSide, cols * sizeof(uint16_t));
    }
  }

  const TileKernels& kernels_;
  const TileProducts products_;
  const PolarPass& pass_;
  const int64_t m_, n_;  // sides of X in blocks
  Carver carver_;
  TileX x_;
  double* scales_;  // AOL's, one per row
};

}  // namespace

int64_t TilePolarBytes(int64_t m, int64_t n, bool gram) {
  const int64_t rows = BlocksOf(m), cols = BlocksOf(n);
  const int64_t squares = gram ? 8 : 3;
  return (4 * rows * cols + squares * rows * rows) * kBlockBytes +
         rows * kBlockSide * static_cast<int64_t>(sizeof(double));
}

void TilePolar(const TileKernels& kernels, ThreadPool* pool, const PolarPass& pass, double factor) {
  const MatrixView& x = pass.normalise.x;
  if (factor == 0) {
    std::memset(x.data, 0, x.rows * x.cols * sizeof(uint16_t));
  } else {
    TileMap(kernels, pool, pass).Run(factor);
  }
}

}  // namespace stiefel
