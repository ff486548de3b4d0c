// The run as this rank describes it: options and parameters validated, names resolved.
#ifndef STIEFEL_CLIENT_LAYOUT_H_
#define STIEFEL_CLIENT_LAYOUT_H_

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/trainer.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel {

struct LayoutBlock {
  int32_t parameter = 0;
  Rect rect;
  int32_t parts = 1;
  DType dtype = DType::kFp32;  // on the wire

  int64_t elements() const { return rect.Area(); }
  int64_t bytes() const { return elements() * DTypeSize(dtype); }
};

class Layout {
 public:
  // INVALID_ARGUMENT names the field and its value. Empty block lists become whole parameters.
  static absl::StatusOr<Layout> Create(const TrainerOptions& options,
                                       const std::vector<ParameterSpec>& parameters);

  const TrainerOptions& options() const { return options_; }
  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  const std::vector<LayoutBlock>& push() const { return push_; }
  const std::vector<LayoutBlock>& pull() const { return pull_; }

  // NOT_FOUND: no such parameter.
  absl::StatusOr<int32_t> ParameterOf(std::string_view name) const;
  // The one block of the parameter; INVALID_ARGUMENT: it has none or several.
  absl::StatusOr<int32_t> PushBlockOf(std::string_view parameter) const;
  absl::StatusOr<int32_t> PullBlockOf(std::string_view parameter) const;
  // "\"h.0.w\" [0:4, 0:8]", for messages.
  std::string Describe(const LayoutBlock& block) const;

  // The part of the JoinRun request that does not change with the attempt to join.
  v1::JoinRunRequest JoinRequest() const;
  // The OpenRun request but for uid, leader, placement and server index.
  v1::OpenRunRequest OpenRequest() const;

 private:
  Layout() = default;

  TrainerOptions options_;
  std::vector<ParameterSpec> parameters_;
  std::map<std::string, int32_t, std::less<>> by_name_;
  std::vector<LayoutBlock> push_;
  std::vector<LayoutBlock> pull_;
};

}  // namespace stiefel

#endif  // STIEFEL_CLIENT_LAYOUT_H_
