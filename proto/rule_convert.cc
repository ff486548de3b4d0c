#include "proto/rule_convert.h"

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"

namespace stiefel {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Reflection;

std::string ValueText(const v1::Rule& wire, const FieldDescriptor& field) {
  const Reflection& reflection = *wire.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return absl::StrFormat("%.17g", reflection.GetDouble(wire, &field));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(reflection.GetInt64(wire, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(wire, &field) ? "true" : "false";
    default:
      return reflection.GetString(wire, &field);
  }
}

void SetFromText(v1::Rule* wire, const FieldDescriptor& field, const std::string& text) {
  const Reflection& reflection = *wire->GetReflection();
  double number = 0;
  int64_t integer = 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_DOUBLE:
      if (absl::SimpleAtod(text, &number)) reflection.SetDouble(wire, &field, number);
      return;
    case FieldDescriptor::CPPTYPE_INT64:
      if (absl::SimpleAtoi(text, &integer)) reflection.SetInt64(wire, &field, integer);
      return;
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.SetBool(wire, &field, text == "true");
    default:
      return reflection.SetString(wire, &field, text);
  }
}

}  // namespace

absl::StatusOr<Rule> RuleFromProto(const v1::Rule& wire) {
  const auto& unknown = wire.GetReflection()->GetUnknownFields(wire);
  if (unknown.field_count() > 0) {
    return absl::InvalidArgumentError(absl::StrCat("field ", unknown.field(0).number(),
                                                   " of the rule is not known to this build"));
  }
  STIEFEL_ASSIGN_OR_RETURN(Rule rule, PresetRule(wire.preset()));
  std::vector<const FieldDescriptor*> fields;
  wire.GetReflection()->ListFields(wire, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->name() == "preset") continue;
    STIEFEL_RETURN_IF_ERROR(SetOption(rule, field->name(), ValueText(wire, *field)));
  }
  return rule;
}

v1::Rule RuleToProto(const Rule& rule) {
  v1::Rule wire;
  wire.set_preset(rule.preset);
  for (const auto& [key, value] : ChangedOptions(rule)) {
    const FieldDescriptor* field = v1::Rule::descriptor()->FindFieldByName(key);
    if (field != nullptr) SetFromText(&wire, *field, value);
  }
  return wire;
}

}  // namespace stiefel
