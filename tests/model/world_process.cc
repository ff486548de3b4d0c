// What a trainer's host and its user do: calls, streams, and the training loop. The user begins a
// step as soon as it may, pushes everything, and applies a step as soon as it has ended.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/model/world.h"

namespace stiefel::model {
namespace {

constexpr int64_t kNow = 1000;

}  // namespace

// ---------------------------------------------------------------- lives

void World::StartProcess(int32_t rank, Incarnation life, const Process* before, int32_t variant) {
  const Config& config = setting_->config;
  auto process = std::make_shared<Process>(
      rank, life,
      TrainerMachine(config.servers, setting_->blocks, setting_->blocks, config.policy));
  process->links.resize(config.servers);
  if (before == nullptr) {
    for (int32_t m = 0; m < setting_->matrices(); ++m)
      process->weights.push_back(static_cast<Value>(m + 1));
    process->joining = true;
    if (rank == 0) {
      process->leader = LeaderMachine::Opened(config.servers, 1, config.policy);
      for (Link& link : process->links) link.taken_over = true;
    }
  } else {
    process->has_weights = variant != 2;
    // A life that was taken for dead may apply further steps before it is fenced.
    process->old_copy = variant == 1 || (variant == 0 && (before->old_copy || before->zombie));
    process->applied = variant == 0 ? before->applied : variant == 1 ? before->older_applied : 0;
    process->weights = variant == 1 ? before->older : before->weights;
    process->joining = rank != 0;
    if (rank == 0) process->leader = LeaderMachine::TakingOver(config.servers, config.policy);
  }
  processes_.push_back(std::move(process));
  const int32_t index = static_cast<int32_t>(processes_.size()) - 1;
  for (int32_t server = 0; server < config.servers; ++server) Call(index, server);
}

void World::Restart(const Event& event) {
  Process& old = MutableProcess(event.process);
  if (event.zombie) {
    --zombies_;
    old.zombie = true;
  } else {
    --restarts_;
    old.alive = false;
    Forget(event.process);
  }
  const Process before = old;
  StartProcess(before.rank, Incarnation(before.life.generation + 1, 100), &before, event.variant);
}

void World::Stop(int32_t process, const std::string& why) {
  MutableProcess(process).stopped = why;
  Forget(process);
}

// ---------------------------------------------------------------- calls and streams

// The call that this life needs of the server next.
void World::Call(int32_t process, int32_t server) {
  Process& me = MutableProcess(process);
  Link& link = me.links[server];
  if (me.leader && !link.taken_over) {
    link.calling = true;
    return Post({server, process, testing::TakeOver(me.life), {}});
  }
  if (!me.joining || link.joined) return;
  link.calling = true;
  std::optional<int64_t> applied;
  if (me.has_weights) applied = me.applied;
  v1::JoinRunRequest request = testing::JoinRequest(setting_->shape, me.rank, me.life, applied);
  Post({server, process, std::move(request), {}});
}

void World::Connect(int32_t process, int32_t server) {
  Process& me = MutableProcess(process);
  Link& link = me.links[server];
  const v1::Sender sender = testing::SenderOf(me.rank, me.life);
  if (!link.control) {
    Actions actions;
    link.control = true;
    const absl::Status up = MutableServer(server).machine.OnControlUp(sender, kNow, &actions);
    if (!up.ok()) {
      link.control = false;
      if (!me.zombie) Violate(absl::StrCat("a living trainer may not connect: ", up.ToString()));
      return Stop(process, std::string(up.message()));
    }
    Perform(server, std::move(actions));
    LeaderSends sends;
    if (me.leader) me.leader->OnServerUp(server, &sends);
    SendFromLeader(process, sends);
  }
  if (link.joined && !link.data) {
    Actions actions;
    link.data = true;
    const absl::Status up = MutableServer(server).machine.OnDataUp(sender, kNow, &actions);
    if (!up.ok()) return Stop(process, std::string(up.message()));
    Perform(server, std::move(actions));
    TrainerSends sends;
    me.trainer.OnServerUp(server, &sends);
    SendFromTrainer(process, sends);
  }
  to_drive_.push_back(process);
}

// The streams between the two end, on both ends.
void World::Break(int32_t process, int32_t server) {
  Process& me = MutableProcess(process);
  Link& link = me.links[server];
  if (link.control) MutableServer(server).machine.OnControlDown(me.rank, me.life, kNow);
  link.control = link.data = false;
  me.trainer.OnServerDown(server);
}

void World::SendFrom(int32_t process, int32_t server, v1::TrainerMessage message) {
  const Process& me = *processes_[process];
  if (!me.links[server].control) return;
  *message.mutable_sender() = testing::SenderOf(me.rank, me.life);
  Post({server, process, std::move(message), {}});
}

void World::SendFromLeader(int32_t process, const LeaderSends& sends) {
  for (const LeaderSend& send : sends) {
    if (send.message.has_decide()) {
      const v1::Decide& decide = send.message.decide();
      Say(absl::StrCat("leader (life ", process, ")"), decide.step(), decide.attempt(),
          decide.outcome(), decide.round());
    }
    SendFrom(process, send.server, send.message);
  }
}

void World::SendFromTrainer(int32_t process, const TrainerSends& sends) {
  for (const TrainerSend& send : sends) SendFrom(process, send.server, send.message);
}

// ---------------------------------------------------------------- deliveries

void World::DeliverDown(const Message& message) {
  if (!Runs(message.process)) return;
  const int32_t server = message.server;
  if (const auto* control = std::get_if<v1::ServerMessage>(&message.body)) {
    DeliverControlDown(message.process, server, *control);
  } else if (const auto* chunk = std::get_if<ChunkDown>(&message.body)) {
    DeliverChunkDown(message.process, server, *chunk);
  } else if (const auto* join = std::get_if<JoinAnswer>(&message.body)) {
    DeliverJoinAnswer(message.process, server, *join);
  } else {
    DeliverTakeOverAnswer(message.process, server, std::get<TakeOverAnswer>(message.body));
  }
  to_drive_.push_back(message.process);
}

void World::DeliverControlDown(int32_t process, int32_t server, const v1::ServerMessage& message) {
  Process& me = MutableProcess(process);
  LeaderSends sends;
  switch (message.kind_case()) {
    case v1::ServerMessage::kVote:
      if (me.leader) me.leader->OnVote(server, message.vote(), &sends);
      break;
    case v1::ServerMessage::kDrop:
      if (me.leader) me.leader->OnDrop(server, message.drop(), &sends);
      break;
    case v1::ServerMessage::kDecideAck:
      if (me.leader) me.leader->OnDecideAck(server, message.decide_ack(), &sends);
      break;
    case v1::ServerMessage::kCredit:
      me.trainer.OnCredit(server, message.credit());
      break;
    case v1::ServerMessage::kArrived:
      me.trainer.OnArrived(server, message.arrived());
      break;
    case v1::ServerMessage::kDecided:
      me.trainer.OnDecided(server, message.decided());
      break;
    case v1::ServerMessage::kRefused:
      me.trainer.OnRefused(server, message.refused());
      break;
    default:
      break;
  }
  SendFromLeader(process, sends);
}

void World::DeliverChunkDown(int32_t process, int32_t server, const ChunkDown& chunk) {
  Process& me = MutableProcess(process);
  const v1::Piece& piece = chunk.header.pieces(0);
  const UpdateVerdict verdict = me.trainer.OnUpdate(server, chunk.header, piece);
  if (verdict != UpdateVerdict::kPlace) return;
  me.received[{piece.block(), piece.offset()}] = chunk.value;
  me.trainer.OnUpdatePlaced(chunk.header, piece);
}

void World::DeliverJoinAnswer(int32_t process, int32_t server, const JoinAnswer& answer) {
  Process& me = MutableProcess(process);
  Link& link = me.links[server];
  link.calling = false;
  if (link.joined) return;
  if (answer.status.ok()) {
    link.joined = true;
    std::optional<int64_t> applied;
    if (me.has_weights) applied = me.applied;
    me.trainer.OnJoined(server, applied, answer.response.consumed_step());
    if (setting_->config.connect_at_once) Connect(process, server);
    return;
  }
  if (!absl::IsFailedPrecondition(answer.status)) return;  // it may call again
  // A life that starts from an older copy may be told to restore another one; one that lost
  // nothing must get in, unless there is a newer one.
  MutableProcess(process).restore = !me.zombie;
  if (!me.zombie && !me.old_copy)
    Violate(absl::StrCat("life ", process, " lost nothing and is refused by server ", server, ": ",
                         answer.status.ToString()));
  Stop(process, std::string(answer.status.message()));
}

void World::DeliverTakeOverAnswer(int32_t process, int32_t server, const TakeOverAnswer& answer) {
  Process& me = MutableProcess(process);
  Link& link = me.links[server];
  link.calling = false;
  if (link.taken_over || !me.leader) return;
  if (!answer.status.ok()) {
    if (!absl::IsFailedPrecondition(answer.status)) return;
    if (!me.zombie)
      Violate(absl::StrCat("server ", server,
                           " refuses the newest leader: ", answer.status.ToString()));
    return Stop(process, std::string(answer.status.message()));
  }
  link.taken_over = true;
  LeaderSends sends;
  me.leader->OnRecord(server, answer.response, &sends);
  SendFromLeader(process, sends);
  if (setting_->config.connect_at_once) Connect(process, server);
}

// ---------------------------------------------------------------- the training loop

void World::Drive(int32_t process) {
  if (!Runs(process)) return;
  Process& me = MutableProcess(process);
  if (!me.trainer.fatal().ok()) {
    if (!me.zombie)
      Violate(absl::StrCat("a living trainer is told to stop: ", me.trainer.fatal().ToString()));
    return Stop(process, std::string(me.trainer.fatal().message()));
  }
  if (!me.trainer.step_error().ok() && !me.zombie && setting_->config.policy.match_names)
    Violate(absl::StrCat("a step of a living trainer is refused: ",
                         me.trainer.step_error().ToString()));
  if (me.leader && me.leader->ready() && !me.joining) {
    me.joining = true;
    for (int32_t server = 0; server < setting_->config.servers; ++server) {
      if (!me.links[server].calling) Call(process, server);
    }
  }
  const bool joined =
      std::all_of(me.links.begin(), me.links.end(), [](const Link& link) { return link.joined; });
  while (joined && violation_.empty()) {
    if (const std::optional<StepEnd> end = me.trainer.End()) {
      TakeEnd(process, *end);
    } else if (!me.trainer.begun() && me.trainer.has_weights() &&
               me.trainer.applied() < setting_->config.steps) {
      BeginStep(process);
    } else {
      break;
    }
  }
  SendChunks(process);
}

void World::BeginStep(int32_t process) {
  const Config& config = setting_->config;
  Process& me = MutableProcess(process);
  TrainerSends sends;
  v1::BeginStep begin;
  if (config.clip_step > 0) begin.mutable_common()->set_max_grad_norm(4);
  const int64_t step = me.trainer.target();
  absl::Status status = me.trainer.Begin(step, begin, &sends);
  for (const TrainerBlock& block : setting_->blocks) {
    const bool absent = config.absent_matrix && block.matrix == setting_->matrices() - 1;
    if (status.ok()) status = me.trainer.Push(block.matrix, 0, absent);
  }
  v1::EndPush end;
  if (step == config.local_step && me.rank == config.trainers - 1) end.set_local_finite(false);
  if (status.ok()) status = me.trainer.EndPush(end, &sends);
  if (!status.ok()) Violate(absl::StrCat("the user's call fails: ", status.ToString()));
  SendFromTrainer(process, sends);
}

void World::SendChunks(int32_t process) {
  Process& me = MutableProcess(process);
  for (int32_t server = 0; server < setting_->config.servers; ++server) {
    if (!me.links[server].data) continue;
    for (;;) {
      const std::vector<PieceRef> pieces = me.trainer.NextPieces(server, 1 << 20, 1);
      if (pieces.empty()) break;
      ChunkUp chunk;
      chunk.header.set_type(v1::ChunkHeader::GRADIENT);
      *chunk.header.mutable_sender() = testing::SenderOf(me.rank, me.life);
      chunk.header.set_step(me.trainer.target());
      chunk.header.set_attempt(me.trainer.attempt());
      v1::Piece* piece = chunk.header.add_pieces();
      piece->set_block(pieces[0].block);
      piece->set_part(pieces[0].part);
      piece->set_offset(pieces[0].offset);
      piece->set_count(pieces[0].count);
      piece->set_absent(pieces[0].absent);
      chunk.tag = {me.life.generation, me.trainer.target(), me.trainer.attempt()};
      Post({server, process, std::move(chunk), {}});
    }
  }
}

// A trainer applies exactly the decided attempts and rounds, each once, in order.
void World::TakeEnd(int32_t process, const StepEnd& end) {
  Process& me = MutableProcess(process);
  const std::string who = absl::StrCat("life ", process, " (rank ", me.rank, ")");
  if (me.has_weights) Say(who, end.step, end.attempt, end.outcome, end.round);
  TrainerSends sends;
  if (end.outcome != v1::DROP) {
    if (me.has_weights && end.step != me.applied + 1)
      Violate(absl::StrCat(who, " applies step ", end.step, " after step ", me.applied));
    me.older = me.weights;
    me.older_applied = me.has_weights ? me.applied : -1;
    for (const TrainerBlock& block : setting_->blocks) {
      Value& weights = me.weights[block.matrix];
      const auto piece = [&](int64_t offset) {
        const auto found = me.received.find({block.matrix, offset});
        return found == me.received.end() ? Value{0} : found->second;
      };
      bool untouched = end.outcome == v1::SKIP;
      if (me.has_weights && setting_->config.absent_matrix &&
          block.matrix == setting_->matrices() - 1)
        untouched = true;
      for (int64_t offset = 1; !untouched && offset < block.elements; ++offset) {
        if (piece(offset) != piece(0))
          Violate(absl::StrCat(who, " applies pieces of different updates of matrix ", block.matrix,
                               " in step ", end.step));
      }
      const bool whole = setting_->config.weights || !me.has_weights;
      if (!untouched) weights = whole ? piece(0) : Mix(weights, piece(0));
      CheckWeights(who, end.step, block.matrix, weights);
    }
    me.applied = end.step;
    me.has_weights = true;
    me.old_copy = false;
    me.received.clear();
  }
  const absl::Status applied = me.trainer.Applied(&sends);
  if (!applied.ok()) Violate(absl::StrCat("Applied fails: ", applied.ToString()));
  SendFromTrainer(process, sends);
}

}  // namespace stiefel::model
