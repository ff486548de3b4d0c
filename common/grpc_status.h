#ifndef STIEFEL_COMMON_GRPC_STATUS_H_
#define STIEFEL_COMMON_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

// The only place where the two status types meet.

namespace stiefel {

// Longest message sent, in bytes. gRPC percent-encodes it into HTTP/2 trailers (up to three bytes
// for one), which peers limit to 16 KiB together; a longer message would turn the error into
// another, worse one.
inline constexpr int kMaxStatusMessageBytes = 4096;

// Code and message. Codes that gRPC lacks become UNKNOWN; a message longer than
// kMaxStatusMessageBytes is cut at a UTF-8 boundary and ends with "...". Payloads are not carried.
grpc::Status ToGrpcStatus(const absl::Status& status);

// Code and message. A code out of absl's range becomes kUnknown. Details are not carried.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace stiefel

#endif  // STIEFEL_COMMON_GRPC_STATUS_H_
