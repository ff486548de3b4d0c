#include "cli/apply_rules.h"

#include <fnmatch.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/status.h"
#include "plan/nearest.h"
#include "plan/shape.h"

namespace stiefel {
namespace {

// The part of an argument in front of the last ':' of its head, and what follows. Nothing where
// the head has no ':'.
std::optional<std::pair<std::string, std::string>> SplitPattern(const std::string& argument,
                                                                char end_of_head) {
  const size_t colon = argument.substr(0, argument.find(end_of_head)).rfind(':');
  if (colon == std::string::npos) return std::nullopt;
  return std::make_pair(argument.substr(0, colon), argument.substr(colon + 1));
}

bool Matches(const std::string& pattern, const std::string& name) {
  return pattern == name || fnmatch(pattern.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

absl::StatusOr<std::pair<std::string, std::string>> KeyValue(const std::string& text,
                                                             const std::string& argument) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(argument, ": \"", PrintableName(text), "\" is not of the form key=value"));
  }
  return std::make_pair(text.substr(0, equals), text.substr(equals + 1));
}

absl::Status Annotate(const absl::Status& status, const std::string& prefix) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(prefix, ": ", std::string(status.message())));
}

struct Assignment {
  std::optional<std::string> pattern;  // nothing: parameters of --preset
  std::string key, value;
  std::string argument;  // for messages
};

struct NamedRule {
  std::string pattern;
  Rule rule;
};

struct StackDims {
  std::optional<std::string> pattern;  // nothing: parameters of 3 and more dimensions
  int64_t dims = 0;
};

absl::StatusOr<std::vector<Assignment>> ParseSet(const std::vector<std::string>& set) {
  std::vector<Assignment> assignments;
  for (const std::string& text : set) {
    Assignment assignment;
    assignment.argument = absl::StrCat("--set ", PrintableName(text));
    const auto split = SplitPattern(text, '=');
    if (split.has_value()) assignment.pattern = split->first;
    STIEFEL_ASSIGN_OR_RETURN(
        const auto pair, KeyValue(split.has_value() ? split->second : text, assignment.argument));
    std::tie(assignment.key, assignment.value) = pair;
    assignments.push_back(std::move(assignment));
  }
  return assignments;
}

// "muon,lr=0.1,splits=4,4,lr=2": what has no '=' goes on with the value before.
absl::StatusOr<Rule> ParseRule(const std::string& text, const std::string& argument) {
  std::vector<std::string> parts;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    if (parts.size() > 1 && part.find('=') == absl::string_view::npos) {
      absl::StrAppend(&parts.back(), ",", part);
    } else {
      parts.emplace_back(part);
    }
  }
  absl::StatusOr<Rule> rule = PresetRule(parts[0]);
  if (!rule.ok()) return Annotate(rule.status(), argument);
  for (size_t i = 1; i < parts.size(); ++i) {
    STIEFEL_ASSIGN_OR_RETURN(const auto pair, KeyValue(parts[i], argument));
    STIEFEL_RETURN_IF_ERROR(Annotate(SetOption(*rule, pair.first, pair.second), argument));
  }
  return rule;
}

absl::StatusOr<std::vector<NamedRule>> ParseRules(const std::vector<std::string>& rules) {
  std::vector<NamedRule> named;
  for (const std::string& text : rules) {
    const std::string argument = absl::StrCat("--rule ", PrintableName(text));
    const auto split = SplitPattern(text, ',');
    if (!split.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(argument, " is not of the form PATTERN:preset[,key=value ...]"));
    }
    STIEFEL_ASSIGN_OR_RETURN(Rule rule, ParseRule(split->second, argument));
    named.push_back({split->first, std::move(rule)});
  }
  return named;
}

absl::StatusOr<std::vector<StackDims>> ParseStackDims(const std::vector<std::string>& texts) {
  std::vector<StackDims> all;
  for (const std::string& text : texts) {
    StackDims dims;
    const size_t colon = text.rfind(':');
    if (colon != std::string::npos) dims.pattern = text.substr(0, colon);
    const std::string number = colon == std::string::npos ? text : text.substr(colon + 1);
    if (!absl::SimpleAtoi(number, &dims.dims) || dims.dims < 0) {
      return absl::InvalidArgumentError(absl::StrCat("--stack-dims ", PrintableName(text),
                                                     " is not a number of axes, or PATTERN:N"));
    }
    all.push_back(std::move(dims));
  }
  return all;
}

// Everything that the arguments say, and which of it has been of use.
class RuleTable {
 public:
  static absl::StatusOr<RuleTable> Make(const RuleArguments& arguments) {
    RuleTable table;
    table.preset_ = arguments.preset;
    if (!arguments.preset.empty()) {
      STIEFEL_RETURN_IF_ERROR(PresetRule(arguments.preset).status());
    }
    STIEFEL_ASSIGN_OR_RETURN(table.rules_, ParseRules(arguments.rules));
    STIEFEL_ASSIGN_OR_RETURN(table.set_, ParseSet(arguments.set));
    STIEFEL_ASSIGN_OR_RETURN(table.stack_dims_, ParseStackDims(arguments.stack_dims));
    return table;
  }

  absl::StatusOr<Rule> RuleOf(const std::string& name) const {
    const auto named = std::find_if(rules_.rbegin(), rules_.rend(), [&](const NamedRule& rule) {
      return Matches(rule.pattern, name);
    });
    const bool by_preset = named == rules_.rend();
    if (by_preset && preset_.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          PrintableName(name), " has no rule: give --preset, or a --rule that matches it"));
    }
    Rule rule = by_preset ? *PresetRule(preset_) : named->rule;
    for (const Assignment& a : set_) {
      if (a.pattern.has_value() ? !Matches(*a.pattern, name) : !by_preset) continue;
      STIEFEL_RETURN_IF_ERROR(Annotate(SetOption(rule, a.key, a.value),
                                       absl::StrCat(PrintableName(name), ": ", a.argument)));
    }
    return rule;
  }

  // The last that applies.
  std::optional<int64_t> StackDimsOf(const std::string& name, int64_t dimensions) const {
    std::optional<int64_t> dims;
    for (const StackDims& s : stack_dims_) {
      if (s.pattern.has_value() ? Matches(*s.pattern, name) : dimensions > 2) dims = s.dims;
    }
    return dims;
  }

  // That every pattern matches one of the names.
  absl::Status CheckPatterns(const std::vector<GradientSeries>& series) const {
    std::vector<std::string_view> names;
    for (const GradientSeries& s : series) names.push_back(s.name);
    const auto check = [&](const std::string& pattern, const char* option) {
      for (std::string_view name : names) {
        if (Matches(pattern, std::string(name))) return absl::OkStatus();
      }
      const std::string nearest = PrintableName(NearestName(pattern, names));
      return absl::InvalidArgumentError(
          absl::StrCat(option, ": no parameter is called ", PrintableName(pattern),
                       nearest.empty() ? "" : "; the nearest is ", nearest));
    };
    for (const NamedRule& r : rules_) STIEFEL_RETURN_IF_ERROR(check(r.pattern, "--rule"));
    for (const Assignment& a : set_) {
      if (a.pattern.has_value()) STIEFEL_RETURN_IF_ERROR(check(*a.pattern, "--set"));
    }
    for (const StackDims& s : stack_dims_) {
      if (s.pattern.has_value()) STIEFEL_RETURN_IF_ERROR(check(*s.pattern, "--stack-dims"));
    }
    return absl::OkStatus();
  }

  // That what is said without a pattern is said of one of the parameters.
  absl::Status CheckDefaults(const std::vector<GradientSeries>& series) const {
    const bool preset_used = std::any_of(series.begin(), series.end(), [&](const auto& s) {
      return std::none_of(rules_.begin(), rules_.end(),
                          [&](const NamedRule& rule) { return Matches(rule.pattern, s.name); });
    });
    const bool stacks = std::any_of(series.begin(), series.end(),
                                    [](const GradientSeries& s) { return s.shape.size() > 2; });
    for (const Assignment& a : set_) {
      if (a.pattern.has_value() || preset_used) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          a.argument,
          " is for the parameters that have their rule from --preset, but every one has "
          "it from a --rule; write it into the --rule, or --set 'PATTERN:",
          PrintableName(a.key), "=", PrintableName(a.value), "'"));
    }
    for (const StackDims& s : stack_dims_) {
      if (s.pattern.has_value() || stacks) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("--stack-dims ", s.dims,
                       " is for parameters of 3 and more dimensions, and there are none"));
    }
    return absl::OkStatus();
  }

 private:
  std::string preset_;
  std::vector<NamedRule> rules_;
  std::vector<Assignment> set_;
  std::vector<StackDims> stack_dims_;
};

// Fills matrices, rows and cols from the shape.
absl::Status MapShape(std::optional<int64_t> stack_dims, ApplyParameter* parameter) {
  const GradientSeries& gradients = parameter->gradients;
  STIEFEL_ASSIGN_OR_RETURN(
      const ParameterShape shape,
      ShapeOfParameter(gradients.name, gradients.shape, stack_dims, parameter->rule));
  parameter->matrices = static_cast<int64_t>(shape.matrices.size());
  parameter->rows = shape.matrices.front().rows;
  parameter->cols = shape.matrices.front().cols;
  return absl::OkStatus();
}

absl::Status FindPartners(std::vector<ApplyParameter>* parameters) {
  for (ApplyParameter& p : *parameters) {
    if (p.rule.family != RuleFamily::kPolora) continue;
    const std::string name = PrintableName(p.gradients.name);
    const auto found =
        std::find_if(parameters->begin(), parameters->end(),
                     [&](const ApplyParameter& q) { return q.gradients.name == p.rule.pair; });
    if (found == parameters->end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, ": the other factor, pair=\"", PrintableName(p.rule.pair),
          "\", is not among the gradients; set it with --set '", name, ":pair=OTHER'"));
    }
    p.partner = found - parameters->begin();
    STIEFEL_RETURN_IF_ERROR(ValidatePair(p.gradients.name, p.rule, p.rows, p.cols,
                                         found->gradients.name, found->rule, found->rows,
                                         found->cols));
    if (p.matrices != found->matrices) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is ", p.matrices, " matrices and its other factor ",
                       PrintableName(p.rule.pair), " ", found->matrices));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<ApplyParameter>> AssignRules(std::vector<GradientSeries> series,
                                                        const RuleArguments& arguments) {
  STIEFEL_ASSIGN_OR_RETURN(const RuleTable table, RuleTable::Make(arguments));
  STIEFEL_RETURN_IF_ERROR(table.CheckPatterns(series));
  STIEFEL_RETURN_IF_ERROR(table.CheckDefaults(series));
  std::vector<ApplyParameter> parameters;
  for (GradientSeries& s : series) {
    ApplyParameter parameter;
    parameter.gradients = std::move(s);
    const std::string& name = parameter.gradients.name;
    STIEFEL_ASSIGN_OR_RETURN(parameter.rule, table.RuleOf(name));
    const int64_t dimensions = static_cast<int64_t>(parameter.gradients.shape.size());
    STIEFEL_RETURN_IF_ERROR(MapShape(table.StackDimsOf(name, dimensions), &parameter));
    if (parameter.rule.phase_mode == PhaseMode::kNumber) parameter.phase = parameter.rule.phase;
    parameters.push_back(std::move(parameter));
  }
  STIEFEL_RETURN_IF_ERROR(FindPartners(&parameters));
  return parameters;
}

}  // namespace stiefel
