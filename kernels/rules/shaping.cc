#include "kernels/rules/shaping.h"

#include <algorithm>

#include "kernels/rules/rule_base.h"
#include "kernels/spectral_passes.h"

namespace stiefel {
namespace {

int64_t Count(const Rule& rule, int64_t rows, int64_t cols) {
  return ShapedDirections(rule, std::min(rows, cols));
}

// The directions along the rows and along the columns, and what the primitives need.
struct Workspace {
  Workspace(const Rule& rule, int64_t rows, int64_t cols, void* base) {
    const int64_t count = Count(rule, rows, cols);
    char* at = static_cast<char*>(base);
    left = reinterpret_cast<float*>(at);
    at += Aligned(count * rows * sizeof(float));
    right = reinterpret_cast<float*>(at);
    scratch = at + Aligned(count * cols * sizeof(float));
  }

  float *left, *right;
  void* scratch;
};

}  // namespace

int64_t ShapingWorkspaceBytes(const Rule& rule, int64_t rows, int64_t cols) {
  const int64_t count = Count(rule, rows, cols);
  return Aligned(count * rows * sizeof(float)) + Aligned(count * cols * sizeof(float)) +
         std::max(Aligned(LeadingPairsScratch(rows, cols, count)),
                  Aligned(ShapeScratch(rows, cols, count)));
}

void EnqueueLeadingDirections(Stream* stream, const Rule& rule, const float* u, int64_t rows,
                              int64_t cols, const float* state, float* new_state, void* workspace) {
  const Workspace work(rule, rows, cols, workspace);
  LeadingPairsPass pass;
  pass.u = u;
  pass.rows = rows;
  pass.cols = cols;
  pass.count = Count(rule, rows, cols);
  pass.start = state;
  pass.found = new_state;
  pass.left = work.left;
  pass.right = work.right;
  pass.scratch = work.scratch;
  stream->Run(pass);
}

void EnqueueShaping(Stream* stream, const Rule& rule, double weight, const MatrixView& o,
                    bool transposed, int64_t rows, int64_t cols, void* workspace) {
  const Workspace work(rule, rows, cols, workspace);
  ShapePass pass;
  pass.o = o;
  pass.count = Count(rule, rows, cols);
  pass.left = transposed ? work.right : work.left;
  pass.right = transposed ? work.left : work.right;
  // s_i(t) = 1 + (s_i - 1) w_t = 1 + (g_t - 1) ln i / ln k: the weight changes the gain alone.
  pass.gain = 1 + (rule.gain - 1) * weight;
  pass.deflate_measured = rule.deflation == Deflation::kConsistent;
  pass.scratch = work.scratch;
  stream->Run(pass);
}

}  // namespace stiefel
