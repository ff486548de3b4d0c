// What a server's host does: performs the actions of its machine.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/model/world.h"

namespace stiefel::model {
namespace {

constexpr int64_t kNow = 1000;
constexpr int64_t kUnlimited = int64_t{1} << 40;
constexpr int64_t kElementBytes = 4;
// A JoinRun's token: the life that calls, and what it says it has applied.
constexpr uint64_t kLives = 1 << 20;

}  // namespace

// ---------------------------------------------------------------- deliveries

void World::DeliverUp(const Message& message) {
  if (const auto* chunk = std::get_if<ChunkUp>(&message.body))
    return DeliverChunkUp(message, *chunk);
  if (message.rpc()) return DeliverCall(message);
  if (!servers_[message.server]->open) return;
  Actions actions;
  MutableServer(message.server)
      .machine.OnControlMessage(std::get<v1::TrainerMessage>(message.body), kNow, &actions);
  Perform(message.server, std::move(actions));
}

// A rank is replaced only after its lease ended; for a process that is dead, or taken for dead, it
// ends at the latest when a newer life calls.
void World::EndLeaseOfTheDead(int32_t server, int32_t rank, const Incarnation& newer) {
  const RankState& state = servers_[server]->machine.ranks()[rank];
  const int32_t holder = Find(rank, state.incarnation);
  if (holder < 0 || !(state.incarnation < newer)) return;
  if (processes_[holder]->alive && !processes_[holder]->zombie) return;
  MutableServer(server).machine.OnLeaseEnd(rank, kNow);
}

void World::DeliverCall(const Message& message) {
  if (const auto* open = std::get_if<v1::OpenRunRequest>(&message.body))
    return DeliverOpen(message, *open);
  Actions actions;
  const absl::Status closed = absl::NotFoundError("no such run here");
  if (const auto* join = std::get_if<v1::JoinRunRequest>(&message.body)) {
    const int64_t applied = join->has_applied_step() ? join->applied_step() : -1;
    if (!servers_[message.server]->open)
      return Post({message.server, message.process, JoinAnswer{closed, {}, applied}, {}});
    EndLeaseOfTheDead(message.server, join->rank(), Incarnation(join->incarnation()));
    MutableServer(message.server)
        .machine.OnJoin(message.process + (applied + 1) * kLives, *join, kNow, kNow + kUnlimited,
                        &actions);
    return Perform(message.server, std::move(actions));
  }
  const auto& request = std::get<v1::TakeOverRequest>(message.body);
  if (!servers_[message.server]->open)
    return Post({message.server, message.process, TakeOverAnswer{closed, {}}, {}});
  if (setting_->config.policy.fence_leader)
    EndLeaseOfTheDead(message.server, 0, Incarnation(request.leader()));
  auto record = MutableServer(message.server).machine.OnTakeOver(request, kNow, &actions);
  Perform(message.server, std::move(actions));
  TakeOverAnswer answer;
  answer.status = record.status();
  if (record.ok()) answer.response = *std::move(record);
  Post({message.server, message.process, std::move(answer), {}});
}

void World::DeliverChunkUp(const Message& message, const ChunkUp& chunk) {
  if (!servers_[message.server]->open) return;
  Server& host = MutableServer(message.server);
  const v1::Piece& piece = chunk.header.pieces(0);
  const auto verdict = host.machine.OnPiece(chunk.header, piece, kNow);
  const Process& sender = *processes_[message.process];
  const int32_t rank = sender.rank;
  if (!verdict.ok()) {
    const bool current = chunk.header.sender().placement_epoch() == host.machine.placement_epoch();
    if (setting_->config.policy.match_names && current && sender.alive && !sender.zombie &&
        sender.life == host.machine.ranks()[rank].incarnation)
      Violate(
          absl::StrCat("a piece of a living trainer was refused: ", verdict.status().ToString()));
    return;
  }
  if (*verdict != PieceVerdict::kPlace) return;
  Actions actions;
  if (!piece.absent()) {
    host.placed[{rank, piece.block(), piece.offset()}] = chunk.tag;
    host.consumed_bytes[rank] += piece.count() * kElementBytes;
  }
  if (setting_->config.small_window) actions.push_back(action::GrantCredit{rank});
  host.machine.OnPlaced(chunk.header, piece, kNow, &actions);
  Perform(message.server, std::move(actions));
}

// ---------------------------------------------------------------- actions

void World::Perform(int32_t server, Actions actions) {
  for (const Action& action : actions) {
    if (const auto* send = std::get_if<action::SendControl>(&action)) {
      PerformSend(server, *send);
    } else if (const auto* answer = std::get_if<action::AnswerJoin>(&action)) {
      Post({server,
            static_cast<int32_t>(answer->token % kLives),
            JoinAnswer{answer->status, answer->response,
                       static_cast<int64_t>(answer->token / kLives) - 1},
            {}});
    } else if (const auto* grant = std::get_if<action::GrantCredit>(&action)) {
      PerformGrant(server, grant->rank);
    } else if (const auto* compute = std::get_if<action::Compute>(&action)) {
      MutableServer(server).computing.push_back({compute->matrix, compute->step, compute->attempt,
                                                 compute->round,
                                                 servers_[server]->machine.placement_epoch()});
    } else if (const auto* publish = std::get_if<action::Publish>(&action)) {
      Server& host = MutableServer(server);
      const Attempt& attempt = host.machine.attempt();
      if (attempt.matrices[publish->matrix].result.absent()) {
        Staged& staged = host.staged[publish->matrix];
        staged.step = attempt.step;
        staged.attempt = attempt.attempt;
        staged.round = attempt.round;
        staged.absent = true;
      }
      const Staged& staged = host.staged[publish->matrix];
      for (int32_t rank = 0; rank < setting_->config.trainers; ++rank)
        PerformPublish(server, rank, publish->matrix, staged,
                       UpdateValue(host, publish->matrix, staged));
    } else if (const auto* resend = std::get_if<action::Resend>(&action)) {
      PerformResend(server, resend->rank);
    } else if (const auto* finish = std::get_if<action::Finish>(&action)) {
      PerformFinish(server, finish->decision);
    } else if (const auto* free = std::get_if<action::FreeDeltas>(&action)) {
      PerformFree(server, free->step);
    } else if (const auto* fence = std::get_if<action::Fence>(&action)) {
      const int32_t older = Find(fence->rank, fence->older);
      if (older >= 0) Break(older, server);
    } else if (const auto* fetch = std::get_if<action::FetchState>(&action)) {
      MutableServer(server).fetch = Fetch{fetch->next, fetch->after_step};
    } else if (std::holds_alternative<action::DropPrepared>(action)) {
      Server& host = MutableServer(server);
      host.fetch.reset();
      host.fetched.clear();
    } else if (const auto* change = std::get_if<action::SwitchPlacement>(&action)) {
      PerformSwitch(server, *change);
    } else if (const auto* end = std::get_if<action::EndRun>(&action)) {
      if (servers_[server]->request.empty())
        Violate(absl::StrCat("server ", server, " ended the run: ", end->reason));
      CloseServer(server);
    }
  }
  if (!servers_[server]->machine.failure().ok())
    Violate(absl::StrCat("run failed at server ", server, ": ",
                         servers_[server]->machine.failure().ToString()));
}

void World::PerformSend(int32_t server, const action::SendControl& send) {
  const int32_t process = Find(send.rank, send.to);
  if (process < 0 || !Runs(process) || !processes_[process]->links[server].control) return;
  if (send.message.has_awaiting() || send.message.has_heartbeat_ack()) return;  // words only
  v1::ServerMessage message = send.message;
  if (message.has_arrived())
    message.mutable_arrived()->set_consumed_bytes(servers_[server]->consumed_bytes[send.rank]);
  Post({server, process, std::move(message), {}});
}

void World::PerformGrant(int32_t server, int32_t rank) {
  const RunMachine& machine = servers_[server]->machine;
  const int32_t process = Find(rank, machine.ranks()[rank].incarnation);
  if (process < 0 || !Runs(process) || !processes_[process]->links[server].control) return;
  if (processes_[process]->placement.epoch() != machine.placement_epoch()) return;
  v1::ServerMessage message;
  message.set_placement_epoch(machine.placement_epoch());
  v1::Credit* credit = message.mutable_credit();
  credit->set_step(machine.attempt().step);
  credit->set_attempt(machine.attempt().attempt);
  credit->set_granted_bytes(servers_[server]->consumed_bytes[rank] +
                            (setting_->config.small_window ? kElementBytes : kUnlimited));
  if (!setting_->config.credit_at_once) return Post({server, process, std::move(message), {}});
  Process& trainer = MutableProcess(process);
  trainer.trainer.OnCredit(TrainerIndex(trainer, server), message.credit());
  to_drive_.push_back(process);
}

Value World::UpdateValue(const Server& host, int32_t matrix, const Staged& staged) const {
  return setting_->config.weights ? Mix(host.weights[matrix], staged.delta) : staged.delta;
}

void World::PerformPublish(int32_t server, int32_t rank, int32_t matrix, const Staged& staged,
                           Value value) {
  const int32_t process = Find(rank, servers_[server]->machine.ranks()[rank].incarnation);
  if (process < 0 || !Runs(process) || !processes_[process]->links[server].data) return;
  for (int64_t offset = 0; offset < (staged.absent ? 1 : setting_->config.pieces); ++offset) {
    ChunkDown chunk;
    chunk.header.set_type(v1::ChunkHeader::UPDATE);
    chunk.header.mutable_sender()->set_placement_epoch(servers_[server]->machine.placement_epoch());
    chunk.header.set_step(staged.step);
    chunk.header.set_attempt(staged.attempt);
    chunk.header.set_round(staged.round);
    v1::Piece* piece = chunk.header.add_pieces();
    piece->set_block(matrix);
    piece->set_offset(offset);
    piece->set_count(staged.absent ? 0 : 1);
    piece->set_absent(staged.absent);
    chunk.value = value;
    Post({server, process, std::move(chunk), {}});
  }
}

void World::PerformResend(int32_t server, int32_t rank) {
  const Server& host = *servers_[server];
  const RankState& state = host.machine.ranks()[rank];
  const int32_t process = Find(rank, state.incarnation);
  if (process < 0 || !Runs(process) || !processes_[process]->links[server].data) return;
  for (const int32_t matrix : host.machine.spec().owned()) {
    for (int64_t offset = 0; state.needs_weights && offset < setting_->config.pieces; ++offset) {
      ChunkDown chunk;
      chunk.header.set_type(v1::ChunkHeader::WEIGHTS_AT);
      chunk.header.mutable_sender()->set_placement_epoch(host.machine.placement_epoch());
      chunk.header.set_step(host.machine.consumed_step());
      v1::Piece* piece = chunk.header.add_pieces();
      piece->set_block(matrix);
      piece->set_offset(offset);
      piece->set_count(1);
      chunk.value = host.weights[matrix];
      Post({server, process, std::move(chunk), {}});
    }
  }
  for (const auto& [matrix, staged] : host.kept) {
    if (state.applied < staged.step)
      PerformPublish(server, rank, matrix, staged,
                     setting_->config.weights ? host.weights[matrix] : staged.delta);
  }
  for (const auto& [matrix, staged] : host.staged)
    PerformPublish(server, rank, matrix, staged, UpdateValue(host, matrix, staged));
}

// ---------------------------------------------------------------- computing

World::Staged World::Sum(const Server& host, const Computing& work) const {
  Staged staged;
  staged.step = work.step;
  staged.attempt = work.attempt;
  staged.round = work.round;
  staged.delta = Mix(Mix(static_cast<Value>(work.step), static_cast<Value>(work.attempt)),
                     Mix(static_cast<Value>(work.round), static_cast<Value>(work.matrix)));
  staged.delta = Mix(staged.delta, static_cast<Value>(work.epoch));
  for (int64_t rank = 0; rank < setting_->config.trainers; ++rank) {
    staged.lives.push_back(0);
    for (int64_t offset = 0; offset < setting_->config.pieces; ++offset) {
      const auto placed = host.placed.find({rank, work.matrix, offset});
      if (placed == host.placed.end()) {
        staged.flaw = absl::StrCat("rank ", rank, "'s gradient is not all there");
        continue;
      }
      const Tag& tag = placed->second;
      if (offset == 0) staged.lives.back() = tag.generation;
      if (tag.generation != staged.lives.back())
        staged.flaw = absl::StrCat("rank ", rank, "'s gradient is of two lives");
      if (tag.step != work.step || tag.attempt != work.attempt)
        staged.flaw = absl::StrCat("rank ", rank, "'s gradient is of step ", tag.step, " attempt ",
                                   tag.attempt);
    }
    staged.delta = Mix(staged.delta, static_cast<Value>(staged.lives.back()));
  }
  return staged;
}

std::pair<int32_t, int32_t> World::Other(const Computing& work) const {
  for (int32_t s = 0; s < setting_->servers(); ++s) {
    for (int32_t i = 0; i < ComputingCount(s); ++i) {
      const Computing& other = servers_[s]->computing[i];
      if (other.matrix == 1 - work.matrix && other.step == work.step &&
          other.attempt == work.attempt && other.round == work.round && other.epoch == work.epoch)
        return {s, i};
    }
  }
  return {-1, -1};
}

// A computation in a collective waits for the other one.
bool World::MayCompute(int32_t server, int32_t index) const {
  const Config& config = setting_->config;
  const Computing& work = servers_[server]->computing[index];
  if (!config.coupled || work.matrix > 1 || work.met) return true;
  const bool fails = work.round == 1 && work.step == config.fail_step && work.attempt == 0;
  return (fails && work.matrix == 0) || Other(work).first >= 0;
}

void World::Compute(int32_t server, int32_t index) {
  const Config& config = setting_->config;
  const Computing work = servers_[server]->computing[index];
  const bool fails = work.round == 1 && work.step == config.fail_step && work.attempt == 0 &&
                     (!config.coupled || work.matrix == 0);
  if (config.coupled && work.matrix <= 1 && !work.met && !fails) {
    const auto [other, at] = Other(work);
    MutableServer(other).computing[at].met = true;
  }
  Server& host = MutableServer(server);
  host.computing.erase(host.computing.begin() + index);
  const Attempt& attempt = host.machine.attempt();
  const bool open =
      attempt.step == work.step && attempt.attempt == work.attempt && attempt.round == work.round;
  if (open && !fails) host.staged[work.matrix] = Sum(host, work);
  v1::Vote::Matrix result;
  result.set_matrix(work.matrix);
  result.set_sum_squares(work.step == config.clip_step ? 100 : 1);
  // Shards of one matrix agree on it.
  if (work.step == config.skip_step && work.matrix <= (config.coupled ? 1 : 0))
    result.set_nonfinite_gradient(1);
  Actions actions;
  host.machine.OnComputed(work.step, work.attempt, work.round, result,
                          fails ? absl::InternalError("no workspace") : absl::OkStatus(), &actions);
  Perform(server, std::move(actions));
}

void World::SettleServer(int32_t server) {
  Server& host = MutableServer(server);
  const auto [step, attempt] = host.settling.front();
  host.settling.erase(host.settling.begin());
  Actions actions;
  host.machine.OnSettled(step, attempt, &actions);
  Perform(server, std::move(actions));
}

// ---------------------------------------------------------------- the end of an attempt

void World::PerformFinish(int32_t server, const v1::Decide& decision) {
  Server& host = MutableServer(server);
  const std::string who = absl::StrCat("server ", server);
  Say(who, host.machine.placement_epoch(), decision.step(), decision.attempt(), decision.outcome(),
      decision.round());
  if (decision.outcome() != v1::DROP) {
    if (decision.step() != host.decided + 1)
      Violate(absl::StrCat(who, " consumes step ", decision.step(), " after step ", host.decided));
    host.decided = decision.step();
    if (!host.kept.empty())
      Violate(absl::StrCat("memory: ", who, " keeps the deltas of two steps"));
    for (const int32_t matrix : host.machine.spec().owned()) {
      if (decision.outcome() == v1::COMMIT) CommitMatrix(server, decision, matrix);
      CheckWeights(who, decision.step(), matrix, host.weights[matrix]);
    }
  }
  // Collectives of an attempt that is over are cancelled.
  if (setting_->config.coupled) host.computing.clear();
  host.staged.clear();
  host.placed.clear();
  std::fill(host.consumed_bytes.begin(), host.consumed_bytes.end(), 0);
  host.settling.emplace_back(decision.step(), decision.attempt());
}

void World::CommitMatrix(int32_t server, const v1::Decide& decision, int32_t matrix) {
  Server& host = MutableServer(server);
  const auto found = host.staged.find(matrix);
  const std::string what = absl::StrCat("server ", server, " commits step ", decision.step(),
                                        " attempt ", decision.attempt(), " of matrix ", matrix);
  if (found == host.staged.end()) return Violate(what + " without having computed it");
  const Staged& staged = found->second;
  if (staged.step != decision.step() || staged.attempt != decision.attempt() ||
      (!staged.absent && staged.round != decision.round()))
    return Violate(
        absl::StrCat(what, ", but has computed attempt ", staged.attempt, " round ", staged.round));
  if (!staged.flaw.empty()) return Violate(absl::StrCat(what, ": ", staged.flaw));
  host.kept[matrix] = staged;
  if (staged.absent) return;
  const auto lives = truth_->lives.find(decision.step());
  if (lives == truth_->lives.end()) {
    MutableTruth().lives[decision.step()] = staged.lives;
  } else if (lives->second != staged.lives) {
    return Violate(what + " from other lives of the ranks than another server");
  }
  host.weights[matrix] = Mix(host.weights[matrix], staged.delta);
}

void World::PerformFree(int32_t server, int64_t step) {
  Server& host = MutableServer(server);
  for (int32_t rank = 0; rank < setting_->config.trainers; ++rank) {
    const RankState& state = host.machine.ranks()[rank];
    const int32_t p = Find(rank, state.incarnation);
    if (p < 0 || !state.joined || !Runs(p) || processes_[p]->zombie) continue;
    if (processes_[p]->has_weights && processes_[p]->applied < step)
      Violate(absl::StrCat("server ", server, " frees the deltas of step ", step, ", which rank ",
                           rank, " has not applied"));
  }
  host.kept.clear();
}

}  // namespace stiefel::model
