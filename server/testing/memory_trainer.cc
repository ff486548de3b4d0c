#include "server/testing/memory_trainer.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/checksum.h"
#include "common/status.h"

namespace stiefel::testing {
namespace {

constexpr int64_t kMinute = 60 * 1000000;

}  // namespace

uint32_t MemoryChunk::CopyNext(void* target, int64_t bytes) {
  std::memcpy(target, payload_.data() + offset_, static_cast<size_t>(bytes));
  return SkipNext(bytes);
}

uint32_t MemoryChunk::SkipNext(int64_t bytes) {
  const uint32_t crc = Crc32c(payload_.data() + offset_, static_cast<size_t>(bytes));
  offset_ += static_cast<size_t>(bytes);
  return crc;
}

std::string BytesOf(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

std::vector<float> FloatsOf(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return values;
}

class MemoryTrainer::Control final : public ControlSink {
 public:
  explicit Control(MemoryTrainer* trainer) : trainer_(trainer) {}
  void Send(const v1::ServerMessage& message) override {
    MutexLock lock(&mutex_);
    if (trainer_ == nullptr) return;
    MutexLock trainer_lock(&trainer_->mutex_);
    trainer_->messages_.push_back(message);
    trainer_->changed_.NotifyAll();
  }
  void Close(const absl::Status& status) override {
    MutexLock lock(&mutex_);
    if (trainer_ == nullptr) return;
    MutexLock trainer_lock(&trainer_->mutex_);
    if (!trainer_->control_end_) trainer_->control_end_ = status;
    trainer_->changed_.NotifyAll();
  }
  void Forget() {
    MutexLock lock(&mutex_);
    trainer_ = nullptr;
  }

 private:
  Mutex mutex_;
  MemoryTrainer* trainer_ ABSL_GUARDED_BY(mutex_);
};

class MemoryTrainer::Data final : public DataSink, public std::enable_shared_from_this<Data> {
 public:
  explicit Data(MemoryTrainer* trainer) : trainer_(trainer) {}
  void Write(OutgoingChunk chunk) override {
    MutexLock lock(&mutex_);
    if (trainer_ == nullptr) return;
    MutexLock trainer_lock(&trainer_->mutex_);
    trainer_->chunks_.emplace_back(shared_from_this(), std::move(chunk));
    trainer_->changed_.NotifyAll();
  }
  void Close(const absl::Status&) override {}
  void Forget() {
    MutexLock lock(&mutex_);
    trainer_ = nullptr;
  }
  void set_id(uint64_t id) { id_ = id; }
  uint64_t id() const { return id_; }

 private:
  Mutex mutex_;
  MemoryTrainer* trainer_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> id_{0};  // 0: the host has not named it yet
};

MemoryTrainer::MemoryTrainer(OptimizerServer* server, int32_t rank, Incarnation life)
    : server_(server), rank_(rank), life_(life), pump_([this] { Pump(); }) {}

MemoryTrainer::~MemoryTrainer() {
  if (join_token_ != 0 && !run_->CancelJoin(join_token_)) {
    MutexLock lock(&mutex_);
    while (!join_status_) WaitForChange("the answer of JoinRun");
  }
  std::vector<std::shared_ptr<Data>> data;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    data.swap(data_);
    chunks_.clear();
  }
  changed_.NotifyAll();
  pump_.join();
  for (const auto& stream : data) {
    stream->Forget();
    run_->OnDataClosed(stream->id());
  }
  if (control_ != nullptr) control_->Forget();
  if (control_id_ != 0) run_->OnControlClosed(control_id_);
}

void MemoryTrainer::WaitForChange(const char* what) {
  if (changed_.WaitForMicros(&mutex_, kMinute)) return;
  std::fprintf(stderr, "rank %d waited a minute for %s\n", rank_, what);
  std::abort();
}

void MemoryTrainer::Join(v1::JoinRunRequest request) {
  auto run = server_->FindRun(request.name());
  if (!run.ok()) {
    MutexLock lock(&mutex_);
    join_status_ = run.status();
    return;
  }
  run_ = *run;
  request.set_rank(rank_);
  *request.mutable_incarnation() = life_.ToProto();
  request.set_protocol_version(kProtocolVersion);
  {
    MutexLock lock(&mutex_);
    join_status_.reset();
  }
  join_token_ =
      run_->Join(request, [this](const absl::Status& status, const v1::JoinRunResponse& answer) {
        MutexLock lock(&mutex_);
        join_status_ = status;
        join_answer_ = answer;
        changed_.NotifyAll();
      });
}

absl::StatusOr<v1::JoinRunResponse> MemoryTrainer::Joined() {
  MutexLock lock(&mutex_);
  while (!join_status_) WaitForChange("the answer of JoinRun");
  if (!join_status_->ok()) return *join_status_;
  return join_answer_;
}

v1::Sender MemoryTrainer::sender() const {
  v1::Sender sender;
  sender.set_run_uid(run_->spec()->opened().run_uid());
  sender.set_placement_epoch(run_->spec()->opened().placement_epoch());
  sender.set_rank(rank_);
  *sender.mutable_incarnation() = life_.ToProto();
  return sender;
}

absl::Status MemoryTrainer::Connect() {
  control_ = std::make_shared<Control>(this);
  STIEFEL_ASSIGN_OR_RETURN(control_id_, run_->OpenControl(sender(), control_));
  return ConnectData();
}

absl::Status MemoryTrainer::ConnectData() {
  auto data = std::make_shared<Data>(this);
  STIEFEL_ASSIGN_OR_RETURN(const uint64_t id, run_->OpenData(sender(), data));
  data->set_id(id);
  MutexLock lock(&mutex_);
  data_.push_back(data);
  changed_.NotifyAll();
  return absl::OkStatus();
}

void MemoryTrainer::DropData() {
  std::vector<std::shared_ptr<Data>> data;
  {
    MutexLock lock(&mutex_);
    data.swap(data_);
    chunks_.clear();
  }
  for (const auto& stream : data) {
    stream->Forget();
    run_->OnDataClosed(stream->id());
  }
}

void MemoryTrainer::set_reading(bool reading) {
  MutexLock lock(&mutex_);
  reading_ = reading;
  changed_.NotifyAll();
}

void MemoryTrainer::set_keep_chunks(bool keep) {
  MutexLock lock(&mutex_);
  keep_ = keep;
}

std::vector<OutgoingChunk> MemoryTrainer::TakeChunks() {
  MutexLock lock(&mutex_);
  return std::move(kept_);
}

// Takes chunks off the streams and tells the host, as a transport's thread would.
void MemoryTrainer::Pump() {
  for (;;) {
    std::shared_ptr<Data> stream;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && (chunks_.empty() || !reading_ || chunks_.front().first->id() == 0))
        changed_.Wait(&mutex_);
      if (stopping_) return;
      stream = chunks_.front().first;
      Receive(chunks_.front().second);
      if (keep_) kept_.push_back(std::move(chunks_.front().second));
      chunks_.pop_front();
    }
    changed_.NotifyAll();
    run_->OnDataWritten(stream->id());
  }
}

void MemoryTrainer::Receive(const OutgoingChunk& chunk) {
  std::string payload;
  for (const OutgoingChunk::Span& span : chunk.payload)
    payload.append(static_cast<const char*>(span.data), span.size);
  int64_t elements = 0;
  for (const v1::Piece& piece : chunk.header.pieces()) elements += piece.count();
  const size_t element_bytes = elements == 0 ? 0 : payload.size() / elements;
  size_t offset = 0;
  for (const v1::Piece& piece : chunk.header.pieces()) {
    ReceivedUpdate& update = updates_[{piece.block(), chunk.header.step(), chunk.header.attempt(),
                                       chunk.header.round()}];
    update.type = chunk.header.type();
    update.absent = piece.absent();
    if (piece.absent()) continue;
    const std::string bytes = payload.substr(offset, piece.count() * element_bytes);
    offset += bytes.size();
    if (Crc32c(bytes.data(), bytes.size()) != piece.crc32c()) {
      std::fprintf(stderr, "rank %d: a piece with a wrong checksum\n", rank_);
      std::abort();
    }
    const size_t begin = piece.offset() * element_bytes;
    if (update.bytes.size() < begin + bytes.size()) update.bytes.resize(begin + bytes.size());
    update.bytes.replace(begin, bytes.size(), bytes);
    update.received += static_cast<int64_t>(bytes.size());
  }
}

void MemoryTrainer::Send(v1::TrainerMessage message) {
  *message.mutable_sender() = sender();
  run_->OnControlMessage(control_id_, message);
}

void MemoryTrainer::Begin(int64_t step, int32_t attempt, v1::BeginStep begin) {
  v1::TrainerMessage message;
  begin.set_step(step);
  begin.set_attempt(attempt);
  *message.mutable_begin_step() = std::move(begin);
  Send(std::move(message));
}

void MemoryTrainer::End(int64_t step, int32_t attempt) {
  v1::TrainerMessage message;
  message.mutable_end_push()->set_step(step);
  message.mutable_end_push()->set_attempt(attempt);
  Send(std::move(message));
}

void MemoryTrainer::Decide(int64_t step, v1::Outcome outcome, int32_t attempt, int32_t round,
                           std::vector<int32_t> skipped) {
  v1::TrainerMessage message;
  v1::Decide* decide = message.mutable_decide();
  decide->set_step(step);
  decide->set_attempt(attempt);
  decide->set_round(round);
  decide->set_outcome(outcome);
  if (outcome != v1::COMMIT) decide->set_reason("the test says so");
  for (const int32_t matrix : skipped) decide->add_skipped_matrices(matrix);
  Send(std::move(message));
}

v1::ChunkHeader MemoryTrainer::Header(int64_t step, int32_t attempt) const {
  v1::ChunkHeader header;
  header.set_type(v1::ChunkHeader::GRADIENT);
  *header.mutable_sender() = sender();
  header.set_step(step);
  header.set_attempt(attempt);
  return header;
}

void MemoryTrainer::AddPiece(v1::ChunkHeader* header, int32_t block, int64_t offset,
                             const std::string& bytes, int64_t element_bytes, int32_t part) {
  v1::Piece* piece = header->add_pieces();
  piece->set_block(block);
  piece->set_part(part);
  piece->set_offset(offset);
  piece->set_count(static_cast<int64_t>(bytes.size()) / element_bytes);
  piece->set_crc32c(Crc32c(bytes.data(), bytes.size()));
}

absl::Status MemoryTrainer::Chunk(const v1::ChunkHeader& header, const std::string& payload) {
  uint64_t id;
  {
    MutexLock lock(&mutex_);
    if (data_.empty()) return absl::UnavailableError("no data stream");
    id = data_.front()->id();
  }
  MemoryChunk chunk(header, payload);
  return run_->OnChunk(id, &chunk);
}

absl::Status MemoryTrainer::Push(int64_t step, int32_t block, const std::vector<float>& values,
                                 int32_t attempt, int32_t part) {
  v1::ChunkHeader header = Header(step, attempt);
  const std::string bytes = BytesOf(values);
  AddPiece(&header, block, 0, bytes, 4, part);
  return Chunk(header, bytes);
}

absl::Status MemoryTrainer::PushAbsent(int64_t step, int32_t block, int32_t attempt) {
  v1::ChunkHeader header = Header(step, attempt);
  v1::Piece* piece = header.add_pieces();
  piece->set_block(block);
  piece->set_absent(true);
  return Chunk(header, "");
}

absl::Status MemoryTrainer::InitWeights(int32_t matrix, Rect rect,
                                        const std::vector<float>& values) {
  v1::ChunkHeader header;
  header.set_type(v1::ChunkHeader::INIT_WEIGHTS);
  *header.mutable_sender() = sender();
  const std::string bytes = BytesOf(values);
  AddPiece(&header, matrix, 0, bytes);
  v1::Rectangle* wire = header.mutable_pieces(0)->mutable_rect();
  wire->set_row_begin(rect.row_begin);
  wire->set_row_end(rect.row_end);
  wire->set_col_begin(rect.col_begin);
  wire->set_col_end(rect.col_end);
  MemoryChunk chunk(header, bytes);
  return run_->TakeInitWeights(&chunk).status();
}

v1::ServerMessage MemoryTrainer::Next(v1::ServerMessage::KindCase kind) {
  MutexLock lock(&mutex_);
  for (;;) {
    for (auto message = messages_.begin(); message != messages_.end(); ++message) {
      if (message->kind_case() != kind) continue;
      v1::ServerMessage found = std::move(*message);
      messages_.erase(message);
      return found;
    }
    WaitForChange("a control message");
  }
}

bool MemoryTrainer::Has(v1::ServerMessage::KindCase kind) {
  MutexLock lock(&mutex_);
  for (const v1::ServerMessage& message : messages_) {
    if (message.kind_case() == kind) return true;
  }
  return false;
}

void MemoryTrainer::AwaitCredit(int64_t step, int32_t attempt) {
  for (;;) {
    const v1::Credit credit = Next(v1::ServerMessage::kCredit).credit();
    if (credit.step() == step && credit.attempt() == attempt) return;
  }
}

ReceivedUpdate MemoryTrainer::Await(int32_t block, int64_t step, int32_t attempt, int32_t round,
                                    int64_t bytes) {
  MutexLock lock(&mutex_);
  for (;;) {
    const auto found = updates_.find({block, step, attempt, round});
    if (found != updates_.end() && (found->second.absent || found->second.received >= bytes))
      return found->second;
    WaitForChange("an update");
  }
}

absl::Status MemoryTrainer::AwaitControlEnd() {
  MutexLock lock(&mutex_);
  while (!control_end_) WaitForChange("the end of the control stream");
  return *control_end_;
}

}  // namespace stiefel::testing
