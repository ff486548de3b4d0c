#include "client/examples/byte_lm/exchange.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace stiefel::byte_lm {
namespace {

// A listening socket as a parent process would hand it to rank 0, and its address.
struct Listener {
  Listener() : fd(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&any), sizeof(any)), 0);
    EXPECT_EQ(listen(fd, 16), 0);
    socklen_t size = sizeof(any);
    EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&any), &size), 0);
    address = absl::StrCat("127.0.0.1:", ntohs(any.sin_port));
  }
  int fd;
  std::string address;
};

// Runs body(rank, exchange) for every rank at once.
void OnAllRanks(int world_size, const std::function<void(int, Exchange&)>& body) {
  Listener listener;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      ExchangeOptions options;
      options.rank = rank;
      options.world_size = world_size;
      options.address = listener.address;
      options.listen_fd = rank == 0 ? listener.fd : -1;
      auto exchange = Exchange::Connect(options);
      ASSERT_TRUE(exchange.ok()) << exchange.status();
      body(rank, **exchange);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Value i of rank r; small integers, so that sums are exact.
float ValueAt(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101); }

class ExchangeTest : public ::testing::TestWithParam<int> {};

// More rows than ranks, fewer, and more bytes than any socket buffer takes at once.
TEST_P(ExchangeTest, ReduceScatterGivesEachRankTheMeanOfItsRowsOnly) {
  const int world_size = GetParam();
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{7, 5}, {1, 3}, {2, 1}, {1024, 1500}}) {
    OnAllRanks(world_size, [&, rows = rows, cols = cols](int rank, Exchange& exchange) {
      std::vector<float> values(rows * cols);
      for (size_t i = 0; i < values.size(); ++i) values[i] = ValueAt(rank, i);
      ASSERT_TRUE(exchange.ReduceScatterMean(cols, &values).ok());
      const Share own = ShareOf(rows, rank, world_size);
      for (int64_t i = 0; i < rows * cols; ++i) {
        float expected = ValueAt(rank, i);
        if (i >= own.begin * cols && i < own.end * cols) {
          expected = 0;
          for (int r = 0; r < world_size; ++r) expected += ValueAt(r, i);
          expected *= 1.0f / world_size;
        }
        ASSERT_EQ(values[i], expected) << "rank " << rank << " at " << i;
      }
    });
  }
}

TEST_P(ExchangeTest, AllGatherReturnsValuesByRank) {
  const int world_size = GetParam();
  OnAllRanks(world_size, [&](int rank, Exchange& exchange) {
    for (uint64_t call = 0; call < 50; ++call) {
      const auto all = exchange.AllGather(uint64_t{1000} * rank + call);
      ASSERT_TRUE(all.ok()) << all.status();
      for (int r = 0; r < world_size; ++r) ASSERT_EQ((*all)[r], uint64_t{1000} * r + call);
    }
    const auto halves = exchange.AllGather(rank + 0.5);
    ASSERT_TRUE(halves.ok());
    EXPECT_EQ(halves->back(), world_size - 0.5);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeTest, ::testing::Values(1, 2, 3, 5));

TEST(ExchangeErrorsTest, SharesCoverEverythingOnce) {
  for (int64_t size : {0, 1, 5, 256, 512}) {
    for (int world_size : {1, 2, 3, 7}) {
      int64_t next = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_EQ(ShareOf(size, rank, world_size).begin, next);
        next = ShareOf(size, rank, world_size).end;
      }
      EXPECT_EQ(next, size);
    }
  }
}

TEST(ExchangeErrorsTest, MissingRankIsNamedAtTheDeadline) {
  Listener listener;
  ExchangeOptions options;
  options.world_size = 3;
  options.listen_fd = listener.fd;
  options.timeout_millis = 30;
  const absl::Status status = Exchange::Connect(options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.ToString().find("rank 1, 2"), std::string::npos) << status;
}

TEST(ExchangeErrorsTest, RanksThatDisagreeAreToldBothSizes) {
  OnAllRanks(2, [](int rank, Exchange& exchange) {
    std::vector<float> values(rank == 0 ? 8 : 12);
    const absl::Status status = exchange.ReduceScatterMean(1, &values);
    // The other may have hung up already where this one is late to look.
    EXPECT_FALSE(status.ok());
    if (status.code() == absl::StatusCode::kDataLoss) {
      EXPECT_NE(status.ToString().find(rank == 0 ? "24 bytes" : "16 bytes"), std::string::npos)
          << status;
    }
  });
}

TEST(ExchangeErrorsTest, ARankThatLeftIsNamed) {
  OnAllRanks(2, [](int rank, Exchange& exchange) {
    if (rank == 1) return;  // destroys its end
    const absl::Status status = exchange.AllGather(uint64_t{1}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_NE(status.ToString().find("rank 1"), std::string::npos) << status;
  });
}

TEST(ExchangeErrorsTest, BadOptionsAreRefused) {
  ExchangeOptions options;
  options.rank = 2;
  options.world_size = 2;
  EXPECT_EQ(Exchange::Connect(options).status().code(), absl::StatusCode::kInvalidArgument);
  options.rank = 1;
  for (const char* address : {"", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "10.0.0.1:80"}) {
    options.address = address;
    EXPECT_EQ(Exchange::Connect(options).status().code(), absl::StatusCode::kInvalidArgument)
        << address;
  }
}

}  // namespace
}  // namespace stiefel::byte_lm
