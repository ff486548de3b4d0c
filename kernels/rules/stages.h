// What whole matrices and shards of them share of the spectral pipeline.
#ifndef STIEFEL_KERNELS_RULES_STAGES_H_
#define STIEFEL_KERNELS_RULES_STAGES_H_

#include <cstdint>

#include "kernels/backend.h"
#include "plan/rule.h"

namespace stiefel {

// The rule with off_refresh_lr_ratio 1: its StepScale is the s of the figures.
Rule WithFullLr(Rule rule);

// The pass that preconditions a direction as the rule says, but for where it is and goes.
NormalisePass NormaliseBy(const Rule& rule);

// Whether a row-wise step of a rows x cols matrix makes columns equally long, not rows.
bool NormalisesColumns(const Rule& rule, int64_t rows, int64_t cols);

// |O_i|_2 after a row-wise step of every row i, or every column, of a rows x cols matrix.
double VectorLength(const Rule& rule, int64_t rows, int64_t cols, bool by_columns);

}  // namespace stiefel

#endif  // STIEFEL_KERNELS_RULES_STAGES_H_
