#include "plan/model.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/pairs.h"
#include "plan/shape.h"

namespace stiefel {
namespace {

using Json = nlohmann::json;

// A model is an object with a list of objects with lists and objects. Deeper text is refused before
// anything recurses.
constexpr int kMaxDepth = 8;

absl::Status Bad(absl::string_view where, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
}

// A value as the user wrote it, cut to what fits a message.
std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

// Options that say nothing keep the default.
struct Settings {
  std::string preset = "muon";
  std::vector<std::pair<std::string, std::string>> options;
  DType push_dtype = DType::kFp32;
  DType pull_dtype = DType::kFp32;
  int32_t group = 0;
};

absl::StatusOr<Json> ParseJson(absl::string_view text) {
  // nlohmann keeps the last of two equal keys in silence; this watches them go by, one set for each
  // open object.
  std::vector<std::set<std::string>> keys;
  std::string error;
  const auto watch = [&keys, &error](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) {
      error = absl::StrCat("nested more than ", kMaxDepth, " deep");
      return false;
    }
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      error = absl::StrCat("key '", value.get<std::string>(), "' is given twice");
    }
    return true;
  };
  try {
    Json json = Json::parse(text.begin(), text.end(), watch);
    if (!error.empty()) return Bad("model", error);
    return json;
  } catch (const Json::exception& exception) {
    return Bad("model is not JSON", exception.what());
  }
}

absl::Status CheckKeys(const Json& object, absl::string_view where,
                       std::initializer_list<const char*> known) {
  if (!object.is_object())
    return Bad(where, absl::StrCat("expected an object, got ", Shown(object)));
  for (const auto& item : object.items()) {
    if (std::find(known.begin(), known.end(), item.key()) == known.end()) {
      return Bad(where, absl::StrCat("unknown key ", Shown(Json(item.key())), "; known are ",
                                     absl::StrJoin(known, ", ")));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> String(const Json& value, absl::string_view where) {
  if (!value.is_string() || value.get_ref<const std::string&>().empty()) {
    return Bad(where, absl::StrCat("expected text that is not empty, got ", Shown(value)));
  }
  return value.get<std::string>();
}

absl::StatusOr<int64_t> Integer(const Json& value, absl::string_view where, int64_t min,
                                int64_t max) {
  const bool in_range =
      value.is_number_unsigned()
          ? value.get<uint64_t>() <= static_cast<uint64_t>(max) &&
                static_cast<int64_t>(value.get<uint64_t>()) >= min
          : value.is_number_integer() && value.get<int64_t>() >= min && value.get<int64_t>() <= max;
  if (!in_range) {
    return Bad(where,
               absl::StrCat("expected an integer from ", min, " to ", max, ", got ", Shown(value)));
  }
  return value.get<int64_t>();
}

absl::StatusOr<DType> WireDType(const Json& value, absl::string_view where) {
  STIEFEL_ASSIGN_OR_RETURN(const std::string name, String(value, where));
  const absl::StatusOr<DType> dtype = ParseDType(name);
  if (!dtype.ok()) return Bad(where, dtype.status().message());
  return *dtype;
}

absl::Status AddOptions(const Json& set, absl::string_view where, Settings* settings) {
  if (!set.is_object()) return Bad(where, absl::StrCat("expected an object, got ", Shown(set)));
  for (const auto& item : set.items()) {
    const Json& value = item.value();
    if (!value.is_primitive() || value.is_null()) {
      return Bad(where, absl::StrCat("option ", Shown(Json(item.key())),
                                     " must be text, a number or a boolean, got ", Shown(value)));
    }
    settings->options.emplace_back(item.key(),
                                   value.is_string() ? value.get<std::string>() : value.dump());
  }
  return absl::OkStatus();
}

// Reads the keys that "default" and a parameter share.
absl::Status ReadSettings(const Json& object, const std::string& where, Settings* settings) {
  if (const auto it = object.find("preset"); it != object.end()) {
    STIEFEL_ASSIGN_OR_RETURN(settings->preset, String(*it, absl::StrCat(where, ".preset")));
    settings->options.clear();
  }
  if (const auto it = object.find("set"); it != object.end()) {
    STIEFEL_RETURN_IF_ERROR(AddOptions(*it, absl::StrCat(where, ".set"), settings));
  }
  if (const auto it = object.find("push_dtype"); it != object.end()) {
    STIEFEL_ASSIGN_OR_RETURN(settings->push_dtype,
                             WireDType(*it, absl::StrCat(where, ".push_dtype")));
    settings->pull_dtype = settings->push_dtype;
  }
  if (const auto it = object.find("pull_dtype"); it != object.end()) {
    STIEFEL_ASSIGN_OR_RETURN(settings->pull_dtype,
                             WireDType(*it, absl::StrCat(where, ".pull_dtype")));
  }
  if (const auto it = object.find("group"); it != object.end()) {
    STIEFEL_ASSIGN_OR_RETURN(const int64_t group, Integer(*it, absl::StrCat(where, ".group"), 0,
                                                          std::numeric_limits<int32_t>::max()));
    settings->group = static_cast<int32_t>(group);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> ReadShape(const Json& shape, const std::string& where) {
  if (!shape.is_array()) {
    return Bad(where, absl::StrCat("expected a list of sizes, got ", Shown(shape)));
  }
  std::vector<int64_t> sizes;
  for (const Json& size : shape) {
    STIEFEL_ASSIGN_OR_RETURN(sizes.emplace_back(),
                             Integer(size, where, 1, std::numeric_limits<int64_t>::max()));
  }
  return sizes;
}

absl::StatusOr<Rule> MakeRule(const Settings& settings) {
  STIEFEL_ASSIGN_OR_RETURN(Rule rule, PresetRule(settings.preset));
  for (const auto& [key, value] : settings.options) {
    STIEFEL_RETURN_IF_ERROR(SetOption(rule, key, value));
  }
  return rule;
}

// The matrices of the parameter, by its shape and rule.
absl::StatusOr<ParameterShape> ReadMatrices(const Json& object, const std::string& where,
                                            const Settings& settings) {
  STIEFEL_ASSIGN_OR_RETURN(const std::vector<int64_t> sizes,
                           ReadShape(object["shape"], absl::StrCat(where, ".shape")));
  std::optional<int64_t> stack_dims;
  if (const auto it = object.find("stack_dims"); it != object.end()) {
    STIEFEL_ASSIGN_OR_RETURN(stack_dims, Integer(*it, absl::StrCat(where, ".stack_dims"), 0,
                                                 std::numeric_limits<int32_t>::max()));
  }
  const absl::StatusOr<Rule> rule = MakeRule(settings);
  if (!rule.ok()) return Bad(where, rule.status().message());
  absl::StatusOr<ParameterShape> shape =
      ShapeOfParameter(object["name"].get<std::string>(), sizes, stack_dims, *rule);
  if (!shape.ok()) return Bad(where, shape.status().message());
  return shape;
}

absl::Status ReadParameter(const Json& object, int64_t index, const Settings& defaults,
                           std::vector<ModelParameter>* parameters) {
  std::string where = absl::StrCat("parameters[", index, "]");
  STIEFEL_RETURN_IF_ERROR(CheckKeys(
      object, where,
      {"name", "shape", "stack_dims", "preset", "set", "push_dtype", "pull_dtype", "group"}));
  for (const char* key : {"name", "shape"}) {
    if (!object.contains(key)) return Bad(where, absl::StrCat("'", key, "' is missing"));
  }
  STIEFEL_RETURN_IF_ERROR(String(object["name"], absl::StrCat(where, ".name")).status());
  where = absl::StrCat("parameter ", Shown(object["name"]));
  Settings settings = defaults;
  STIEFEL_RETURN_IF_ERROR(ReadSettings(object, where, &settings));
  STIEFEL_ASSIGN_OR_RETURN(ParameterShape shape, ReadMatrices(object, where, settings));
  if (parameters->size() + shape.matrices.size() > kMaxModelParameters) {
    return Bad(where, absl::StrCat("its ", shape.matrices.size(), " matrices are more than the ",
                                   kMaxModelParameters, " that a model may have"));
  }
  for (StackedMatrix& matrix : shape.matrices) {
    ModelParameter parameter;
    parameter.matrix = {std::move(matrix.name), matrix.rows,         matrix.cols,
                        std::move(matrix.rule), settings.push_dtype, settings.pull_dtype};
    parameter.dimensions = shape.dimensions;
    parameter.group = settings.group;
    parameters->push_back(std::move(parameter));
  }
  return absl::OkStatus();
}

// Every "{}" in every text of `value` becomes `number`.
void FillIn(int64_t number, Json* value) {
  if (value->is_string()) {
    *value =
        absl::StrReplaceAll(value->get_ref<const std::string&>(), {{"{}", absl::StrCat(number)}});
  } else if (value->is_structured()) {
    for (Json& element : *value) FillIn(number, &element);
  }
}

// "parameters" of the model, or of a group that is repeated.
absl::Status ReadList(const Json& object, const std::string& where, const Settings& defaults,
                      bool may_repeat, std::vector<ModelParameter>* parameters);

// {"repeat": 60, "first": 1, "parameters": [...]}
absl::Status ReadRepeated(const Json& object, const std::string& where, const Settings& defaults,
                          std::vector<ModelParameter>* parameters) {
  STIEFEL_RETURN_IF_ERROR(CheckKeys(object, where, {"repeat", "first", "parameters"}));
  STIEFEL_ASSIGN_OR_RETURN(
      const int64_t count,
      Integer(object["repeat"], absl::StrCat(where, ".repeat"), 1, kMaxModelParameters));
  int64_t first = 0;
  if (const auto it = object.find("first"); it != object.end()) {
    STIEFEL_ASSIGN_OR_RETURN(first,
                             Integer(*it, absl::StrCat(where, ".first"), 0, kMaxModelParameters));
  }
  for (int64_t number = first; number < first + count; ++number) {
    Json filled = object;
    FillIn(number, &filled);
    STIEFEL_RETURN_IF_ERROR(
        ReadList(filled, absl::StrCat(where, ", number ", number), defaults, false, parameters));
  }
  return absl::OkStatus();
}

absl::Status ReadList(const Json& object, const std::string& where, const Settings& defaults,
                      bool may_repeat, std::vector<ModelParameter>* parameters) {
  if (!object.contains("parameters") || !object["parameters"].is_array()) {
    return Bad(where, "'parameters' must be a list");
  }
  const Json& list = object["parameters"];
  if (list.size() > kMaxModelParameters) {
    return Bad(where, absl::StrCat("'parameters' has ", list.size(), " entries; the most is ",
                                   kMaxModelParameters));
  }
  for (size_t i = 0; i < list.size(); ++i) {
    if (may_repeat && list[i].is_object() && list[i].contains("repeat")) {
      STIEFEL_RETURN_IF_ERROR(
          ReadRepeated(list[i], absl::StrCat("parameters[", i, "]"), defaults, parameters));
    } else {
      STIEFEL_RETURN_IF_ERROR(
          ReadParameter(list[i], static_cast<int64_t>(i), defaults, parameters));
    }
  }
  return absl::OkStatus();
}

// Whether a parameter of a list that was read takes the default rule.
bool TakesDefault(const Json& list) {
  return std::any_of(list.begin(), list.end(), [](const Json& entry) {
    return entry.contains("repeat") ? TakesDefault(entry["parameters"]) : !entry.contains("preset");
  });
}

// Names are unique, and pairs meet.
absl::Status CheckModel(ModelSpec* model) {
  std::set<absl::string_view> names;
  bool pairs = false;
  for (const ModelParameter& parameter : model->parameters) {
    if (!names.insert(parameter.matrix.name).second) {
      return DuplicateName("parameter", parameter.matrix.name);
    }
    pairs |= parameter.matrix.rule.family == RuleFamily::kPolora;
  }
  if (!pairs) return absl::OkStatus();
  std::vector<PlanMatrix> matrices = Matrices(*model);
  STIEFEL_RETURN_IF_ERROR(ResolvePairs(&matrices));
  for (size_t i = 0; i < matrices.size(); ++i) {
    model->parameters[i].matrix.partner_elements = matrices[i].partner_elements;
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelSpec> ParseModel(absl::string_view text, const ModelOverrides& overrides) {
  STIEFEL_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  STIEFEL_RETURN_IF_ERROR(CheckKeys(json, "model", {"name", "default", "parameters"}));
  ModelSpec model;
  if (json.contains("name")) {
    STIEFEL_ASSIGN_OR_RETURN(model.name, String(json["name"], "name"));
  }
  Settings defaults;
  if (json.contains("default")) {
    STIEFEL_RETURN_IF_ERROR(CheckKeys(json["default"], "default",
                                      {"preset", "set", "push_dtype", "pull_dtype", "group"}));
    STIEFEL_RETURN_IF_ERROR(ReadSettings(json["default"], "default", &defaults));
  }
  if (!overrides.preset.empty()) {
    defaults.preset = overrides.preset;
    defaults.options.clear();
  }
  defaults.options.insert(defaults.options.end(), overrides.options.begin(),
                          overrides.options.end());

  STIEFEL_RETURN_IF_ERROR(
      ReadList(json, "model", defaults, /*may_repeat=*/true, &model.parameters));
  if (model.parameters.empty()) return Bad("model", "'parameters' is empty");
  const bool overridden = !overrides.preset.empty() || !overrides.options.empty();
  if (overridden && !TakesDefault(json["parameters"])) {
    const std::string what = overrides.options.empty()
                                 ? absl::StrCat("preset ", overrides.preset)
                                 : absl::StrCat("option ", overrides.options.front().first, "=",
                                                overrides.options.front().second);
    return Bad(what, "it is for parameters that name no preset, and every one names its own");
  }
  STIEFEL_RETURN_IF_ERROR(CheckModel(&model));
  return model;
}

absl::StatusOr<ModelSpec> ReadModel(const std::string& path, const ModelOverrides& overrides) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (file.bad()) return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  absl::StatusOr<ModelSpec> model = ParseModel(text, overrides);
  if (!model.ok()) {
    return absl::Status(model.status().code(), absl::StrCat(path, ": ", model.status().message()));
  }
  return model;
}

std::vector<PlanMatrix> Matrices(const ModelSpec& model) {
  std::vector<PlanMatrix> matrices;
  matrices.reserve(model.parameters.size());
  for (const ModelParameter& parameter : model.parameters) matrices.push_back(parameter.matrix);
  return matrices;
}

}  // namespace stiefel
