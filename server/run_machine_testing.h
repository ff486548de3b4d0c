// Builders of small runs and their messages, for tests of the run machine.
#ifndef STIEFEL_SERVER_RUN_MACHINE_TESTING_H_
#define STIEFEL_SERVER_RUN_MACHINE_TESTING_H_

#include <cstdint>
#include <optional>
#include <string>

#include "proto/protocol.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel::testing {

inline constexpr uint64_t kRunUid = 77;

// "m0", "m1" ...: `matrices` of 1 x `elements` on sgd, matrix i owned by server i % servers.
struct RunShape {
  int32_t servers = 1;
  int32_t world_size = 2;
  int32_t matrices = 1;
  int64_t elements = 4;
  v1::UpdateMode mode = v1::DELTA;
};

// The opened run as server `server_index` sees it; step 1 comes first, leader (1, 100).
inline v1::OpenRunRequest OpenRequest(const RunShape& shape, int32_t server_index = 0) {
  v1::OpenRunRequest request;
  request.set_name("test");
  request.set_run_uid(kRunUid);
  *request.mutable_leader() = Incarnation(1, 100).ToProto();
  request.set_world_size(shape.world_size);
  request.set_start_step(1);
  request.set_update_mode(shape.mode);
  for (int32_t m = 0; m < shape.matrices; ++m) {
    v1::Parameter* parameter = request.add_parameters();
    parameter->set_name("m" + std::to_string(m));
    parameter->add_shape(1);
    parameter->add_shape(shape.elements);
    parameter->mutable_rule()->set_preset("sgd");
    request.add_phases(0);
    request.add_owners(m % shape.servers);
  }
  for (int32_t s = 0; s < shape.servers; ++s)
    request.add_servers("server" + std::to_string(s) + ":1");
  request.set_server_index(server_index);
  request.set_placement_epoch(1);
  request.set_software_version(kSoftwareVersion);
  request.set_protocol_version(kProtocolVersion);
  return request;
}

// Pushes and pulls every matrix whole. `applied` unset: joins without weights.
inline v1::JoinRunRequest JoinRequest(const RunShape& shape, int32_t rank,
                                      const Incarnation& incarnation,
                                      std::optional<int64_t> applied = 0) {
  v1::JoinRunRequest request;
  request.set_name("test");
  request.set_rank(rank);
  request.set_world_size(shape.world_size);
  *request.mutable_incarnation() = incarnation.ToProto();
  if (applied) request.set_applied_step(*applied);
  for (int32_t m = 0; m < shape.matrices; ++m) {
    v1::Rectangle whole;
    whole.set_row_end(1);
    whole.set_col_end(shape.elements);
    v1::PushBlock* push = request.add_push();
    push->set_parameter("m" + std::to_string(m));
    *push->mutable_rect() = whole;
    v1::PullBlock* pull = request.add_pull();
    pull->set_parameter("m" + std::to_string(m));
    *pull->mutable_rect() = whole;
  }
  request.set_software_version(kSoftwareVersion);
  request.set_protocol_version(kProtocolVersion);
  return request;
}

inline v1::Sender SenderOf(int32_t rank, const Incarnation& incarnation, int64_t epoch = 1) {
  v1::Sender sender;
  sender.set_run_uid(kRunUid);
  sender.set_placement_epoch(epoch);
  sender.set_rank(rank);
  *sender.mutable_incarnation() = incarnation.ToProto();
  return sender;
}

inline v1::TakeOverRequest TakeOver(const Incarnation& leader) {
  v1::TakeOverRequest request;
  request.set_name("test");
  request.set_run_uid(kRunUid);
  *request.mutable_leader() = leader.ToProto();
  return request;
}

// Two servers; m0 is A (4 x 20), m1 is B (12 x 4), both on server 0.
inline v1::OpenRunRequest OpenPair() {
  RunShape shape;
  shape.servers = 2;
  shape.matrices = 3;
  v1::OpenRunRequest request = OpenRequest(shape);
  request.set_update_mode(v1::WEIGHTS);
  const int64_t sizes[2][2] = {{4, 20}, {12, 4}};
  for (int f = 0; f < 2; ++f) {
    v1::Parameter* factor = request.mutable_parameters(f);
    factor->clear_shape();
    for (const int64_t size : sizes[f]) factor->add_shape(size);
    factor->mutable_rule()->Clear();
    factor->mutable_rule()->set_preset("polora");
    factor->mutable_rule()->set_pair(f == 0 ? "m1" : "m0");
    request.set_owners(f, 0);
  }
  return request;
}

}  // namespace stiefel::testing

#endif  // STIEFEL_SERVER_RUN_MACHINE_TESTING_H_
