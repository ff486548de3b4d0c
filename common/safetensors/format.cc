#include "common/safetensors/format.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checked_math.h"
#include "common/safetensors/header_handler.h"
#include "common/status.h"

namespace stiefel {
namespace {

constexpr char kMetadataKey[] = "__metadata__";
constexpr int64_t kHeadAlignment = 64;

// That the bytes of a tensor are those of its shape.
absl::Status CheckSize(const TensorInfo& tensor) {
  const std::string what = absl::StrCat("tensor ", QuotedName(tensor.name), ": ");
  if (tensor.begin > tensor.end) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, "data_offsets [", tensor.begin, ", ", tensor.end, "] run backwards"));
  }
  const absl::StatusOr<int64_t> elements = TensorElements(tensor.shape);
  if (!elements.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(what, std::string(elements.status().message())));
  }
  const std::optional<int64_t> element = TensorDTypeBytes(tensor.dtype);
  if (!element.has_value()) return absl::OkStatus();
  int64_t bytes = 0;
  if (!CheckedMul(*elements, *element, &bytes) || bytes != tensor.end - tensor.begin) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, *elements, " elements of ", tensor.dtype, " do not fill data_offsets [", tensor.begin,
        ", ", tensor.end, "], which are ", tensor.end - tensor.begin, " bytes"));
  }
  return absl::OkStatus();
}

// REQUIRES: ascending by begin, then end.
absl::Status CheckCover(const std::vector<TensorInfo>& tensors, int64_t data_bytes) {
  int64_t end = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin != end) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", QuotedName(tensor.name), " begins at byte ", tensor.begin, " of the data, ",
          tensor.begin > end ? "leaving a gap after" : "overlapping the one before, which ends at",
          " byte ", end));
    }
    end = tensor.end;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensors fill ", end, " bytes, but the file has ", data_bytes,
                     " after its header", end > data_bytes ? ": it is truncated" : ""));
  }
  return absl::OkStatus();
}

// "tensor ... given twice" if two have one name; otherwise their indices ascending by name.
template <typename Named>
absl::StatusOr<std::vector<int64_t>> ByName(const std::vector<Named>& tensors) {
  std::vector<int64_t> order(tensors.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return tensors[a].name < tensors[b].name; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (tensors[order[i]].name == tensors[order[i - 1]].name) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", QuotedName(tensors[order[i]].name), " is there twice"));
    }
  }
  return order;
}

// JSON text of a string. INVALID_ARGUMENT where it is not UTF-8.
absl::StatusOr<std::string> JsonText(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::type_error&) {
    return absl::InvalidArgumentError(absl::StrCat(QuotedName(text), " is not UTF-8"));
  }
}

absl::StatusOr<std::string> EntryText(const TensorSpec& tensor, int64_t begin, int64_t bytes) {
  STIEFEL_ASSIGN_OR_RETURN(const std::string name, JsonText(tensor.name));
  return absl::StrCat(name, ":{\"dtype\":\"", tensor.dtype, "\",\"shape\":[",
                      absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", begin, ",",
                      begin + bytes, "]}");
}

absl::StatusOr<std::string> MetadataText(const std::map<std::string, std::string>& metadata) {
  std::string text = absl::StrCat("\"", kMetadataKey, "\":{");
  for (const auto& [key, value] : metadata) {
    STIEFEL_ASSIGN_OR_RETURN(const std::string key_text, JsonText(key));
    STIEFEL_ASSIGN_OR_RETURN(const std::string value_text, JsonText(value));
    absl::StrAppend(&text, text.back() == '{' ? "" : ",", key_text, ":", value_text);
  }
  return text + "}";
}

// Bytes of a tensor to be written.
absl::StatusOr<int64_t> SizeOf(const TensorSpec& tensor) {
  const std::string what = absl::StrCat("tensor ", QuotedName(tensor.name), ": ");
  const std::optional<int64_t> element = TensorDTypeBytes(tensor.dtype);
  if (!element.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, "unknown dtype ", QuotedName(tensor.dtype)));
  }
  STIEFEL_ASSIGN_OR_RETURN(const int64_t elements, TensorElements(tensor.shape));
  int64_t bytes = 0;
  if (!CheckedMul(elements, *element, &bytes)) {
    return absl::InvalidArgumentError(absl::StrCat(what, ShapeText(tensor.shape), " of ",
                                                   tensor.dtype, " is 2^63 bytes or more"));
  }
  return bytes;
}

void AppendLength(std::string* out, uint64_t length) {
  for (int64_t i = 0; i < kSafetensorsLengthBytes; ++i) {
    out->push_back(static_cast<char>(length >> (8 * i)));
  }
}

}  // namespace

std::optional<int64_t> TensorDTypeBytes(absl::string_view dtype) {
  static constexpr std::pair<absl::string_view, int64_t> kSizes[] = {
      {"F64", 8},  {"F32", 4}, {"F16", 2},     {"BF16", 2},    {"I64", 8},    {"I32", 4},
      {"I16", 2},  {"I8", 1},  {"U64", 8},     {"U32", 4},     {"U16", 2},    {"U8", 1},
      {"BOOL", 1}, {"C64", 8}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1}};
  for (const auto& [name, size] : kSizes) {
    if (name == dtype) return size;
  }
  return std::nullopt;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<int64_t> TensorElements(const std::vector<int64_t>& shape) {
  if (static_cast<int64_t>(shape.size()) > kMaxTensorDimensions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a shape of ", shape.size(), " dimensions; at most ", kMaxTensorDimensions, " are read"));
  }
  int64_t elements = 1;
  for (int64_t size : shape) {
    if (size < 0 || !CheckedMul(elements, size, &elements)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ShapeText(shape),
                       size < 0 ? " has a negative size" : " has 2^63 elements or more"));
    }
  }
  return elements;
}

absl::StatusOr<SafetensorsIndex> SafetensorsIndex::Parse(absl::string_view json,
                                                         int64_t data_bytes) {
  SafetensorsIndex index;
  STIEFEL_RETURN_IF_ERROR(ParseHeaderJson(json, &index.tensors_, &index.metadata_));
  for (const TensorInfo& tensor : index.tensors_) STIEFEL_RETURN_IF_ERROR(CheckSize(tensor));
  std::sort(index.tensors_.begin(), index.tensors_.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  STIEFEL_RETURN_IF_ERROR(CheckCover(index.tensors_, data_bytes));
  STIEFEL_ASSIGN_OR_RETURN(index.by_name_, ByName(index.tensors_));
  return index;
}

const TensorInfo* SafetensorsIndex::Find(absl::string_view name) const {
  const auto found = std::lower_bound(
      by_name_.begin(), by_name_.end(), name,
      [&](int64_t i, absl::string_view wanted) { return tensors_[i].name < wanted; });
  if (found == by_name_.end() || tensors_[*found].name != name) return nullptr;
  return &tensors_[*found];
}

absl::StatusOr<SafetensorsLayout> LayOutSafetensors(
    const std::vector<TensorSpec>& tensors, const std::map<std::string, std::string>& metadata) {
  SafetensorsLayout layout;
  STIEFEL_ASSIGN_OR_RETURN(std::vector<int64_t> order, ByName(tensors));
  for (const TensorSpec& tensor : tensors) {
    if (tensor.name == kMetadataKey) {
      return absl::InvalidArgumentError(
          absl::StrCat("a tensor cannot be named ", kMetadataKey, ": the format keeps that name"));
    }
    STIEFEL_ASSIGN_OR_RETURN(const int64_t bytes, SizeOf(tensor));
    layout.sizes.push_back(bytes);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return *TensorDTypeBytes(tensors[a].dtype) > *TensorDTypeBytes(tensors[b].dtype);
  });

  std::string json = "{";
  if (!metadata.empty()) {
    STIEFEL_ASSIGN_OR_RETURN(const std::string text, MetadataText(metadata));
    json += text;
  }
  layout.begins.resize(tensors.size());
  for (int64_t i : order) {
    layout.begins[i] = layout.data_bytes;
    if (!CheckedAdd(layout.data_bytes, layout.sizes[i], &layout.data_bytes)) {
      return absl::InvalidArgumentError("the tensors together are 2^63 bytes or more");
    }
    STIEFEL_ASSIGN_OR_RETURN(const std::string entry,
                             EntryText(tensors[i], layout.begins[i], layout.sizes[i]));
    absl::StrAppend(&json, json.size() == 1 ? "" : ",", entry);
  }
  json += "}";
  while ((kSafetensorsLengthBytes + json.size()) % kHeadAlignment != 0) json += ' ';
  if (static_cast<int64_t>(json.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a header of ", json.size(), " bytes for ",
                                                   tensors.size(), " tensors; the format allows ",
                                                   kMaxSafetensorsHeaderBytes));
  }
  AppendLength(&layout.head, json.size());
  layout.head += json;
  return layout;
}

}  // namespace stiefel
