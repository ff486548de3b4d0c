#ifndef STIEFEL_PLAN_MODEL_H_
#define STIEFEL_PLAN_MODEL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "plan/matrix.h"

// A model as a list of names and shapes, read from JSON:
//
//   {
//     "name": "gpt2_124m",
//     "default": {"preset": "muon", "set": {"lr": 0.02}, "push_dtype": "bf16", "pull_dtype":
//     "bf16", "group": 0}, "parameters": [
//       {"name": "h.0.attn.c_attn.weight", "shape": [2304, 768]},
//       {"name": "wte.weight", "shape": [50257, 768], "preset": "adamw", "set": {"lr": 0.0003}},
//       {"name": "experts.w1", "shape": [8, 14336, 4096], "stack_dims": 1}
//     ]
//   }
//
// Equal layers are written once, with "{}" for their number in every text:
//
//       {"repeat": 32, "first": 0, "parameters": [{"name": "layers.{}.w1", "shape": [14336,
//       4096]}]}
//
// stands for the parameters "layers.0.w1" to "layers.31.w1"; "first" may be left out where it is 0,
// and groups do not nest.
//
// "name" and every key but "parameters" and, in a parameter, "name" and "shape" may be left out. A
// parameter takes from "default" what it does not say itself, but "set" only together with the
// preset: a parameter that names a preset starts from that preset. "set" holds the rule options of
// docs/mathematics.md section 8; its values are strings, numbers or booleans. Without any default
// the preset is muon, dtypes fp32 (pull_dtype: that of push) and the group 0. Shapes and
// "stack_dims" are those of plan/shape.h: a stack is expanded to its matrices, "experts.w1[0]" and
// so on. The factors of a polora pair name each other in "set": {"pair": "other name"}.

namespace stiefel {

// One matrix: a parameter, or one of its stack.
struct ModelParameter {
  PlanMatrix matrix;
  int dimensions = 2;  // of the matrix as the user shaped it
  int32_t group = 0;
};

struct ModelSpec {
  std::string name;
  std::vector<ModelParameter> parameters;
};

// What a user says beside the file. They change the default: parameters that name a preset
// themselves keep it.
struct ModelOverrides {
  std::string preset;                                        // Empty: that of the file.
  std::vector<std::pair<std::string, std::string>> options;  // Rule options, set last.
};

// Largest model, in matrices.
inline constexpr int64_t kMaxModelParameters = 1000000;

// INVALID_ARGUMENT, naming the parameter, key and value: text that is not JSON (with the position),
// keys that are unknown or given twice, values of a wrong type or out of range, two parameters of
// one name, no parameter at all, overrides where every parameter names a preset, rules that do
// not fit the shape, polora factors without their partner.
absl::StatusOr<ModelSpec> ParseModel(absl::string_view json, const ModelOverrides& overrides = {});

// ParseModel of a file. NOT_FOUND or UNAVAILABLE if it cannot be read.
absl::StatusOr<ModelSpec> ReadModel(const std::string& path, const ModelOverrides& overrides = {});

// The matrices alone, in order.
std::vector<PlanMatrix> Matrices(const ModelSpec& model);

}  // namespace stiefel

#endif  // STIEFEL_PLAN_MODEL_H_
