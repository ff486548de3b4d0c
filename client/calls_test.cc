// Calls to several servers, against a scripted transport.
#include "client/calls.h"

#include <deque>
#include <thread>

#include "common/clock.h"
#include "common/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

// Answers calls with what it was told to, in order; afterwards never, until it is cancelled.
class ScriptedServer final : public ServerConnection {
 public:
  explicit ScriptedServer(std::deque<absl::Status> answers) : answers_(std::move(answers)) {}
  ~ScriptedServer() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void Call(const std::string&, std::string request, int64_t, Done done) override {
    MutexLock lock(&mutex_);
    ++calls_;
    if (answers_.empty()) {
      waiting_.push_back(std::move(done));
      return;
    }
    const absl::Status status = answers_.front();
    answers_.pop_front();
    threads_.emplace_back([done = std::move(done), status, request] {
      done(status, status.ok() ? "answer to " + request : "");
    });
  }
  void InitWeights(std::vector<OutgoingChunk>, int64_t, Done) override {}
  void CancelCalls() override {
    MutexLock lock(&mutex_);
    for (Done& done : waiting_) {
      threads_.emplace_back([done = std::move(done)] { done(absl::CancelledError("cut"), ""); });
    }
    waiting_.clear();
  }
  std::unique_ptr<ClientControlStream> OpenControl(ControlListener*) override { return nullptr; }
  std::unique_ptr<ClientDataStream> OpenData(int, DataListener*) override { return nullptr; }
  int calls() {
    MutexLock lock(&mutex_);
    return calls_;
  }

 private:
  Mutex mutex_;
  std::deque<absl::Status> answers_ ABSL_GUARDED_BY(mutex_);
  std::vector<Done> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_;
  int calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::StatusOr<std::vector<std::string>> Ask(std::vector<ScriptedServer*> servers,
                                             int64_t timeout_micros) {
  Servers all;
  for (size_t s = 0; s < servers.size(); ++s) {
    all.addresses.push_back("host" + std::to_string(s) + ":1");
    all.connections.emplace_back(servers[s], [](ServerConnection*) {});  // the caller's
  }
  return CallAll(
      all, "Method", [](int server, int64_t) { return std::to_string(server); },
      [](const absl::Status& status) { return absl::IsUnavailable(status); },
      RealClock().NowMicros() + timeout_micros);
}

TEST(CallsTest, RetriesWhatMayPassUntilAllAnswered) {
  ScriptedServer first({absl::OkStatus()});
  ScriptedServer second(
      {absl::UnavailableError("starting"), absl::UnavailableError("starting"), absl::OkStatus()});
  const auto answers = Ask({&first, &second}, 10000000);
  ASSERT_TRUE(answers.ok()) << answers.status();
  EXPECT_EQ(*answers, (std::vector<std::string>{"answer to 0", "answer to 1"}));
  EXPECT_EQ(first.calls(), 1);
  EXPECT_EQ(second.calls(), 3);
}

// CASES D3: a server that is always unavailable ends it, after few calls and by name.
TEST(CallsTest, GivesUpAtTheDeadline) {
  ScriptedServer first({absl::OkStatus()});
  ScriptedServer second(std::deque<absl::Status>(100, absl::UnavailableError("never")));
  const absl::Status status = Ask({&first, &second}, 400000).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("host1:1: never"));
  EXPECT_GE(second.calls(), 2);
  EXPECT_LE(second.calls(), 5);  // after 0, 50, 150, 350 ms
}

TEST(CallsTest, AFinalErrorCancelsTheOthers) {
  ScriptedServer silent({});
  ScriptedServer refusing({absl::InvalidArgumentError("no")});
  const absl::Status status = Ask({&silent, &refusing}, 60000000).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("host1:1: no"));
  EXPECT_EQ(silent.calls(), 1);
}

TEST(CallsTest, BackoffDoublesToABound) {
  EXPECT_EQ(BackoffMicros(0), 50000);
  EXPECT_EQ(BackoffMicros(3), 400000);
  EXPECT_EQ(BackoffMicros(1000), 2000000);
}

}  // namespace
}  // namespace stiefel
