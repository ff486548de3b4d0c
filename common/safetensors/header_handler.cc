#include "common/safetensors/header_handler.h"

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace stiefel {
namespace {

using nlohmann::json;

constexpr size_t kMaxQuoted = 64;

// Where in the header the parser is. It never goes deeper than kNumbers, so a text that nests
// without end is refused at its fourth bracket.
enum class At { kOutside, kTensors, kMetadata, kTensor, kNumbers };

class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  HeaderHandler(std::vector<TensorInfo>* tensors, std::map<std::string, std::string>* metadata)
      : tensors_(tensors), metadata_(metadata) {}

  // OK until a callback has returned false.
  const absl::Status& status() const { return status_; }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override {
    return Unexpected(absl::StrCat("the number ", value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return Unexpected(absl::StrCat("the number ", text.substr(0, kMaxQuoted)));
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (at_ != At::kNumbers || value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return Unexpected(absl::StrCat("the number ", value));
    }
    if (static_cast<int64_t>(numbers_.size()) == kMaxTensorDimensions) {
      return Fail(absl::StrCat(Where(), " is one of more than ", kMaxTensorDimensions));
    }
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (at_ == At::kMetadata) {
      if (!metadata_->emplace(field_, value).second) return Twice();
      return true;
    }
    if (at_ != At::kTensor || field_ != "dtype") return Unexpected("a string");
    tensor_.dtype = value;
    return true;
  }

  bool start_object(size_t) override {
    if (at_ == At::kOutside) {
      at_ = At::kTensors;
      return true;
    }
    if (at_ != At::kTensors) return Unexpected("an object");
    if (name_ == "__metadata__") {
      if (seen_metadata_) return Fail("__metadata__ is there twice");
      seen_metadata_ = true;
      at_ = At::kMetadata;
      return true;
    }
    at_ = At::kTensor;
    tensor_ = TensorInfo();
    tensor_.name = name_;
    seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    return true;
  }

  bool key(string_t& key) override {
    (at_ == At::kTensors ? name_ : field_) = key;
    if (at_ != At::kTensor) return true;
    bool* seen = key == "dtype"          ? &seen_dtype_
                 : key == "shape"        ? &seen_shape_
                 : key == "data_offsets" ? &seen_offsets_
                                         : nullptr;
    if (seen == nullptr) {
      return Fail(absl::StrCat(Where(), " is unknown; a tensor has dtype, shape, data_offsets"));
    }
    if (*seen) return Twice();
    *seen = true;
    return true;
  }

  bool start_array(size_t) override {
    if (at_ != At::kTensor || field_ == "dtype") return Unexpected("an array");
    numbers_.clear();
    at_ = At::kNumbers;
    return true;
  }

  bool end_array() override {
    at_ = At::kTensor;
    if (field_ == "shape") {
      tensor_.shape = numbers_;
      return true;
    }
    if (numbers_.size() != 2) {
      return Fail(absl::StrCat(Where(), " has ", numbers_.size(), " numbers instead of 2"));
    }
    tensor_.begin = numbers_[0];
    tensor_.end = numbers_[1];
    return true;
  }

  bool end_object() override {
    if (at_ == At::kTensors) {
      at_ = At::kOutside;
      return true;
    }
    if (at_ == At::kTensor) {
      const char* missing = !seen_dtype_     ? "dtype"
                            : !seen_shape_   ? "shape"
                            : !seen_offsets_ ? "data_offsets"
                                             : nullptr;
      if (missing != nullptr) {
        return Fail(absl::StrCat("tensor ", QuotedName(tensor_.name), " has no ", missing));
      }
      tensors_->push_back(std::move(tensor_));
    }
    at_ = At::kTensors;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception& error) override {
    return Fail(absl::StrCat("no JSON at byte ", position, ": ", error.what()));
  }

 private:
  bool Fail(const std::string& message) {
    status_ = absl::InvalidArgumentError(message);
    return false;
  }
  bool Unexpected(const std::string& what) {
    return Fail(absl::StrCat(Where(), " is ", what, ", which does not belong there"));
  }
  bool Twice() { return Fail(absl::StrCat(Where(), " is there twice")); }

  std::string Where() const {
    switch (at_) {
      case At::kOutside:
        return "the header";
      case At::kTensors:
        return absl::StrCat("tensor ", QuotedName(name_));
      case At::kMetadata:
        return absl::StrCat("__metadata__ ", QuotedName(field_));
      case At::kTensor:
        return absl::StrCat("tensor ", QuotedName(tensor_.name), ": ", QuotedName(field_));
      case At::kNumbers:
        return absl::StrCat("tensor ", QuotedName(tensor_.name), ": a number of ", field_);
    }
    return "";
  }

  std::vector<TensorInfo>* const tensors_;
  std::map<std::string, std::string>* const metadata_;
  absl::Status status_;
  At at_ = At::kOutside;
  std::string name_, field_;
  std::vector<int64_t> numbers_;
  TensorInfo tensor_;
  bool seen_metadata_ = false;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
};

}  // namespace

std::string QuotedName(absl::string_view name) {
  return absl::StrCat("\"", absl::CEscape(name.substr(0, kMaxQuoted)),
                      name.size() > kMaxQuoted ? "...\"" : "\"");
}

absl::Status ParseHeaderJson(absl::string_view text, std::vector<TensorInfo>* tensors,
                             std::map<std::string, std::string>* metadata) {
  if (text.empty() || text[0] != '{') {
    return absl::InvalidArgumentError("the header does not begin with {");
  }
  HeaderHandler handler(tensors, metadata);
  json::sax_parse(text.begin(), text.end(), &handler);
  return handler.status();
}

}  // namespace stiefel
