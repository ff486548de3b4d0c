#include "server/run_spec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "server/run_machine_testing.h"

namespace stiefel {
namespace {

using testing::JoinRequest;
using testing::OpenPair;
using testing::OpenRequest;
using testing::RunShape;

TEST(RunSpec, ResolvesNamesOwnersAndDefaults) {
  RunShape shape;
  shape.servers = 2;
  shape.matrices = 3;
  v1::OpenRunRequest request = OpenRequest(shape, 1);
  request.mutable_parameters(1)->set_push_dtype(v1::BF16);
  request.mutable_parameters(2)->set_reduce(v1::SUM);
  request.mutable_parameters(0)->clear_shape();
  request.mutable_parameters(0)->add_shape(4);
  const auto spec = RunSpec::Create(request);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ((*spec)->owned(), std::vector<int32_t>{1});
  EXPECT_EQ((*spec)->matrices()[0].rows, 1);
  EXPECT_EQ((*spec)->matrices()[0].cols, 4);
  EXPECT_EQ((*spec)->matrices()[1].pull_dtype, DType::kBf16);
  EXPECT_TRUE((*spec)->matrices()[1].mean);
  EXPECT_FALSE((*spec)->matrices()[2].mean);
  EXPECT_EQ((*spec)->step_timeout(), 60000000);
  EXPECT_EQ((*spec)->lease(), 15000000);
  EXPECT_EQ((*spec)->takeover_timeout(), 300000000);
}

struct BadOpen {
  const char* what;
  std::function<void(v1::OpenRunRequest*)> change;
  const char* message;  // a part that carries the numbers
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

TEST(RunSpec, RefusesWhatIsWrongWithTheNumbersInTheMessage) {
  const std::vector<BadOpen> cases = {
      {"name", [](auto* r) { r->clear_name(); }, "name of 0 bytes"},
      {"uid", [](auto* r) { r->set_run_uid(0); }, "run_uid is 0"},
      {"world", [](auto* r) { r->set_world_size(0); }, "world_size 0"},
      {"world max", [](auto* r) { r->set_world_size(1 << 20); }, "world_size 1048576"},
      {"start", [](auto* r) { r->set_start_step(0); }, "start_step 0"},
      {"mode", [](auto* r) { r->clear_update_mode(); }, "update_mode 0"},
      {"leader", [](auto* r) { r->clear_leader(); }, "generation 0"},
      {"none", [](auto* r) { r->clear_parameters(); }, "0 parameters"},
      {"phases", [](auto* r) { r->add_phases(0); }, "3 phases"},
      {"owner", [](auto* r) { r->set_owners(1, 5); }, "5"},
      {"index", [](auto* r) { r->set_server_index(3); }, "3"},
      {"phase", [](auto* r) { r->set_phases(0, 1); }, "phase 1"},
      {"twice", [](auto* r) { r->mutable_parameters(1)->set_name("m0"); }, "m0"},
      {"3-D", [](auto* r) { r->mutable_parameters(0)->add_shape(2); }, "3 dimensions"},
      {"zero", [](auto* r) { r->mutable_parameters(0)->set_shape(0, 0); }, "0"},
      {"negative", [](auto* r) { r->mutable_parameters(0)->set_shape(1, -4); }, "-4"},
      // CASES D16: sizes that overflow.
      {"overflow",
       [](auto* r) {
         r->mutable_parameters(0)->set_shape(0, int64_t{1} << 40);
         r->mutable_parameters(0)->set_shape(1, int64_t{1} << 40);
       },
       "1099511627776"},
      {"preset", [](auto* r) { r->mutable_parameters(0)->mutable_rule()->set_preset("moun"); },
       "moun"},
      {"K 0",
       [](auto* r) {
         r->mutable_parameters(0)->mutable_rule()->set_preset("muon");
         r->mutable_parameters(0)->mutable_rule()->set_period(0);
       },
       "period"},
      {"timeout", [](auto* r) { r->set_step_timeout_seconds(0); }, "step_timeout_seconds = 0"},
      {"nan", [](auto* r) { r->set_lease_seconds(std::nan("")); }, "lease_seconds"},
      {"version", [](auto* r) { r->set_protocol_version(9); }, "protocol 9",
       absl::StatusCode::kFailedPrecondition},
  };
  for (const BadOpen& bad : cases) {
    RunShape shape;
    shape.matrices = 2;
    v1::OpenRunRequest request = OpenRequest(shape);
    bad.change(&request);
    const auto spec = RunSpec::Create(request);
    ASSERT_FALSE(spec.ok()) << bad.what;
    if (bad.code != absl::StatusCode::kInvalidArgument) {
      EXPECT_EQ(spec.status().code(), bad.code) << bad.what;
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(spec.status()) || absl::IsNotFound(spec.status()))
          << bad.what << " " << spec.status();
    }
    EXPECT_NE(spec.status().message().find(bad.message), std::string::npos)
        << bad.what << ": " << spec.status();
  }
}

// m0 is 6 x 4 cut before rows 2 and 5, m1 1 x 4 whole, m2 2 x 8 cut before column 3; shards on
// servers 0, 1, 2, 1, 0, 1.
v1::OpenRunRequest OpenCut(int32_t server) {
  RunShape shape;
  shape.servers = 3;
  shape.matrices = 3;
  v1::OpenRunRequest request = OpenRequest(shape, server);
  request.mutable_parameters(0)->set_shape(0, 6);
  request.mutable_parameters(2)->set_shape(0, 2);
  request.mutable_parameters(2)->set_shape(1, 8);
  request.clear_owners();
  for (const int32_t owner : {0, 1, 2, 1, 0, 1}) request.add_owners(owner);
  v1::Cuts* cuts = request.add_cuts();
  cuts->set_parameter(0);
  cuts->add_at(2);
  cuts->add_at(5);
  cuts = request.add_cuts();
  cuts->set_parameter(2);
  cuts->add_at(3);
  return request;
}

TEST(RunSpec, ShardsAreNumberedOverTheRun) {
  const auto spec = RunSpec::Create(OpenCut(1));
  ASSERT_TRUE(spec.ok()) << spec.status();
  const std::vector<MatrixSpec>& shards = (*spec)->matrices();
  ASSERT_EQ(shards.size(), 6u);
  EXPECT_EQ((*spec)->owned(), (std::vector<int32_t>{1, 3, 5}));
  EXPECT_EQ(shards[1].Label(), "m0 [2:5, 0:4]");
  EXPECT_EQ(shards[1].rows, 3);
  EXPECT_EQ(shards[1].whole_rows, 6);
  EXPECT_EQ(shards[2].shard, 2);
  EXPECT_EQ(shards[3].Label(), "m1");
  EXPECT_FALSE(shards[3].cut());
  EXPECT_EQ(shards[5].parameter, 2);
  EXPECT_EQ(shards[5].place, (Rect{0, 2, 3, 8}));
  EXPECT_EQ(shards[5].cols, 5);
}

TEST(RunSpec, BlocksThatCrossShardsAreCut) {
  const auto spec = *RunSpec::Create(OpenCut(0));
  v1::JoinRunRequest request;
  v1::PushBlock* push = request.add_push();
  push->set_parameter("m0");
  push->mutable_rect()->set_row_begin(1);
  push->mutable_rect()->set_row_end(6);
  push->mutable_rect()->set_col_end(3);
  push->set_parts(2);
  push->set_reduce_group(7);
  v1::PullBlock* pull = request.add_pull();
  pull->set_parameter("m2");
  pull->mutable_rect()->set_row_end(2);
  pull->mutable_rect()->set_col_begin(2);
  pull->mutable_rect()->set_col_end(8);
  EXPECT_EQ(*spec->ResolvePush(request),
            (std::vector<BlockSpec>{
                {0, {1, 2, 0, 3}, 7, 2}, {1, {0, 3, 0, 3}, 7, 2}, {2, {0, 1, 0, 3}, 7, 2}}));
  EXPECT_EQ(*spec->ResolvePull(request),
            (std::vector<BlockSpec>{{4, {0, 2, 2, 3}, -1, 1}, {5, {0, 2, 0, 5}, -1, 1}}));
  // An overlap is found, and named, before the blocks are cut.
  *request.add_push() = request.push(0);
  const absl::Status overlap = spec->ResolvePush(request).status();
  EXPECT_NE(overlap.message().find("[1:6, 0:3]"), std::string::npos) << overlap;
}

TEST(RunSpec, RefusesCutsThatAreNone) {
  const auto refused = [](const std::function<void(v1::OpenRunRequest*)>& change) {
    v1::OpenRunRequest request = OpenCut(0);
    change(&request);
    const absl::Status status = RunSpec::Create(request).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status) || absl::IsOutOfRange(status)) << status;
    return std::string(status.message());
  };
  const auto has = [](const std::string& message, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
  };
  has(refused([](auto* r) { r->mutable_cuts(0)->set_at(1, 6); }), {"m0", "6 x 4", "6"});
  has(refused([](auto* r) { r->mutable_cuts(1)->set_at(0, 0); }), {"m2", "2 x 8"});
  has(refused([](auto* r) { r->mutable_cuts(1)->set_parameter(0); }), {"0 after those of 0"});
  has(refused([](auto* r) { r->mutable_cuts(1)->set_parameter(3); }), {"3 parameters"});
  has(refused([](auto* r) { r->mutable_owners()->RemoveLast(); }), {"6 shards", "5 owners"});
  has(refused([](auto* r) { r->set_owners(1, 3); }), {"m0 [2:5, 0:4]", "3"});
  has(refused([](auto* r) { r->mutable_parameters(0)->mutable_rule()->set_preset("normuon"); }),
      {"m0", "row variance"});
}

TEST(RunSpec, PairsFindEachOther) {
  const auto spec = RunSpec::Create(OpenPair());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ((*spec)->matrices()[0].partner, 1);
  EXPECT_EQ((*spec)->matrices()[1].partner, 0);
  EXPECT_EQ((*spec)->matrices()[2].partner, -1);
  EXPECT_EQ((*spec)->matrices()[0].partner_shape, std::make_pair(int64_t{12}, int64_t{4}));
}

TEST(RunSpec, RefusesPairsThatCannotWork) {
  const auto refused = [](const std::function<void(v1::OpenRunRequest*)>& change) {
    v1::OpenRunRequest request = OpenPair();
    change(&request);
    const absl::Status status = RunSpec::Create(request).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  const auto has = [](const std::string& message, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << part << " is not in: " << message;
  };
  has(refused([](auto* r) { r->set_update_mode(v1::DELTA); }), {"m0", "WEIGHTS", "DELTA"});
  has(refused([](auto* r) { r->set_owners(1, 1); }),
      {"m0", "m1", "server 0", "server 1", OpenPair().servers(0), OpenPair().servers(1)});
  has(refused([](auto* r) { r->mutable_parameters(1)->mutable_rule()->set_pair("m2"); }),
      {"m0", "m1"});
  has(refused([](auto* r) { r->mutable_parameters(0)->mutable_rule()->set_pair("m9"); }),
      {"m0", "m9"});
  has(refused([](auto* r) { r->mutable_parameters(1)->set_shape(1, 5); }), {"m0", "4", "5"});
}

TEST(RunSpec, BlocksAreCheckedAgainstTheirMatrix) {
  RunShape shape;
  const auto spec = *RunSpec::Create(OpenRequest(shape));
  const auto change = [&](const std::function<void(v1::JoinRunRequest*)>& edit) {
    v1::JoinRunRequest request = JoinRequest(shape, 0, Incarnation(1, 1));
    edit(&request);
    const auto push = spec->ResolvePush(request);
    return push.ok() ? spec->ResolvePull(request).status() : push.status();
  };
  EXPECT_TRUE(change([](auto*) {}).ok());
  EXPECT_FALSE(change([](auto* r) { r->mutable_push(0)->mutable_rect()->set_col_end(5); }).ok());
  EXPECT_FALSE(change([](auto* r) { r->mutable_pull(0)->mutable_rect()->set_col_begin(-1); }).ok());
  EXPECT_FALSE(change([](auto* r) { r->mutable_push(0)->set_parts(0); }).ok());
  EXPECT_FALSE(change([](auto* r) { r->mutable_push(0)->set_reduce_group(-2); }).ok());
  EXPECT_TRUE(absl::IsNotFound(change([](auto* r) { r->mutable_push(0)->set_parameter("m9"); })));
}

TEST(RunSpec, OneRankPushesAnElementOncePerReduceGroup) {
  RunShape shape;
  const auto spec = *RunSpec::Create(OpenRequest(shape));
  v1::JoinRunRequest request = JoinRequest(shape, 0, Incarnation(1, 1));
  *request.add_push() = request.push(0);
  const auto overlap = spec->ResolvePush(request);
  ASSERT_FALSE(overlap.ok());
  EXPECT_NE(overlap.status().message().find("m0"), std::string::npos) << overlap.status();
  request.mutable_push(1)->set_reduce_group(3);
  EXPECT_TRUE(spec->ResolvePush(request).ok());
}

// CASES B7: one name, two rules.
TEST(RunSpec, AParameterKnownOtherwiseIsRefusedWithBothValues) {
  RunShape shape;
  const auto spec = *RunSpec::Create(OpenRequest(shape));
  v1::JoinRunRequest request = JoinRequest(shape, 1, Incarnation(1, 1));
  *request.add_parameters() = OpenRequest(shape).parameters(0);
  EXPECT_TRUE(spec->CheckParameters(request).ok());
  request.mutable_parameters(0)->mutable_rule()->set_preset("adamw");
  const absl::Status refused = spec->CheckParameters(request);
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  for (const char* part : {"rank 1", "sgd", "adamw"})
    EXPECT_NE(refused.message().find(part), std::string::npos) << refused;
}

}  // namespace
}  // namespace stiefel
