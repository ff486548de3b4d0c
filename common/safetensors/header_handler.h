// Inside of format.cc: the JSON of a header, event by event, so that no text can make it build
// anything but tensors.
#ifndef STIEFEL_COMMON_SAFETENSORS_HEADER_HANDLER_H_
#define STIEFEL_COMMON_SAFETENSORS_HEADER_HANDLER_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/safetensors/format.h"

namespace stiefel {

// The text in quotes, escaped, cut to 64 bytes: for messages.
std::string QuotedName(absl::string_view name);

// Appends what the text says, in its order. Errors: those of SafetensorsIndex::Parse that concern
// the text alone.
absl::Status ParseHeaderJson(absl::string_view json, std::vector<TensorInfo>* tensors,
                             std::map<std::string, std::string>* metadata);

}  // namespace stiefel

#endif  // STIEFEL_COMMON_SAFETENSORS_HEADER_HANDLER_H_
