#include "tests/faults/scripted_model.h"

#include <cstdio>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/checksum.h"
#include "common/status.h"

namespace stiefel {
namespace {

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

std::vector<float> Noise(uint64_t key, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<int32_t>(Mix(key + static_cast<uint64_t>(i)) >> 32);
    values[i] = static_cast<float>(bits >> 8) * 0x1p-23f;
  }
  return values;
}

int64_t Elements(const ParameterSpec& spec) { return spec.rows() * spec.cols(); }

}  // namespace

absl::StatusOr<std::vector<ParameterSpec>> ParseShapes(const std::string& shapes,
                                                       const std::string& preset, DType wire) {
  std::vector<ParameterSpec> specs;
  for (const std::string& item : std::vector<std::string>(absl::StrSplit(shapes, ','))) {
    const std::vector<std::string> parts = absl::StrSplit(item, '*');
    int64_t copies = 1;
    if (parts.size() > 2 || (parts.size() == 2 && !absl::SimpleAtoi(parts[1], &copies))) {
      return absl::InvalidArgumentError(absl::StrCat("'", item, "' is not ROWSxCOLS*COPIES"));
    }
    std::vector<int64_t> shape;
    for (const std::string& size : std::vector<std::string>(absl::StrSplit(parts[0], 'x'))) {
      int64_t value = 0;
      if (!absl::SimpleAtoi(size, &value)) {
        return absl::InvalidArgumentError(absl::StrCat("'", item, "' is not ROWSxCOLS*COPIES"));
      }
      shape.push_back(value);
    }
    STIEFEL_ASSIGN_OR_RETURN(const Rule rule,
                             PresetRule(shape.size() == 1 ? std::string("adamw") : preset));
    for (int64_t copy = 0; copy < copies; ++copy) {
      ParameterSpec spec;
      spec.name = absl::StrCat("p", specs.size());
      spec.shape = shape;
      spec.rule = rule;
      spec.push_dtype = wire;
      specs.push_back(std::move(spec));
    }
  }
  return specs;
}

TensorView Tensor::View(const Rect& rect) const {
  const int64_t begin = rect.row_begin * cols + rect.col_begin;
  return {words.data() + begin * DTypeSize(dtype) / 2,
          ToElementType(dtype),
          {rect.rows(), rect.cols()},
          {}};
}

Tensor MakeGradient(const ParameterSpec& spec, uint64_t seed, int64_t step, int32_t rank,
                    int32_t index) {
  uint64_t key = Mix(seed);
  for (int64_t part : {step, int64_t{rank}, int64_t{index}}) {
    key = Mix(key ^ static_cast<uint64_t>(part));
  }
  const std::vector<float> values = Noise(key, Elements(spec));
  Tensor tensor;
  tensor.dtype = spec.push_dtype;
  tensor.cols = spec.cols();
  tensor.words.resize(values.size() * static_cast<size_t>(DTypeSize(tensor.dtype)) / 2);
  Convert(values.data(), DType::kFp32, tensor.words.data(), tensor.dtype, Elements(spec));
  return tensor;
}

Weights::Weights(const std::vector<ParameterSpec>& specs, uint64_t seed) {
  for (const ParameterSpec& spec : specs) {
    shapes_.push_back(spec.shape);
    values_.push_back(Noise(Mix(~seed) + Mix(values_.size()), Elements(spec)));
  }
}

std::vector<MutableTensorView> Weights::Views() {
  std::vector<MutableTensorView> views;
  for (size_t i = 0; i < values_.size(); ++i) {
    views.push_back({values_[i].data(), ElementType::kFp32, shapes_[i], {}});
  }
  return views;
}

uint64_t Weights::Hash() const {
  Hash64 hash;
  for (const std::vector<float>& values : values_) {
    hash.Update(values.data(), values.size() * sizeof(float));
  }
  return hash.Digest();
}

absl::Status Weights::Save(const std::string& path, int64_t step) const {
  const std::string temporary = path + ".new";
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&step), sizeof(step));
  for (const std::vector<float>& values : values_) {
    file.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(float)));
  }
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnknownError(absl::StrCat("cannot write ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Weights::Load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("no snapshot ", path));
  int64_t step = 0;
  file.read(reinterpret_cast<char*>(&step), sizeof(step));
  for (std::vector<float>& values : values_) {
    file.read(reinterpret_cast<char*>(values.data()),
              static_cast<std::streamsize>(values.size() * sizeof(float)));
  }
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    return absl::DataLossError(absl::StrCat(path, " is not a snapshot of this model"));
  }
  return step;
}

}  // namespace stiefel
