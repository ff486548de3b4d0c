#ifndef STIEFEL_KERNELS_RULES_SPECTRAL_RULE_H_
#define STIEFEL_KERNELS_RULES_SPECTRAL_RULE_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/rules/rule_base.h"
#include "kernels/rules/tiles.h"
#include "kernels/rules/unit.h"

namespace stiefel {

// The spectral pipeline on one matrix, or on one split of one:
//
//   momentum -> select -> refresh:   normalise -> polar -> shape     -> row variance -> scale ->
//   deliver
//                         tiled:     the same per tile, no shaping   -> row variance -> scale ->
//                         deliver row-wise:  normalise rows                                  ->
//                         scale -> deliver
//
// Workspace: small arrays; A, the direction U; then, in a refresh, B, the operand X (its spare is
// A, once U has been read; with selection U[S] is gathered into B, X is in A and its spare in B),
// the squares of the iteration and the workspace of shaping; or the lanes of the tiles; or the
// scratch of a row-wise step.
class SpectralRule final : public RuleBase {
 public:
  // Errors: those of MakePolarPlan. REQUIRES: a valid spectral rule without splits.
  static absl::StatusOr<std::unique_ptr<SpectralRule>> Make(const Rule& rule, int64_t rows,
                                                            int64_t cols, const DeviceInfo& device);

  std::string Explain() const override;
  int64_t StepWorkspaceBytes() const override;
  Measured Enqueue(Stream* stream, RuleStep* step) override;
  void EnqueueAbsorb(Stream* stream, RuleStep* step) override;

 private:
  // Where everything is during one step.
  struct Workspace {
    DirectionStats* figures;  // of U[S]
    double* scratch;          // one per vector that is selected from
    int32_t *index, *place;
    double* factors;  // of the row variance
    char *a, *b, *rest;
  };
  // U as it is orthogonalised: whole, or the selected vectors.
  struct Direction {
    float* u;
    const DirectionStats* figures;
    char* other;  // the buffer that is free: B, or A after a selection
  };

  SpectralRule(const Rule& rule, int64_t rows, int64_t cols, std::string method);

  int64_t Vectors() const;  // that are selected from; 0 without selection
  int64_t Factors() const;
  int64_t SmallBytes() const;
  int64_t DirectionBytes() const;
  int64_t OperandBytes() const;
  Workspace Carve(char* memory) const;
  const TiledPolar* TilesOf(const RuleStep& step) const;
  bool scatters() const { return unit_->rows() != rows_ || unit_->cols() != cols_; }

  Direction Select(Stream* stream, RuleStep* step, const Workspace& w) const;
  void Refresh(Stream* stream, RuleStep* step, const Workspace& w) const;
  void Tiled(Stream* stream, RuleStep* step, const Workspace& w, const TiledPolar& tiles) const;
  bool RowWise(Stream* stream, RuleStep* step, const Workspace& w) const;
  UnitUpdate Shape(Stream* stream, const UnitUpdate& update, double weight,
                   const Workspace& w) const;
  // Row variance, where there is one, and delivery.
  void Finish(Stream* stream, RuleStep* step, const Workspace& w, const UnitUpdate& update) const;
  void Deliver(Stream* stream, RuleStep* step, const Workspace& w, const UnitUpdate& update,
               const double* row_factors) const;
  void Damp(Stream* stream, float* momentum, const float* selected) const;
  void CarryOver(Stream* stream, RuleStep* step, int state) const;

  bool ByColumns() const;

  const Rule full_lr_rule_;  // WithFullLr
  const bool select_columns_;
  const int selected_, row_variance_, leading_directions_;  // places in the state, or -1
  std::optional<PolarUnit> unit_;                           // the whole, or the selected vectors
  std::vector<TiledPolar> tiles_;                           // one per tile size of the rule
};

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_SPECTRAL_RULE_H_
