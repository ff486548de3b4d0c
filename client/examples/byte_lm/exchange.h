#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_EXCHANGE_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_EXCHANGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stiefel::byte_lm {

// Half-open range of one rank's share of `size` things dealt out as evenly as possible.
struct Share {
  int64_t begin;
  int64_t end;
};
inline Share ShareOf(int64_t size, int rank, int world_size) {
  return {size * rank / world_size, size * (rank + 1) / world_size};
}

struct ExchangeOptions {
  int rank = 0;
  int world_size = 1;
  // 127.0.0.1:port where rank 0 listens and the others find it. Unused with one rank.
  std::string address;
  // Rank 0 only: a listening socket inherited from the parent, used instead of binding `address`;
  // -1: none. Owned from then on.
  int listen_fd = -1;
  // Bounds connecting, and each call.
  int64_t timeout_millis = 60'000;
};

// The trainers' own collectives over loopback TCP, what a training framework would bring along: one
// connection between any two ranks. All ranks make the same calls in the same order. An error
// (DEADLINE_EXCEEDED or UNAVAILABLE, naming the peer; DATA_LOSS if the ranks' calls differ) leaves
// the exchange unusable. Thread-compatible.
class Exchange {
 public:
  // Waits for all ranks. INVALID_ARGUMENT for options that make no sense.
  static absl::StatusOr<std::unique_ptr<Exchange>> Connect(const ExchangeOptions& options);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Replaces this rank's share of `values` (units of `unit` values dealt by ShareOf) by the mean
  // over all ranks, summed in rank order. The rest of `values` is left alone. REQUIRES:
  // values.size() is a multiple of unit.
  absl::Status ReduceScatterMean(int64_t unit, std::vector<float>* values);

  // The value of every rank, by rank.
  absl::StatusOr<std::vector<uint64_t>> AllGather(uint64_t value);
  absl::StatusOr<std::vector<double>> AllGather(double value);

 private:
  struct Outgoing {
    const char* data = nullptr;
    size_t size = 0;
  };
  struct Incoming {
    char* data = nullptr;
    size_t size = 0;
  };

  Exchange(int rank, int world_size, int64_t timeout_millis);
  absl::Status ConnectAll(const ExchangeOptions& options);
  absl::Status AcceptRanks(int listener, int first, int64_t deadline, std::vector<uint16_t>* ports);
  absl::Status MeetRankZero(const ExchangeOptions& options, int64_t deadline);
  // Sends send[p] to and fills receive[p] from every other rank p, all at once, so that no order of
  // ranks can block.
  absl::Status Swap(const std::vector<Outgoing>& send, const std::vector<Incoming>& receive);

  const int rank_;
  const int world_size_;
  const int64_t timeout_millis_;
  uint64_t calls_ = 0;
  std::vector<int> sockets_;  // by rank; -1: none
  std::vector<float> received_;
};

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_EXCHANGE_H_
