// A trainer for tests that speaks the protocol to an OptimizerServer in memory, one message at a
// time: what it says is up to the test, so it can also misbehave.
#ifndef STIEFEL_SERVER_TESTING_MEMORY_TRAINER_H_
#define STIEFEL_SERVER_TESTING_MEMORY_TRAINER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"
#include "proto/chunk.h"
#include "server/optimizer_server.h"
#include "server/sinks.h"

namespace stiefel::testing {

// A chunk as if it had arrived.
class MemoryChunk final : public IncomingChunk {
 public:
  MemoryChunk(v1::ChunkHeader header, std::string payload)
      : header_(std::move(header)), payload_(std::move(payload)) {}
  const v1::ChunkHeader& header() const override { return header_; }
  int64_t payload_bytes() const override { return static_cast<int64_t>(payload_.size()); }
  uint32_t CopyNext(void* target, int64_t bytes) override;
  uint32_t SkipNext(int64_t bytes) override;

 private:
  const v1::ChunkHeader header_;
  const std::string payload_;
  size_t offset_ = 0;
};

std::string BytesOf(const std::vector<float>& values);
std::vector<float> FloatsOf(const std::string& bytes);

// Updates that came, by (pull block, step, attempt, round).
struct ReceivedUpdate {
  std::string bytes;
  int64_t received = 0;
  bool absent = false;
  v1::ChunkHeader::Type type = v1::ChunkHeader::UPDATE;
};

class MemoryTrainer {
 public:
  MemoryTrainer(OptimizerServer* server, int32_t rank, Incarnation life = {1, 100});
  ~MemoryTrainer();

  // Starts a JoinRun; Joined() waits for its answer.
  void Join(v1::JoinRunRequest request);
  absl::StatusOr<v1::JoinRunResponse> Joined();

  absl::Status Connect();          // control and one data stream
  absl::Status ConnectData();      // another one
  void DropData();                 // all data streams break
  void set_reading(bool reading);  // whether chunks are taken off the data streams

  void Send(v1::TrainerMessage message);
  void Begin(int64_t step, int32_t attempt = 0, v1::BeginStep begin = {});
  void End(int64_t step, int32_t attempt = 0);
  void Decide(int64_t step, v1::Outcome outcome, int32_t attempt = 0, int32_t round = 0,
              std::vector<int32_t> skipped = {});

  // A chunk of one piece of a push block, with its checksum.
  v1::ChunkHeader Header(int64_t step, int32_t attempt = 0) const;
  static void AddPiece(v1::ChunkHeader* header, int32_t block, int64_t offset,
                       const std::string& bytes, int64_t element_bytes = 4, int32_t part = 0);
  absl::Status Chunk(const v1::ChunkHeader& header, const std::string& payload);
  absl::Status Push(int64_t step, int32_t block, const std::vector<float>& values,
                    int32_t attempt = 0, int32_t part = 0);
  absl::Status PushAbsent(int64_t step, int32_t block, int32_t attempt = 0);
  absl::Status InitWeights(int32_t matrix, Rect rect, const std::vector<float>& values);

  // The next message of a kind, in order of arrival; earlier ones of other kinds are kept. Aborts
  // the test's process after a minute.
  v1::ServerMessage Next(v1::ServerMessage::KindCase kind);
  // Waits for a credit for the step.
  void AwaitCredit(int64_t step, int32_t attempt = 0);
  bool Has(v1::ServerMessage::KindCase kind);

  // Waits until `bytes` of this version of a pull block came (or it is absent).
  ReceivedUpdate Await(int32_t block, int64_t step, int32_t attempt, int32_t round, int64_t bytes);
  // Waits until the server ended the control stream, and says how.
  absl::Status AwaitControlEnd();
  v1::Sender sender() const;
  // Chunks as they came, still holding the server's memory; kept only if asked for before.
  void set_keep_chunks(bool keep);
  std::vector<OutgoingChunk> TakeChunks();

 private:
  class Control;
  class Data;
  using Version = std::tuple<int32_t, int64_t, int32_t, int32_t>;

  void Pump();
  void Receive(const OutgoingChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for a change; aborts the test's process if nothing changes for a minute.
  void WaitForChange(const char* what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  OptimizerServer* const server_;
  const int32_t rank_;
  const Incarnation life_;
  std::shared_ptr<RunHost> run_;
  uint64_t join_token_ = 0;
  std::shared_ptr<Control> control_;
  uint64_t control_id_ = 0;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;
  bool keep_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<absl::Status> join_status_ ABSL_GUARDED_BY(mutex_);
  v1::JoinRunResponse join_answer_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::ServerMessage> messages_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<std::shared_ptr<Data>, OutgoingChunk>> chunks_ ABSL_GUARDED_BY(mutex_);
  std::vector<OutgoingChunk> kept_ ABSL_GUARDED_BY(mutex_);
  std::map<Version, ReceivedUpdate> updates_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Data>> data_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> control_end_ ABSL_GUARDED_BY(mutex_);
  std::thread pump_;
};

}  // namespace stiefel::testing

#endif  // STIEFEL_SERVER_TESTING_MEMORY_TRAINER_H_
