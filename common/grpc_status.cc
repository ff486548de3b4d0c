#include "common/grpc_status.h"

#include <string>

#include "absl/strings/string_view.h"

namespace stiefel {
namespace {

constexpr int kLargestCode =
    16;  // UNAUTHENTICATED, the last that both sides define with the same number.
constexpr absl::string_view kCutMark = "...";

bool IsUtf8Continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

std::string CutMessage(absl::string_view message) {
  if (message.size() <= kMaxStatusMessageBytes) return std::string(message);
  size_t end = kMaxStatusMessageBytes - kCutMark.size();
  while (end > 0 && IsUtf8Continuation(message[end])) --end;
  std::string cut(message.substr(0, end));
  cut.append(kCutMark.data(), kCutMark.size());
  return cut;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // code() maps values absl does not know to kUnknown; raw_code() would pass them on.
  const int code = static_cast<int>(status.code());
  return grpc::Status(code >= 1 && code <= kLargestCode ? static_cast<grpc::StatusCode>(code)
                                                        : grpc::StatusCode::UNKNOWN,
                      CutMessage(status.message()));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = static_cast<int>(status.error_code());
  return absl::Status(code >= 1 && code <= kLargestCode ? static_cast<absl::StatusCode>(code)
                                                        : absl::StatusCode::kUnknown,
                      status.error_message());
}

}  // namespace stiefel
