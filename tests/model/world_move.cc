// Changes of placement: what the leader's host, the ranks' hosts and the servers' hosts do.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/model/world.h"

namespace stiefel::model {
namespace {

constexpr int64_t kNow = 1000;

int32_t IndexOf(const std::vector<int32_t>& list, int32_t server) {
  const auto found = std::find(list.begin(), list.end(), server);
  return found == list.end() ? -1 : static_cast<int32_t>(found - list.begin());
}

std::string Address(int32_t server) { return absl::StrCat("server", server, ":1"); }

}  // namespace

bool World::IsMember(const Process& process, int32_t server) const {
  return IndexOf(process.members, server) >= 0;
}

int32_t World::TrainerIndex(const Process& process, int32_t server) const {
  return IndexOf(process.members, server);
}

int32_t World::LeaderIndex(const Process& process, int32_t server) const {
  return process.leader ? IndexOf(process.leader_servers, server) : -1;
}

// ---------------------------------------------------------------- the leader

v1::Placement World::NextPlacement(const v1::Placement& now, int64_t epoch) const {
  const int32_t servers = now.servers_size();
  const int32_t tries = setting_->config.moves - moves_ - 1;
  auto kind = static_cast<MoveKind>((static_cast<int32_t>(setting_->config.move_kind) + tries) % 4);
  if (kind == MoveKind::kShrink && servers == 1) kind = MoveKind::kGrow;
  const std::vector<int32_t> members = ServersOf(now);
  int32_t incoming = 0;
  while (IndexOf(members, incoming) >= 0) ++incoming;
  if (incoming == setting_->servers() && kind != MoveKind::kShrink) kind = MoveKind::kRotate;
  v1::Placement next = now;
  next.set_epoch(epoch);
  switch (kind) {
    case MoveKind::kReplace:
      next.set_servers(servers - 1, Address(incoming));
      break;
    case MoveKind::kRotate:
      for (int32_t& owner : *next.mutable_owners()) owner = (owner + 1) % servers;
      break;
    case MoveKind::kShrink:
      next.mutable_servers()->RemoveLast();
      for (int32_t& owner : *next.mutable_owners()) owner %= servers - 1;
      break;
    case MoveKind::kGrow:
      next.add_servers(Address(incoming));
      next.set_owners(0, servers);
      break;
  }
  return next;
}

bool World::WantsMove(const Process& process) const {
  return process.leader && !process.leader->moving() && moves_ > 0 && !process.trainer.begun() &&
         process.trainer.has_weights() && !process.trainer.End() &&
         truth_->moved_after.count(process.trainer.applied()) == 0 &&
         process.trainer.applied() ==
             setting_->config.move_step + static_cast<int64_t>(truth_->moved_after.size()) &&
         process.trainer.applied() < setting_->config.steps;
}

void World::StartMove(int32_t process) {
  Process& me = MutableProcess(process);
  --moves_;
  const int64_t largest = std::max(me.placement.epoch(), me.leader->largest_epoch());
  v1::Prepare prepare;
  *prepare.mutable_placement() = NextPlacement(
      me.placement, setting_->config.policy.fresh_epochs ? largest + 1 : me.placement.epoch() + 1);
  prepare.set_after_step(me.trainer.applied());
  const std::vector<int32_t> next = ServersOf(prepare.placement());
  me.leader_servers.resize(me.members.size());
  for (const int32_t server : next) {
    if (IndexOf(me.leader_servers, server) < 0) me.leader_servers.push_back(server);
  }
  std::vector<bool> stays;
  for (const int32_t server : me.leader_servers) stays.push_back(IndexOf(next, server) >= 0);
  me.move = prepare;
  LeaderSends sends;
  const absl::Status started = me.leader->StartMove(prepare, std::move(stays), &sends);
  if (!started.ok()) Violate(absl::StrCat("the move does not start: ", started.ToString()));
  SendFromLeader(process, sends);
  for (const int32_t server : next) {
    if (ToOpen(me, server)) Call(process, server);
  }
}

bool World::ToOpen(const Process& process, int32_t server) const {
  return process.move && process.leader->moving() && !IsMember(process, server) &&
         IndexOf(process.leader_servers, server) >= 0 && !process.links[server].taken_over;
}

v1::OpenRunRequest World::OpenRequest(const Process& leader, int32_t server) const {
  v1::OpenRunRequest request = setting_->specs[0]->opened();
  const v1::Placement& next = leader.move->placement();
  *request.mutable_leader() = leader.life.ToProto();
  *request.mutable_servers() = next.servers();
  *request.mutable_owners() = next.owners();
  request.set_placement_epoch(next.epoch());
  request.set_server_index(IndexOf(ServersOf(next), server));
  *request.mutable_moves_in()->mutable_placement() = leader.placement;
  request.mutable_moves_in()->set_after_step(leader.move->after_step());
  return request;
}

void World::DeliverOpenAnswer(int32_t process, int32_t server, const OpenAnswer& answer) {
  Process& me = MutableProcess(process);
  me.links[server].calling = false;
  if (!ToOpen(me, server)) return;
  if (answer.status.ok()) {
    me.links[server].taken_over = true;
    if (setting_->config.connect_at_once) Connect(process, server);
    return;
  }
  v1::EpochAck failed;
  failed.set_epoch(me.move->placement().epoch());
  failed.set_state(v1::EpochAck::FAILED);
  failed.set_reason(std::string(answer.status.message()));
  LeaderSends sends;
  me.leader->OnEpochAck(LeaderIndex(me, server), failed, &sends);
  SendFromLeader(process, sends);
  AfterMove(process);
}

// The leader's move may just have ended.
void World::AfterMove(int32_t process) {
  Process& me = MutableProcess(process);
  to_drive_.push_back(process);
  if (!me.leader || me.leader->moving()) return;
  const std::optional<v1::Prepare> own = std::exchange(me.move, std::nullopt);
  if (own && me.leader->move_end()->switched) {
    const v1::Prepare& prepare = *own;
    Adopt(process, prepare.placement());
    me.leader = LeaderMachine::Opened(static_cast<int32_t>(me.members.size()),
                                      prepare.after_step() + 1, setting_->config.policy);
    me.leader_servers = me.members;
    return;
  }
  LeaveOthers(process);
}

bool World::Leads(const Process& process, int32_t server) const {
  const int32_t index = LeaderIndex(process, server);
  return index >= 0 && process.leader->Leads(index) && process.links[server].taken_over;
}

// Servers that are not in the run, or not any more.
void World::LeaveOthers(int32_t process) {
  Process& me = MutableProcess(process);
  for (const int32_t server : me.leader_servers) {
    if (Leads(me, server)) continue;
    Break(process, server);
    me.links[server].taken_over = false;
  }
}

// ---------------------------------------------------------------- takeover

// The records of every server that any record names are here: the new leader knows all.
void World::FinishGathering(int32_t process) {
  Process& me = MutableProcess(process);
  const bool all = std::all_of(me.asked.begin(), me.asked.end(),
                               [&me](int32_t server) { return me.records.count(server) > 0; });
  const auto connect = [&] {
    for (const int32_t server : std::vector<int32_t>(me.leader_servers)) {
      if (Runs(process) && Leads(me, server) && setting_->config.connect_at_once)
        Connect(process, server);
    }
  };
  if (me.leader) return connect();
  const v1::TakeOverResponse* newest = nullptr;
  for (const auto& [server, record] : me.records) {
    if (record && (newest == nullptr || newest->placement_epoch() < record->placement_epoch()))
      newest = &*record;
  }
  if (newest == nullptr && all) return TellAgain(process);
  if (newest == nullptr || (!all && setting_->config.policy.take_over_all)) return;
  const v1::OpenRunRequest& opened = newest->opened();
  if (opened.has_moves_in() && newest->placement_epoch() < opened.placement_epoch()) {
    me.placement = opened.moves_in().placement();
  } else {
    me.placement.set_epoch(newest->placement_epoch());
    *me.placement.mutable_servers() = opened.servers();
    *me.placement.mutable_owners() = opened.owners();
  }
  me.members = ServersOf(me.placement);
  const std::vector<TrainerBlock> blocks = setting_->Blocks(me.placement);
  me.trainer.Rejoin(static_cast<int32_t>(me.members.size()), blocks, blocks);
  me.leader_servers = me.members;
  for (const auto& [server, record] : me.records) {
    if (record && !IsMember(me, server)) me.leader_servers.push_back(server);
  }
  const auto count = static_cast<int32_t>(me.leader_servers.size());
  me.leader = LeaderMachine::TakingOver(count, setting_->config.policy);
  LeaderSends sends;
  for (int32_t i = 0; i < count; ++i) {
    const auto record = me.records.find(me.leader_servers[i]);
    if (record != me.records.end() && record->second)
      me.leader->OnRecord(i, *record->second, &sends);
  }
  SendFromLeader(process, sends);
  LeaveOthers(process);
  connect();
}

// ---------------------------------------------------------------- every rank

// The run is on other servers: the rank leaves its streams and joins again.
void World::Adopt(int32_t process, const v1::Placement& placement) {
  Process& me = MutableProcess(process);
  for (int32_t server = 0; server < setting_->servers(); ++server) {
    if (me.links[server].control) Break(process, server);
    me.links[server] = Link();
  }
  me.placement = placement;
  me.members = ServersOf(placement);
  me.received.clear();
  const std::vector<TrainerBlock> blocks = setting_->Blocks(placement);
  me.trainer.Rejoin(static_cast<int32_t>(me.members.size()), blocks, blocks);
  for (const int32_t server : me.members) {
    me.links[server].taken_over = me.rank == 0;
    Call(process, server);
  }
}

// Where none of the servers that this life was told of holds the run any more, its user tells it of
// those that do.
void World::TellAgain(int32_t process) {
  Process& me = MutableProcess(process);
  const auto open = [this](int32_t server) { return servers_[server]->open; };
  if (std::any_of(me.members.begin(), me.members.end(), open)) return;
  v1::Placement newest;
  for (const auto& host : servers_) {
    v1::Placement own;
    if (!host->open || host->machine.away()) continue;
    const v1::Placement& now = InForce(*host, &own);
    if (newest.epoch() < now.epoch()) newest = now;
  }
  if (me.rank != 0) return Adopt(process, newest);
  for (const int32_t server : ServersOf(newest)) {
    if (me.asked.insert(server).second) Call(process, server);
  }
}

// ---------------------------------------------------------------- servers

void World::DeliverOpen(const Message& message, const v1::OpenRunRequest& request) {
  Server& host = MutableServer(message.server);
  OpenAnswer answer;
  const std::string bytes = request.SerializeAsString();
  // One that left has been closed by the leader since, unless a newer leader has it.
  const bool left = host.open && host.machine.away() &&
                    host.machine.placement_epoch() < request.placement_epoch() &&
                    host.machine.ranks()[0].incarnation == Incarnation(request.leader());
  if (left) CloseServer(message.server);
  if (host.open) {
    if (host.request != bytes) answer.status = absl::FailedPreconditionError("another run is held");
    return Post({message.server, message.process, answer, {}});
  }
  host.machine = RunMachine(*RunSpec::Create(request), kNow, setting_->config.policy);
  host.open = true;
  host.request = bytes;
  host.decided = request.moves_in().after_step();
  Actions actions;
  host.machine.OnOpened(&actions);
  Perform(message.server, std::move(actions));
  Post({message.server, message.process, answer, {}});
}

bool World::ComesIn(const Server& host) {
  const v1::OpenRunRequest& opened = host.machine.spec().opened();
  return opened.has_moves_in() && host.machine.placement_epoch() < opened.placement_epoch();
}

// A server that was to come in, and that no living leader knows of, is released after the takeover
// timeout (rule 14).
void World::ReleaseIncoming(int32_t server) {
  constexpr int64_t kTick = 1000000;
  if (!servers_[server]->open || !ComesIn(*servers_[server])) return;
  if (const Process& leader = *processes_[Current(0)]; Leads(leader, server)) return;
  Server& host = MutableServer(server);
  host.machine.OnLeaseEnd(0, kNow);
  const int64_t end = kNow + host.machine.spec().takeover_timeout() + kTick;
  for (int64_t now = kNow; now <= end && host.open; now += kTick) {
    Actions actions;
    host.machine.OnTick(now, &actions);
    Perform(server, std::move(actions));
  }
  Settle();
}

void World::CloseServer(int32_t server) {
  for (int32_t p = 0; p < static_cast<int32_t>(processes_.size()); ++p) {
    if (processes_[p]->links[server].control) Break(p, server);
  }
  Server& host = MutableServer(server);
  host.open = false;
  host.request.clear();
  host.fetch.reset();
  host.fetched.clear();
  host.computing.clear();
  host.settling.clear();
}

// The placement in force as this server knows it.
const v1::Placement& World::InForce(const Server& host, v1::Placement* own) const {
  const v1::OpenRunRequest& opened = host.machine.spec().opened();
  if (ComesIn(host)) return opened.moves_in().placement();
  *own = host.machine.spec().placement();
  return *own;
}

// Owners give the state after a step once they have decided it, and while they have it.
bool World::MayFetch(int32_t server) const {
  const Server& host = *servers_[server];
  if (!host.open || !host.fetch) return false;
  v1::Placement own;
  const v1::Placement& now = InForce(host, &own);
  const std::vector<int32_t> owners = ServersOf(now);
  for (const int32_t matrix : host.fetch->next->owned()) {
    const int32_t owner = owners[now.owners(matrix)];
    if (owner == server) continue;
    const RunMachine& machine = servers_[owner]->machine;
    if (machine.placement_epoch() != now.epoch() ||
        machine.consumed_step() < host.fetch->after_step)
      return false;
  }
  return true;
}

void World::FetchState(int32_t server) {
  Server& host = MutableServer(server);
  const Fetch fetch = *std::exchange(host.fetch, std::nullopt);
  absl::Status status;
  if (std::exchange(fetch_fails_, false)) {
    status = absl::ResourceExhaustedError("no room");
  } else {
    v1::Placement own;
    const v1::Placement& now = InForce(host, &own);
    const std::vector<int32_t> owners = ServersOf(now);
    for (const int32_t matrix : fetch.next->owned()) {
      const int32_t owner = owners[now.owners(matrix)];
      if (owner == server) continue;
      const RunMachine& machine = servers_[owner]->machine;
      if (machine.consumed_step() != fetch.after_step) {
        status = absl::FailedPreconditionError("the owner is past that step");
        break;
      }
      const Value value = servers_[owner]->weights[matrix];
      CheckWeights(absl::StrCat("server ", server, ", fetched from server ", owner),
                   fetch.after_step, matrix, value);
      host.fetched[matrix] = value;
    }
  }
  Actions actions;
  host.machine.OnPrepared(fetch.next->opened().placement_epoch(), status, &actions);
  Perform(server, std::move(actions));
}

void World::PerformSwitch(int32_t server, const action::SwitchPlacement& change) {
  for (int32_t p = 0; p < static_cast<int32_t>(processes_.size()); ++p) {
    if (processes_[p]->links[server].control) Break(p, server);
  }
  Server& host = MutableServer(server);
  const std::string who = absl::StrCat("server ", server, ", after its switch");
  if (truth_->moved_after.count(host.decided) == 0) MutableTruth().moved_after.insert(host.decided);
  for (int32_t matrix = 0; matrix < setting_->matrices(); ++matrix) {
    Value& weights = host.weights[matrix];
    if (change.next == nullptr || !change.next->Owns(matrix)) {
      weights = 0;  // let go
      continue;
    }
    if (const auto found = host.fetched.find(matrix); found != host.fetched.end())
      weights = found->second;
    CheckWeights(who, host.decided, matrix, weights);
  }
  host.fetch.reset();
  host.fetched.clear();
  host.staged.clear();
  host.kept.clear();
  host.placed.clear();
  host.computing.clear();
  std::fill(host.consumed_bytes.begin(), host.consumed_bytes.end(), 0);
  host.settling.clear();
  if (change.next != nullptr) host.settling.emplace_back(change.step, change.attempt);
}

}  // namespace stiefel::model
