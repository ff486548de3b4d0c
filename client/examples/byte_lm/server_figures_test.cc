#include "client/examples/byte_lm/server_figures.h"

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace stiefel::byte_lm {
namespace {

// `servers` servers that share six matrices; the hash of matrix i is 100 + i.
std::vector<v1::ServerStatus> Group(int servers) {
  std::vector<v1::ServerStatus> group(servers);
  for (int s = 0; s < servers; ++s) {
    group[s].set_address(absl::StrCat("127.0.0.1:", s));
    v1::RunStatus* run = group[s].add_runs();
    run->set_name("r");
    run->set_server_index(s);
    run->set_compute_seconds(1.5);
    run->set_skipped_steps(s);
    for (int i = 0; i < 6; ++i) {
      v1::MatrixStatus* matrix = run->add_matrices();
      matrix->set_index(i);
      matrix->set_name(absl::StrCat("m", i));
      matrix->set_owner(i % servers);
      if (i % servers == s) matrix->set_state_hash(100 + i);
    }
  }
  return group;
}

TEST(ServerFiguresTest, HashDoesNotDependOnTheNumberOfServers) {
  const uint64_t one = AddFigures(Group(1), "r")->state_hash;
  EXPECT_EQ(AddFigures(Group(2), "r")->state_hash, one);
  EXPECT_EQ(AddFigures(Group(3), "r")->state_hash, one);
  std::vector<v1::ServerStatus> other = Group(2);
  other[1].mutable_runs(0)->mutable_matrices(1)->set_state_hash(7);
  EXPECT_NE(AddFigures(other, "r")->state_hash, one);
}

TEST(ServerFiguresTest, FiguresAreAddedUp) {
  const auto figures = AddFigures(Group(3), "r");
  ASSERT_TRUE(figures.ok());
  EXPECT_DOUBLE_EQ(figures->compute_seconds, 4.5);
  EXPECT_EQ(figures->skipped_steps, 2);
}

TEST(ServerFiguresTest, MissingRunOrHashIsAnErrorThatNamesTheServer) {
  const absl::Status no_run = AddFigures(Group(2), "other").status();
  EXPECT_EQ(no_run.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(no_run.ToString().find("127.0.0.1:0"), std::string::npos) << no_run;
  std::vector<v1::ServerStatus> group = Group(2);
  group[1].mutable_runs(0)->mutable_matrices(1)->clear_state_hash();
  const absl::Status no_hash = AddFigures(group, "r").status();
  EXPECT_EQ(no_hash.code(), absl::StatusCode::kInternal);
  EXPECT_NE(no_hash.ToString().find("matrix m1"), std::string::npos) << no_hash;
}

}  // namespace
}  // namespace stiefel::byte_lm
