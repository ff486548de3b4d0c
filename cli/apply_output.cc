#include "cli/apply_output.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel {
namespace {

// The shape of a state buffer in the file.
std::vector<int64_t> StateShape(const ApplyParameter& p, const StateBuffer& buffer) {
  if (buffer.elementwise) return p.gradients.shape;
  if (p.matrices == 1) return {buffer.rows, buffer.cols};
  return {p.matrices, buffer.rows, buffer.cols};
}

std::map<std::string, std::string> Metadata(const std::string& backend_name,
                                            const ApplyBackend& backend,
                                            const std::vector<ApplyParameter>& parameters) {
  std::map<std::string, std::string> metadata = {
      {"producer", "stiefelctl apply"},
      {"backend", backend_name},
      {"device", backend.Description()},
      {"steps", absl::StrCat(parameters.front().gradients.steps.size())}};
  for (const ApplyParameter& p : parameters) {
    metadata.emplace(absl::StrCat("rule/", p.gradients.name), RuleText(p.rule));
    if (p.rule.period > 1) {
      metadata.emplace(absl::StrCat("phase/", p.gradients.name), absl::StrCat(p.phase));
    }
  }
  return metadata;
}

// Writes one piece of every matrix of a parameter, one after the other, into a tensor.
template <typename Piece>
absl::Status WriteStack(SafetensorsWriter* writer, int64_t tensor, int64_t matrices, int64_t bytes,
                        const Piece& piece) {
  for (int64_t i = 0; i < matrices; ++i) {
    STIEFEL_RETURN_IF_ERROR(writer->Write(tensor, i * bytes, piece(i), bytes));
  }
  return absl::OkStatus();
}

}  // namespace

std::string RuleText(const Rule& rule) {
  std::string text = rule.preset;
  for (const auto& [key, value] : Options(rule)) absl::StrAppend(&text, " ", key, "=", value);
  return text;
}

std::vector<TensorSpec> ApplyOutput::Declare(bool with_weights) {
  const std::string dtype(backend_->dtype());
  std::vector<TensorSpec> specs;
  const auto declare = [&](const std::string& name, const std::vector<int64_t>& shape) {
    specs.push_back({name, dtype, shape});
    return static_cast<int64_t>(specs.size()) - 1;
  };
  for (const ApplyParameter& p : parameters_) {
    const std::string& name = p.gradients.name;
    Tensors tensors;
    for (const std::string& delta : p.gradients.deltas) {
      tensors.deltas.push_back(declare(delta, p.gradients.shape));
    }
    for (const StateBuffer& buffer : RuleState(p.rule, p.rows, p.cols)) {
      tensors.state.push_back(
          declare(absl::StrCat(kStatePrefix, name, "/", buffer.name), StateShape(p, buffer)));
    }
    if (with_weights) {
      tensors.weights = declare(absl::StrCat(kWeightsPrefix, name), p.gradients.shape);
    }
    tensors_.push_back(std::move(tensors));
  }
  return specs;
}

absl::StatusOr<std::unique_ptr<ApplyOutput>> ApplyOutput::Create(
    const std::string& path, ExistingFile existing, const std::string& backend_name,
    const std::vector<ApplyParameter>& parameters, bool with_weights, const ApplyBackend* backend) {
  std::unique_ptr<ApplyOutput> output(new ApplyOutput(parameters, backend));
  STIEFEL_ASSIGN_OR_RETURN(
      output->writer_,
      SafetensorsWriter::Create(path, output->Declare(with_weights),
                                Metadata(backend_name, *backend, parameters), existing));
  return output;
}

absl::Status ApplyOutput::WriteDeltas(int64_t step) {
  const int64_t element = *TensorDTypeBytes(absl::string_view(backend_->dtype().data(), 3));
  int64_t first = 0;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const ApplyParameter& parameter = parameters_[p];
    STIEFEL_RETURN_IF_ERROR(WriteStack(writer_.get(), tensors_[p].deltas[step - 1],
                                       parameter.matrices,
                                       parameter.rows * parameter.cols * element,
                                       [&](int64_t i) { return backend_->Delta(first + i); }));
    first += parameter.matrices;
  }
  return absl::OkStatus();
}

absl::Status ApplyOutput::Finish() {
  const int64_t element = *TensorDTypeBytes(absl::string_view(backend_->dtype().data(), 3));
  int64_t first = 0;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const ApplyParameter& parameter = parameters_[p];
    const std::vector<StateBuffer> buffers =
        RuleState(parameter.rule, parameter.rows, parameter.cols);
    for (size_t b = 0; b < buffers.size(); ++b) {
      STIEFEL_RETURN_IF_ERROR(WriteStack(
          writer_.get(), tensors_[p].state[b], parameter.matrices,
          buffers[b].rows * buffers[b].cols * element,
          [&](int64_t i) { return backend_->State(first + i, static_cast<int64_t>(b)); }));
    }
    if (tensors_[p].weights >= 0) {
      STIEFEL_RETURN_IF_ERROR(WriteStack(writer_.get(), tensors_[p].weights, parameter.matrices,
                                         parameter.rows * parameter.cols * element,
                                         [&](int64_t i) { return backend_->Weights(first + i); }));
    }
    first += parameter.matrices;
  }
  return writer_->Publish();
}

}  // namespace stiefel
