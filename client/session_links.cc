// Streams of a session, and the thread that tends them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "common/checksum.h"
#include "common/clock.h"

namespace stiefel {
namespace {

// So that the header of a full chunk stays within what kMaxChunkPayloadBytes leaves for it.
constexpr int kMaxPieces = 4096;
// A session thread that is later than this was not running: silence is its own, not the servers'.
constexpr int64_t kFrozenMicros = 1000000;
// Streams to a server that is to come in may break this often.
constexpr int kMaxFailures = 4;

int64_t Now() { return RealClock().NowMicros(); }

// What a stream ends with when coming again cannot help.
bool Final(const absl::Status& why) {
  switch (why.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kUnauthenticated:
      return true;
    default:
      return false;
  }
}

// Of gradient pieces. Each has whole spans.
void SetChecksums(const Layout& layout, OutgoingChunk* chunk) {
  size_t span = 0;
  for (v1::Piece& piece : *chunk->header.mutable_pieces()) {
    if (piece.absent()) continue;
    int64_t left = piece.count() * DTypeSize(layout.wire_push()[piece.block()].dtype);
    uint32_t crc = 0;
    for (; left > 0; ++span) {
      const OutgoingChunk::Span& bytes = chunk->payload[span];
      crc = ExtendCrc32c(crc, bytes.data, bytes.size);
      left -= static_cast<int64_t>(bytes.size);
    }
    piece.set_crc32c(crc);
  }
}

}  // namespace

class Session::ControlEvents final : public ControlListener {
 public:
  ControlEvents(Session* session, int32_t server, Link* link)
      : session_(session), server_(server), link_(link) {}
  void OnMessage(const v1::ServerMessage& message) override {
    session_->OnControl(server_, link_, message);
  }
  void OnClosed(const absl::Status& why) override { session_->OnStreamClosed(server_, link_, why); }

 private:
  Session* const session_;
  const int32_t server_;
  Link* const link_;
};

class Session::DataEvents final : public DataListener {
 public:
  DataEvents(Session* session, int32_t server, Link* link, size_t stream)
      : session_(session), server_(server), link_(link), stream_(stream) {}
  void OnSent() override { session_->OnSent(server_, link_, stream_); }
  void OnChunk(IncomingChunk* chunk) override { session_->OnChunk(server_, link_, chunk); }
  void OnClosed(const absl::Status& why) override { session_->OnStreamClosed(server_, link_, why); }

 private:
  Session* const session_;
  const int32_t server_;
  Link* const link_;
  const size_t stream_;
};

// A link is freed here and in session.cc, where these types are incomplete.
Session::Link::Link() = default;
Session::Link::~Link() = default;

// ---------------------------------------------------------------- opening and closing

void Session::OpenLink(int32_t server) {
  ServerState& state = servers_[server];
  state.link = std::make_unique<Link>();
  Link* link = state.link.get();
  link->control_events = std::make_unique<ControlEvents>(this, server, link);
  link->control = state.connection->OpenControl(link->control_events.get());
  ++link->open_streams;
  state.heartbeat_at = Now() + HeartbeatMicros();
  v1::TrainerMessage hello;
  hello.mutable_hello();
  SendControl(server, std::move(hello));
  if (leader_) {
    LeaderSends sends;
    leader_->OnServerUp(server, &sends);
    Perform(std::move(sends));
  }
  if (trainer_ && !state.comes_in) OpenDataStreams(server);
}

void Session::OpenDataStreams(int32_t server) {
  ServerState& state = servers_[server];
  Link* link = state.link.get();
  for (int i = 0; i < layout_.options().data_streams; ++i) {
    link->data_events.push_back(std::make_unique<DataEvents>(this, server, link, i));
    link->data.push_back(state.connection->OpenData(i, link->data_events.back().get()));
    link->busy.push_back(true);
    ++link->open_streams;
    OutgoingChunk hello;
    hello.header.set_type(v1::ChunkHeader::HELLO);
    *hello.header.mutable_sender() = sender_;
    link->data.back()->Send(std::move(hello));
  }
  TrainerSends sends;
  trainer_->OnServerUp(server, &sends);
  Perform(std::move(sends));
}

void Session::CloseLink(int32_t server, Link* link, const absl::Status& why) {
  if (link->closing) return;
  link->closing = true;
  servers_[server].last_error = OwnCopy(why);
  if (trainer_ && !servers_[server].comes_in) trainer_->OnServerDown(server);
  changed_.NotifyAll();
  wake_.NotifyAll();
}

void Session::OnStreamClosed(int32_t server, Link* link, const absl::Status& why) {
  MutexLock lock(&mutex_);
  --link->open_streams;
  if (!link->closing) {
    const absl::Status reason =
        why.ok() ? absl::UnavailableError("the server ended the stream") : why;
    // While the run moves, a server may have let it go before this rank heard where it went.
    const bool moving = moving_ || leading_ || heard_moved_.has_value();
    if (servers_[server].comes_in && (Final(reason) || servers_[server].failures >= kMaxFailures)) {
      v1::EpochAck failed;
      failed.set_epoch(leader_->largest_epoch());
      failed.set_state(v1::EpochAck::FAILED);
      failed.set_reason(std::string(AtServer(servers_[server].address, reason).message()));
      OnEpochAck(server, failed);
    } else if (Final(reason) && !moving && !servers_[server].comes_in) {
      Fail(AtServer(servers_[server].address, reason));
    }
    CloseLink(server, link, reason);
    ++servers_[server].failures;
    ++timings_.reconnects;
  }
  wake_.NotifyAll();
}

void Session::Fail(const absl::Status& why) {
  if (fatal_.ok()) fatal_ = OwnCopy(why);
  changed_.NotifyAll();
}

// ---------------------------------------------------------------- the session's own thread

int64_t Session::HeartbeatMicros() const {
  return std::max<int64_t>(10000, std::min(lease_ / 3, step_timeout_ / 4));
}

// Returns whether there is any link left to tend.
bool Session::TendLinks(int64_t now, std::vector<Link*>* cancel,
                        std::vector<std::unique_ptr<Link>>* destroy, int64_t* wake) {
  bool any = false;
  for (int32_t s = 0; s < static_cast<int32_t>(servers_.size()); ++s) {
    ServerState& server = servers_[s];
    if (server.link && (!links_wanted_ || !server.link_wanted)) {
      CloseLink(s, server.link.get(), absl::CancelledError("the trainer left"));
    }
    if (server.link && server.link->closing) {
      if (!server.link->cancelled) {
        server.link->cancelled = true;
        cancel->push_back(server.link.get());
      }
      if (server.link->open_streams == 0 && server.link->users == 0) {
        destroy->push_back(std::move(server.link));
        server.reopen_at = now + BackoffMicros(server.failures);
      }
    }
    any = any || server.link;
    if (server.link && !server.link->closing && now >= server.heartbeat_at) {
      v1::TrainerMessage heartbeat;
      heartbeat.mutable_heartbeat();
      SendControl(s, std::move(heartbeat));
      server.heartbeat_at = now + HeartbeatMicros();
    }
    if (!server.link && links_wanted_ && server.link_wanted && fatal_.ok()) {
      if (now >= server.reopen_at) OpenLink(s);
      *wake = std::min(*wake, server.reopen_at);
    }
    if (server.link) *wake = std::min(*wake, server.heartbeat_at);
  }
  return any;
}

// A frozen trainer must not take its own absence for the servers'. Whoever judges by the clock
// calls this first: after a freeze any thread may be the first to run.
void Session::Look(int64_t now) {
  const int64_t gap = now - looked_at_;
  if (looked_at_ != 0 && gap > kFrozenMicros) {
    for (ServerState& server : servers_) server.heard += gap;
    if (awaiting_since_ != 0) awaiting_since_ += gap;
  }
  looked_at_ = now;
}

void Session::RunThread() {
  for (;;) {
    if (trace_) trace_->trace()->FlushIfDue().IgnoreError();  // Close says what is wrong
    std::vector<Link*> cancel;
    std::vector<std::unique_ptr<Link>> destroy;
    {
      MutexLock lock(&mutex_);
      const int64_t now = Now();
      Look(now);
      int64_t wake = now + std::min(HeartbeatMicros(), kFrozenMicros / 4);
      const bool any = TendLinks(now, &cancel, &destroy, &wake);
      links_dying_ = static_cast<int>(destroy.size());
      if (cancel.empty() && destroy.empty()) {
        if (stopping_ && !any) return;
        wake_.WaitUntilMicros(&mutex_, std::max(wake, now + 1000));
        continue;
      }
    }
    // A link is destroyed by this thread alone, so these stay.
    for (Link* link : cancel) {
      link->control->Cancel();
      for (const auto& stream : link->data) stream->Cancel();
    }
    destroy.clear();
    MutexLock lock(&mutex_);
    links_dying_ = 0;
    changed_.NotifyAll();
  }
}

// ---------------------------------------------------------------- sending

void Session::SendControl(int32_t server, v1::TrainerMessage message) {
  Link* link = servers_[server].link.get();
  if (link == nullptr || link->closing) return;  // the machines send again when it is up
  // Withheld until the leader's move is over; the machine sends it again then.
  if (leading_ &&
      (message.has_begin_step() || message.has_end_push() || message.has_arrived_query()))
    return;
  *message.mutable_sender() = sender_;
  link->control->Send(message);
}

template <typename Sends>
void Session::Perform(Sends sends) {
  for (auto& send : sends) SendControl(send.server, std::move(send.message));
}
template void Session::Perform(TrainerSends sends);
template void Session::Perform(LeaderSends sends);

void Session::AddSpans(const WireBlock& wire, const Source& source, int64_t offset, int64_t count,
                       std::vector<OutgoingChunk::Span>* spans) const {
  const int64_t size = DTypeSize(wire.dtype);
  const auto add = [&](int64_t element, int64_t elements) {
    spans->push_back({source.data + element * size, static_cast<size_t>(elements * size)});
  };
  if (!source.strided) return add(wire.first + offset, count);
  const int64_t cols = wire.rect.cols();
  const int64_t block_cols = layout_.push()[wire.block].rect.cols();
  for (const int64_t end = offset + count; offset < end;) {
    const int64_t row = offset / cols;
    const int64_t col = offset % cols;
    const int64_t here = std::min(cols - col, end - offset);
    add((wire.in_block.row_begin + row) * block_cols + wire.in_block.col_begin + col, here);
    offset += here;
  }
}

bool Session::NextChunk(int32_t server, Link** link, size_t* stream, OutgoingChunk* chunk) {
  // Servers may be others, and fewer, since the caller looked.
  if (server >= static_cast<int32_t>(servers_.size()) || servers_[server].comes_in) return false;
  Link* current = servers_[server].link.get();
  if (current == nullptr || current->closing || current->data.empty()) return false;
  const size_t count = current->data.size();
  size_t free = count;
  for (size_t i = 0; i < count && free == count; ++i) {
    const size_t candidate = (current->next_stream + i) % count;
    if (!current->busy[candidate]) free = candidate;
  }
  if (free == count) return false;
  const std::vector<PieceRef> pieces = trainer_->NextPieces(server, chunk_bytes_, kMaxPieces);
  if (pieces.empty()) return false;
  chunk->header.set_type(v1::ChunkHeader::GRADIENT);
  *chunk->header.mutable_sender() = sender_;
  chunk->header.set_step(trainer_->target());
  chunk->header.set_attempt(trainer_->attempt());
  for (const PieceRef& piece : pieces) {
    v1::Piece* wire = chunk->header.add_pieces();
    wire->set_block(piece.block);
    wire->set_part(piece.part);
    wire->set_absent(piece.absent);
    if (piece.absent) continue;
    wire->set_offset(piece.offset);
    wire->set_count(piece.count);
    const WireBlock& block = layout_.wire_push()[piece.block];
    const int64_t size = DTypeSize(block.dtype);
    AddSpans(block, sources_[first_source_[block.block] + piece.part], piece.offset, piece.count,
             &chunk->payload);
    timings_.bytes_pushed += piece.count * size;
  }
  ++timings_.chunks_pushed;
  chunk->keepalive = borrowed_->Lend();
  if (trace_) trace_->Sends(server, free, chunk->header);
  current->busy[free] = true;
  current->next_stream = free + 1;
  ++current->users;
  *link = current;
  *stream = free;
  return true;
}

void Session::Pump(int32_t server) {
  for (;;) {
    Link* link = nullptr;
    size_t stream = 0;
    OutgoingChunk chunk;
    {
      MutexLock lock(&mutex_);
      if (!NextChunk(server, &link, &stream, &chunk)) return;
    }
    SetChecksums(layout_, &chunk);
    link->data[stream]->Send(std::move(chunk));
    MutexLock lock(&mutex_);
    if (--link->users == 0 && link->closing) wake_.NotifyAll();
  }
}

void Session::PumpAll() {
  int32_t count = 0;
  {
    MutexLock lock(&mutex_);
    count = static_cast<int32_t>(servers_.size());
  }
  for (int32_t s = 0; s < count; ++s) Pump(s);
}

void Session::NotePushed() {
  if (!push_ended_ || timings_.push_s != 0 || leading_) return;
  for (int32_t s = 0; s < static_cast<int32_t>(servers_.size()); ++s) {
    const Link* link = servers_[s].link.get();
    if (!trainer_->AllSent(s) || link == nullptr) return;
    if (std::find(link->busy.begin(), link->busy.end(), true) != link->busy.end()) return;
  }
  timings_.push_s = static_cast<double>(Now() - begun_at_) / 1e6;
}

void Session::OnSent(int32_t server, Link* link, size_t stream) {
  {
    MutexLock lock(&mutex_);
    link->busy[stream] = false;
    if (link->closing) return;
    if (trace_) trace_->Sent(server, stream, Now());
    NotePushed();
  }
  Pump(server);
}

// ---------------------------------------------------------------- control messages

void Session::OnControl(int32_t server, Link* link, const v1::ServerMessage& message) {
  {
    MutexLock lock(&mutex_);
    if (link->closing) return;
    ServerState& state = servers_[server];
    state.heard = Now();
    state.failures = 0;
    // Rule 1: of another run or placement. Words about placements name theirs themselves.
    if (message.run_uid() != sender_.run_uid()) return;
    if (message.has_epoch_ack()) return OnEpochAck(server, message.epoch_ack());
    if (message.has_moved()) return OnMoved(server, message.moved());
    if (message.placement_epoch() != sender_.placement_epoch() || state.comes_in) return;
    if (message.has_replan_asked()) {
      if (leader_) OnReplanAsked(message.replan_asked());
      return;
    }
    HandleControl(server, message);
    if (!trainer_) return;
  }
  if (message.has_credit() || message.has_arrived()) Pump(server);
}

void Session::HandleControl(int32_t server, const v1::ServerMessage& message) {
  LeaderSends sends;
  switch (message.kind_case()) {
    case v1::ServerMessage::kVote:
      if (leader_) leader_->OnVote(server, message.vote(), &sends);
      break;
    case v1::ServerMessage::kDrop:
      if (leader_) leader_->OnDrop(server, message.drop(), &sends);
      break;
    case v1::ServerMessage::kDecideAck:
      if (leader_) leader_->OnDecideAck(server, message.decide_ack(), &sends);
      break;
    default:
      if (!trainer_) {
        early_.emplace_back(server, message);
        return;
      }
      break;
  }
  switch (message.kind_case()) {
    case v1::ServerMessage::kCredit:
      trainer_->OnCredit(server, message.credit());
      break;
    case v1::ServerMessage::kArrived:
      trainer_->OnArrived(server, message.arrived());
      break;
    case v1::ServerMessage::kDecided:
      trainer_->OnDecided(server, message.decided());
      if (message.decided().outcome() != v1::DROP &&
          message.decided().step() == trainer_->target()) {
        decided_ = message.decided();
        if (trace_) trace_->Decided(*decided_, Now());
      }
      break;
    case v1::ServerMessage::kRefused:
      trainer_->OnRefused(server, message.refused());
      break;
    case v1::ServerMessage::kAwaiting:
      trainer_->OnAwaiting(server, message.awaiting());
      if (awaiting_since_ == 0 && !trainer_->awaiting().empty()) awaiting_since_ = Now();
      break;
    default:
      break;
  }
  Perform(std::move(sends));
  changed_.NotifyAll();
}

}  // namespace stiefel
