// The client over gRPC when its process forks, leaves, or loses servers.
#include <sys/wait.h>
#include <unistd.h>

#include <random>
#include <thread>

#include "common/clock.h"
#include "common/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/grpc_cluster.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

std::vector<ParameterSpec> Model(int64_t rows, int64_t cols) {
  ParameterSpec parameter;
  parameter.name = "w";
  parameter.shape = {rows, cols};
  parameter.rule = *PresetRule("sgd");
  return {parameter};
}

TensorView View(const std::vector<float>& values) {
  return {values.data(), ElementType::kFp32, {static_cast<int64_t>(values.size())}, {}};
}

absl::Status Step(Trainer* trainer, int64_t step, const std::vector<float>& gradient) {
  if (absl::Status s = trainer->Begin(step); !s.ok()) return s;
  if (absl::Status s = trainer->Push(0, View(gradient)); !s.ok()) return s;
  if (absl::Status s = trainer->EndPush(); !s.ok()) return s;
  if (absl::Status s = trainer->Wait().status(); !s.ok()) return s;
  return trainer->Done();
}

// CASES E9.
TEST(LifeTest, ChildrenOfAForkAreUnharmedAndToldSo) {
  GrpcCluster cluster(1);
  auto trainer = Trainer::Connect(cluster.Options(0, 1), Model(64, 64));
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  const std::vector<float> gradient(64 * 64, 1.0f);
  ASSERT_TRUE(Step(trainer->get(), 1, gradient).ok());
  std::vector<pid_t> children;
  for (int i = 0; i < 8; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      const absl::Status refused = Step(trainer->get(), 2, gradient);
      trainer->reset();
      _exit(absl::IsFailedPrecondition(refused) &&
                    refused.message().find("fork") != std::string::npos
                ? 0
                : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  const absl::Status after = Step(trainer->get(), 2, gradient);
  EXPECT_TRUE(after.ok()) << after;
  EXPECT_TRUE((*trainer)->Close().ok());
}

// Cancelled and destroyed at random moments; the gradient goes with it, and sanitizers see whoever
// still reads it.
TEST(LifeTest, CancelledAndDestroyedAtRandomMoments) {
  std::mt19937 random(11);
  const int rounds = FullScale() ? 200 : 12;
  GrpcCluster cluster(2);
  for (int round = 0; round < rounds; ++round) {
    auto connected = Trainer::Connect(cluster.Options(0, 1), Model(512, 512));
    ASSERT_TRUE(connected.ok()) << connected.status();
    Trainer* const trainer = connected->get();
    auto gradient = std::make_unique<std::vector<float>>(512 * 512, 1.0f);
    Mutex mutex;
    CondVar changed;
    int calls = 0;
    const int stop_after = static_cast<int>(random() % 10);
    std::thread user([&] {
      const auto next = [&](const absl::Status& status) {
        MutexLock lock(&mutex);
        ++calls;
        changed.NotifyAll();
        return status.ok();
      };
      for (int64_t step = 1; step <= 3; ++step) {
        if (!next(trainer->Begin(step)) || !next(trainer->Push(0, View(*gradient))) ||
            !next(trainer->EndPush()) || !next(trainer->Wait().status()) ||
            !next(trainer->Done())) {
          break;
        }
      }
      MutexLock lock(&mutex);
      calls = 100;
      changed.NotifyAll();
    });
    {
      MutexLock lock(&mutex);
      while (calls < stop_after) changed.Wait(&mutex);
    }
    // With Close the run ends here and the next round opens it anew; the server is left no lease.
    const absl::Status closed = (*connected)->Close();
    EXPECT_TRUE(closed.ok()) << closed;
    if (round % 2 == 0) (*connected)->Cancel();
    user.join();
    connected->reset();
    gradient.reset();
  }
}

// CASES D1: every waiting call ends within the deadline and names the server.
TEST(LifeTest, AKilledServerIsNamed) {
  GrpcCluster cluster(2);
  std::vector<ParameterSpec> model = Model(64, 64);
  model.push_back(model[0]);
  model[1].name = "v";
  TrainerOptions options = cluster.Options(0, 1);
  options.step_timeout = absl::Seconds(2);
  auto trainer = Trainer::Connect(options, model);
  ASSERT_TRUE(trainer.ok()) << trainer.status();
  const std::vector<float> gradient(64 * 64, 1.0f);
  ASSERT_TRUE((*trainer)->Begin(1).ok());
  ASSERT_TRUE((*trainer)->Push(0, View(gradient)).ok());
  cluster.Kill(1);
  ASSERT_TRUE((*trainer)->Push(1, View(gradient)).ok());
  ASSERT_TRUE((*trainer)->EndPush().ok());
  const int64_t start = RealClock().NowMicros();
  const absl::Status waited = (*trainer)->Wait().status();
  EXPECT_TRUE(absl::IsUnavailable(waited)) << waited;
  EXPECT_THAT(std::string(waited.message()), HasSubstr(cluster.addresses()[1]));
  EXPECT_LT(RealClock().NowMicros() - start, 20000000);
}

// CASES D3: a name that does not resolve, and a port where nobody listens.
TEST(LifeTest, ServersThatCannotBeReachedAreNamed) {
  GrpcCluster cluster(1);
  for (const std::string address : {"no-such-host.invalid:7770", "127.0.0.1:1"}) {
    TrainerOptions options = cluster.Options(0, 1);
    options.servers.push_back(address);
    options.connect_timeout = absl::Seconds(1);
    const auto trainer = Trainer::Connect(options, Model(8, 8));
    EXPECT_TRUE(absl::IsUnavailable(trainer.status())) << trainer.status();
    EXPECT_THAT(std::string(trainer.status().message()), HasSubstr(address));
  }
}

}  // namespace
}  // namespace stiefel
