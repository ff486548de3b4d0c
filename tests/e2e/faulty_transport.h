// A transport that does to gradient chunks what networks and retries do: other orders, the same
// chunk twice, streams cut at given moments. Everything else goes through.
#ifndef STIEFEL_TESTS_E2E_FAULTY_TRANSPORT_H_
#define STIEFEL_TESTS_E2E_FAULTY_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include "client/transport.h"
#include "common/mutex.h"

namespace stiefel {

struct Faults {
  bool shuffle = false;    // chunks wait for each other and leave in random order
  bool twice = false;      // every chunk is sent twice
  std::set<int64_t> cuts;  // the chunks with these numbers (over all streams) cut theirs instead
  uint64_t seed = 1;
};

class FaultyTransport final : public Transport {
 public:
  // `inner` outlives it.
  FaultyTransport(Transport* inner, Faults faults) : inner_(inner), faults_(std::move(faults)) {}

  std::unique_ptr<ServerConnection> Connect(const std::string& address, int data_streams) override;

  // What was done so far.
  int64_t chunks() const { return chunks_; }
  int64_t cuts() const { return cuts_; }
  int64_t reordered() const { return reordered_; }

  // For streams: numbers a chunk; whether it cuts its stream.
  bool CutsNext();
  const Faults& faults() const { return faults_; }
  void CountReordered() { ++reordered_; }

 private:
  Transport* const inner_;
  const Faults faults_;
  std::atomic<int64_t> chunks_{0};
  std::atomic<int64_t> cuts_{0};
  std::atomic<int64_t> reordered_{0};
};

}  // namespace stiefel

#endif  // STIEFEL_TESTS_E2E_FAULTY_TRANSPORT_H_
