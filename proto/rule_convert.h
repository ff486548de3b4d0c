// A rule on the wire and in memory. Field names of v1.Rule are the option names of plan/rule.h, so
// the conversion goes by name and a new option needs no code here.
#ifndef STIEFEL_PROTO_RULE_CONVERT_H_
#define STIEFEL_PROTO_RULE_CONVERT_H_

#include "absl/status/statusor.h"
#include "plan/rule.h"
#include "stiefel/v1/rule.pb.h"

namespace stiefel {

// The preset with the fields that are set laid over it. INVALID_ARGUMENT: unknown preset, an option
// that it cannot use, a value out of range, unknown fields.
absl::StatusOr<Rule> RuleFromProto(const v1::Rule& wire);

// The preset and every option that differs from it.
v1::Rule RuleToProto(const Rule& rule);

}  // namespace stiefel

#endif  // STIEFEL_PROTO_RULE_CONVERT_H_
