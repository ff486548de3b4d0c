#ifndef STIEFEL_SERVER_UNKNOWN_FIELDS_H_
#define STIEFEL_SERVER_UNKNOWN_FIELDS_H_

#include "absl/status/status.h"
#include "google/protobuf/message.h"

namespace stiefel {

// INVALID_ARGUMENT names the first field, at any depth, that this build does not know: a request
// that changes something must not be obeyed in part (CASES E18).
absl::Status RefuseUnknownFields(const google::protobuf::Message& message);

}  // namespace stiefel

#endif  // STIEFEL_SERVER_UNKNOWN_FIELDS_H_
