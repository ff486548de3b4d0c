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
  const v1::Placement first = setting_->specs[0]->placement();  // as everyone is told at its start
  const std::vector<TrainerBlock> blocks = setting_->Blocks(first);
  auto process = std::make_shared<Process>(
      rank, life, TrainerMachine(config.servers, blocks, blocks, config.policy));
  process->placement = first;
  process->members = ServersOf(first);
  process->links.resize(setting_->servers());
  if (before == nullptr) {
    for (int32_t m = 0; m < setting_->matrices(); ++m)
      process->weights.push_back(static_cast<Value>(m + 1));
    process->joining = true;
    if (rank == 0) {
      process->leader = LeaderMachine::Opened(config.servers, 1, config.policy);
      process->leader_servers = process->members;
      for (const int32_t server : process->members) process->links[server].taken_over = true;
    }
  } else {
    process->has_weights = variant != 2;
    // A life that was taken for dead may apply further steps before it is fenced.
    process->old_copy = variant == 1 || (variant == 0 && (before->old_copy || before->zombie));
    process->applied = variant == 0 ? before->applied : variant == 1 ? before->older_applied : 0;
    process->weights = variant == 1 ? before->older : before->weights;
    process->joining = rank != 0;
    process->takes_over = rank == 0;
    if (rank == 0) process->asked.insert(process->members.begin(), process->members.end());
  }
  processes_.push_back(std::move(process));
  const int32_t index = static_cast<int32_t>(processes_.size()) - 1;
  for (const int32_t server : processes_[index]->members) Call(index, server);
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
  if (me.asked.count(server) > 0 && me.records.count(server) == 0) {
    link.calling = true;
    return Post({server, process, testing::TakeOver(me.life), {}});
  }
  if (ToOpen(me, server)) {
    link.calling = true;
    return Post({server, process, OpenRequest(me, server), {}});
  }
  if (!me.joining || link.joined || !IsMember(me, server)) return;
  link.calling = true;
  std::optional<int64_t> applied;
  if (me.has_weights) applied = me.applied;
  v1::JoinRunRequest request = testing::JoinRequest(setting_->shape, me.rank, me.life, applied);
  Post({server, process, std::move(request), {}});
}

void World::Connect(int32_t process, int32_t server) {
  Process& me = MutableProcess(process);
  Link& link = me.links[server];
  const v1::Sender sender = testing::SenderOf(me.rank, me.life, me.placement.epoch());
  if (!servers_[server]->open) return;
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
    const int32_t leads = LeaderIndex(me, server);
    if (leads >= 0) me.leader->OnServerUp(leads, &sends);
    SendFromLeader(process, sends);
  }
  if (link.joined && !link.data) {
    Actions actions;
    link.data = true;
    const absl::Status up = MutableServer(server).machine.OnDataUp(sender, kNow, &actions);
    if (absl::IsUnavailable(up)) {  // it moved: the control stream tells
      link.data = false;
      return;
    }
    if (!up.ok()) return Stop(process, std::string(up.message()));
    Perform(server, std::move(actions));
    TrainerSends sends;
    me.trainer.OnServerUp(TrainerIndex(me, server), &sends);
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
  if (IsMember(me, server)) me.trainer.OnServerDown(TrainerIndex(me, server));
}

void World::SendFrom(int32_t process, int32_t server, v1::TrainerMessage message) {
  const Process& me = *processes_[process];
  if (!me.links[server].control) return;
  *message.mutable_sender() = testing::SenderOf(me.rank, me.life, me.placement.epoch());
  Post({server, process, std::move(message), {}});
}

void World::SendFromLeader(int32_t process, const LeaderSends& sends) {
  for (const LeaderSend& send : sends) {
    if (send.message.has_decide()) {
      const v1::Decide& decide = send.message.decide();
      Say(absl::StrCat("leader (life ", process, ")"), processes_[process]->placement.epoch(),
          decide.step(), decide.attempt(), decide.outcome(), decide.round());
    }
    SendFrom(process, processes_[process]->leader_servers[send.server], send.message);
  }
}

void World::SendFromTrainer(int32_t process, const TrainerSends& sends) {
  for (const TrainerSend& send : sends)
    SendFrom(process, processes_[process]->members[send.server], send.message);
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
  } else if (const auto* open = std::get_if<OpenAnswer>(&message.body)) {
    DeliverOpenAnswer(message.process, server, *open);
  } else {
    DeliverTakeOverAnswer(message.process, server, std::get<TakeOverAnswer>(message.body));
  }
  to_drive_.push_back(message.process);
}

void World::DeliverControlDown(int32_t process, int32_t server, const v1::ServerMessage& message) {
  Process& me = MutableProcess(process);
  LeaderSends sends;
  const int32_t leads = LeaderIndex(me, server);
  const int32_t index = TrainerIndex(me, server);
  if (message.has_moved()) {
    if (me.rank == 0 || message.moved().placement().epoch() <= me.placement.epoch()) return;
    return Adopt(process, message.moved().placement());
  }
  if (message.has_epoch_ack()) {
    if (leads >= 0) me.leader->OnEpochAck(leads, message.epoch_ack(), &sends);
    SendFromLeader(process, sends);
    return AfterMove(process);
  }
  if (message.placement_epoch() != me.placement.epoch()) return;
  switch (message.kind_case()) {
    case v1::ServerMessage::kVote:
      if (leads >= 0) me.leader->OnVote(leads, message.vote(), &sends);
      break;
    case v1::ServerMessage::kDrop:
      if (leads >= 0) me.leader->OnDrop(leads, message.drop(), &sends);
      break;
    case v1::ServerMessage::kDecideAck:
      if (leads >= 0) me.leader->OnDecideAck(leads, message.decide_ack(), &sends);
      break;
    case v1::ServerMessage::kCredit:
      if (index >= 0) me.trainer.OnCredit(index, message.credit());
      break;
    case v1::ServerMessage::kArrived:
      if (index >= 0) me.trainer.OnArrived(index, message.arrived());
      break;
    case v1::ServerMessage::kDecided:
      if (index >= 0) me.trainer.OnDecided(index, message.decided());
      break;
    case v1::ServerMessage::kRefused:
      if (index >= 0) me.trainer.OnRefused(index, message.refused());
      break;
    default:
      break;
  }
  SendFromLeader(process, sends);
}

void World::DeliverChunkDown(int32_t process, int32_t server, const ChunkDown& chunk) {
  Process& me = MutableProcess(process);
  const v1::Piece& piece = chunk.header.pieces(0);
  if (chunk.header.sender().placement_epoch() != me.placement.epoch()) return;
  const UpdateVerdict verdict = me.trainer.OnUpdate(TrainerIndex(me, server), chunk.header, piece);
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
    const int64_t epoch = answer.response.placement_epoch();
    if (epoch > me.placement.epoch()) {
      v1::Placement placement;
      placement.set_epoch(epoch);
      *placement.mutable_servers() = answer.response.servers();
      *placement.mutable_owners() = answer.response.owners();
      Adopt(process, placement);
    }
    // An older answer: it asks again.
    if (epoch < me.placement.epoch() || !IsMember(me, server)) return;
    link.calling = false;
    link.joined = true;
    std::optional<int64_t> applied;
    if (me.has_weights) applied = me.applied;
    me.trainer.OnJoined(TrainerIndex(me, server), applied, answer.response.consumed_step());
    if (setting_->config.connect_at_once) Connect(process, server);
    return;
  }
  if (absl::IsNotFound(answer.status)) return TellAgain(process);
  if (!absl::IsFailedPrecondition(answer.status)) return;            // it may call again
  if (answer.applied != (me.has_weights ? me.applied : -1)) return;  // of an earlier call
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
  if (me.asked.count(server) == 0 || me.records.count(server) > 0) return;
  if (absl::IsNotFound(answer.status)) {
    me.records[server].reset();
    return FinishGathering(process);
  }
  if (!answer.status.ok()) {
    if (!absl::IsFailedPrecondition(answer.status)) return;
    if (!me.zombie)
      Violate(absl::StrCat("server ", server,
                           " refuses the newest leader: ", answer.status.ToString()));
    return Stop(process, std::string(answer.status.message()));
  }
  link.taken_over = true;
  me.records[server] = answer.response;
  for (const auto* servers :
       {&answer.response.opened().servers(), &answer.response.prepare().placement().servers(),
        &answer.response.opened().moves_in().placement().servers()}) {
    v1::Placement named;
    *named.mutable_servers() = *servers;
    for (const int32_t other : ServersOf(named)) {
      if (me.asked.insert(other).second && !me.links[other].calling) Call(process, other);
    }
  }
  FinishGathering(process);
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
    for (const int32_t server : me.members) {
      if (!me.links[server].calling) Call(process, server);
    }
  }
  const bool joined = std::all_of(me.members.begin(), me.members.end(),
                                  [&me](int32_t server) { return me.links[server].joined; });
  while (joined && violation_.empty()) {
    if (WantsMove(me)) StartMove(process);
    if (const std::optional<StepEnd> end = me.trainer.End()) {
      TakeEnd(process, *end);
    } else if (!me.trainer.begun() && me.trainer.has_weights() &&
               me.trainer.applied() < setting_->config.steps &&
               !(me.leader && me.leader->moving() && setting_->config.policy.withhold_begin)) {
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
  for (int32_t m = 0; m < setting_->matrices(); ++m) {
    const bool absent = config.absent_matrix && m == setting_->matrices() - 1;
    if (status.ok()) status = me.trainer.Push(m, 0, absent);
  }
  v1::EndPush end;
  if (step == config.local_step && me.rank == config.trainers - 1) end.set_local_finite(false);
  if (status.ok()) status = me.trainer.EndPush(end, &sends);
  if (!status.ok()) Violate(absl::StrCat("the user's call fails: ", status.ToString()));
  SendFromTrainer(process, sends);
}

void World::SendChunks(int32_t process) {
  Process& me = MutableProcess(process);
  for (const int32_t server : me.members) {
    if (!me.links[server].data) continue;
    for (;;) {
      const std::vector<PieceRef> pieces =
          me.trainer.NextPieces(TrainerIndex(me, server), 1 << 20, 1);
      if (pieces.empty()) break;
      ChunkUp chunk;
      chunk.header.set_type(v1::ChunkHeader::GRADIENT);
      *chunk.header.mutable_sender() = testing::SenderOf(me.rank, me.life, me.placement.epoch());
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
  if (me.has_weights) Say(who, me.placement.epoch(), end.step, end.attempt, end.outcome, end.round);
  TrainerSends sends;
  if (end.outcome != v1::DROP) {
    if (me.has_weights && end.step != me.applied + 1)
      Violate(absl::StrCat(who, " applies step ", end.step, " after step ", me.applied));
    me.older = me.weights;
    me.older_applied = me.has_weights ? me.applied : -1;
    for (const TrainerBlock& block : setting_->Blocks(me.placement)) {
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
