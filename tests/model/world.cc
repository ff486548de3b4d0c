#include "tests/model/world.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace stiefel::model {
namespace {

constexpr int64_t kNow = 1000;

std::string DecisionName(v1::Outcome outcome, int32_t round) {
  return outcome == v1::COMMIT ? absl::StrCat("COMMIT of round ", round)
                               : v1::Outcome_Name(outcome);
}

}  // namespace

Setting::Setting(const Config& c) : config(c) {
  shape.servers = config.servers;
  shape.world_size = config.trainers;
  shape.matrices = config.servers - (config.idle_server ? 1 : 0);
  shape.elements = config.pieces;
  shape.mode = config.weights ? v1::WEIGHTS : v1::DELTA;
  const int32_t owners = shape.matrices;
  shape.matrices += config.absent_matrix ? 1 : 0;
  for (int32_t server = 0; server < config.servers; ++server) {
    v1::OpenRunRequest opened = testing::OpenRequest(shape, server);
    for (int32_t m = 0; m < shape.matrices; ++m) opened.set_owners(m, m % owners);
    specs.push_back(*RunSpec::Create(opened));
  }
}

std::vector<TrainerBlock> Setting::Blocks(const v1::Placement& placement) const {
  std::vector<TrainerBlock> blocks;
  for (int32_t m = 0; m < shape.matrices; ++m) {
    TrainerBlock block;
    block.matrix = m;
    block.server = placement.owners(m);
    block.elements = config.pieces;
    block.piece_elements = 1;
    blocks.push_back(block);
  }
  return blocks;
}

std::vector<int32_t> ServersOf(const v1::Placement& placement) {
  std::vector<int32_t> servers;
  for (const std::string& address : placement.servers())
    servers.push_back(std::stoi(address.substr(std::string("server").size())));
  return servers;
}

World::World(const Setting* setting)
    : setting_(setting),
      truth_(std::make_shared<Truth>()),
      restarts_(setting->config.restarts),
      zombies_(setting->config.zombies),
      losses_(setting->config.losses),
      duplicates_(setting->config.duplicates),
      deadlines_(setting->config.deadlines),
      moves_(setting->config.moves),
      fetch_fails_(setting->config.fetch_fails) {
  const Config& config = setting_->config;
  for (int32_t m = 0; m < setting_->matrices(); ++m)
    truth_->weights[{0, m}] = static_cast<Value>(m + 1);
  for (int32_t s = 0; s < setting_->servers(); ++s) {
    const bool open = s < config.servers;
    auto server =
        std::make_shared<Server>(RunMachine(setting_->specs[open ? s : 0], kNow, config.policy));
    server->open = open;
    Actions actions;
    server->machine.OnWeightsReady(&actions);
    for (int32_t m = 0; m < setting_->matrices(); ++m)
      server->weights.push_back(open && server->machine.spec().Owns(m) ? static_cast<Value>(m + 1)
                                                                       : 0);
    server->consumed_bytes.resize(config.trainers);
    servers_.push_back(std::move(server));
  }
  for (int32_t rank = 0; rank < config.trainers; ++rank)
    StartProcess(rank, Incarnation(1, 100), nullptr, 0);
  Settle();
  if (!config.join_at_once) return;
  const auto is_call = [](const auto& message) { return message->rpc(); };
  for (;;) {
    const auto call = std::find_if(bag_.begin(), bag_.end(), is_call);
    if (call == bag_.end()) break;
    Event event;
    event.kind = Event::Kind::kDeliver;
    event.message = (*call)->hash;
    Apply(event);
  }
}

// ---------------------------------------------------------------- copies on write

World::Server& World::MutableServer(int32_t server) {
  if (servers_[server].use_count() > 1)
    servers_[server] = std::make_shared<Server>(*servers_[server]);
  servers_[server]->hashed = false;
  return *servers_[server];
}

World::Process& World::MutableProcess(int32_t process) {
  if (processes_[process].use_count() > 1)
    processes_[process] = std::make_shared<Process>(*processes_[process]);
  processes_[process]->hashed = false;
  return *processes_[process];
}

World::Truth& World::MutableTruth() {
  if (truth_.use_count() > 1) truth_ = std::make_shared<Truth>(*truth_);
  return *truth_;
}

int32_t World::Current(int32_t rank) const {
  for (int32_t p = static_cast<int32_t>(processes_.size()) - 1; p >= 0; --p) {
    if (processes_[p]->rank == rank) return p;
  }
  return -1;
}

int32_t World::Find(int32_t rank, const Incarnation& life) const {
  for (int32_t p = 0; p < static_cast<int32_t>(processes_.size()); ++p) {
    if (processes_[p]->rank == rank && processes_[p]->life == life) return p;
  }
  return -1;
}

// ---------------------------------------------------------------- promises

void World::Violate(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

// Never two different decisions for one (step, attempt) of a placement, never a step consumed
// twice, by whatever placement.
void World::Say(const std::string& who, int64_t epoch, int64_t step, int32_t attempt,
                v1::Outcome outcome, int32_t round) {
  const std::string name = DecisionName(outcome, round);
  const std::array<int64_t, 3> key = {epoch, step, attempt};
  const auto said = truth_->said.find(key);
  if (said != truth_->said.end()) {
    if (said->second != name)
      Violate(absl::StrCat("two decisions: ", who, " says ", name, " of step ", step, " attempt ",
                           attempt, ", before it was ", said->second));
    return;
  }
  Truth& truth = MutableTruth();
  truth.said[key] = name;
  if (outcome == v1::DROP) return;
  const auto [consumed, first] = truth.consumed.emplace(step, std::make_pair(epoch, attempt));
  if (!first && consumed->second != std::make_pair(epoch, attempt))
    Violate(absl::StrCat("step consumed twice: ", who, " consumes step ", step, " by attempt ",
                         attempt, " of placement ", epoch, ", before it was attempt ",
                         consumed->second.second, " of placement ", consumed->second.first));
  const Config& config = setting_->config;
  const bool finite = step != config.skip_step && step != config.local_step;
  if (finite != (outcome == v1::COMMIT))
    Violate(absl::StrCat("wrong outcome: ", name, " of step ", step, ", whose gradients are ",
                         finite ? "finite" : "not finite"));
}

// All copies of a matrix are equal after a step.
void World::CheckWeights(const std::string& who, int64_t step, int32_t matrix, Value value) {
  const auto known = truth_->weights.find({step, matrix});
  if (known == truth_->weights.end()) {
    MutableTruth().weights[{step, matrix}] = value;
  } else if (known->second != value) {
    Violate(absl::StrCat("copies differ: matrix ", matrix, " after step ", step, " at ", who));
  }
}

// ---------------------------------------------------------------- messages

void World::Post(Message message) {
  if (!message.up() && !Runs(message.process)) return;
  Insert(&bag_, Seal(std::move(message)));
}

// Nobody receives for this life any more.
void World::Forget(int32_t process) {
  bag_.erase(std::remove_if(bag_.begin(), bag_.end(),
                            [process](const auto& message) {
                              return !message->up() && message->process == process;
                            }),
             bag_.end());
}

void World::Deliver(const Message& message) {
  if (message.up()) {
    DeliverUp(message);
  } else {
    DeliverDown(message);
  }
}

bool World::AtOnce(const Message& message) const {
  const Config& config = setting_->config;
  const bool chunk = std::holds_alternative<ChunkUp>(message.body) ||
                     std::holds_alternative<ChunkDown>(message.body);
  if (config.chunks_at_once && chunk) return true;
  if (!config.stale_at_once) return false;
  const Process& process = *processes_[message.process];
  if (message.up()) {
    const RunMachine& machine = servers_[message.server]->machine;
    // What is said under another placement is answered, or waits for this server's switch.
    const auto* said = std::get_if<v1::TrainerMessage>(&message.body);
    if (said != nullptr && said->sender().placement_epoch() != machine.placement_epoch())
      return false;
    if (process.life < machine.ranks()[process.rank].incarnation) return true;
    const auto open = std::make_pair(machine.attempt().step, machine.attempt().attempt);
    std::pair<int64_t, int32_t> key(INT64_MAX, 0);
    if (const auto* gradient = std::get_if<ChunkUp>(&message.body)) {
      if (gradient->header.sender().placement_epoch() == machine.placement_epoch())
        key = {gradient->header.step(), gradient->header.attempt()};
    } else if (const auto* control = std::get_if<v1::TrainerMessage>(&message.body)) {
      if (control->has_end_push())
        key = {control->end_push().step(), control->end_push().attempt()};
      // The answer to this one would be as stale.
      if (control->has_begin_step() && process.has_weights &&
          control->sender().placement_epoch() == process.placement.epoch() &&
          open <= std::make_pair(process.trainer.target(), process.trainer.attempt()))
        key = {control->begin_step().step(), control->begin_step().attempt()};
    }
    return key < open;
  }
  if (!process.has_weights) return false;
  if (const auto* update = std::get_if<ChunkDown>(&message.body))
    return update->header.step() <= process.trainer.applied();
  const auto* control = std::get_if<v1::ServerMessage>(&message.body);
  if (control == nullptr || !control->has_decided()) return false;
  const v1::Decided& decided = control->decided();
  if (control->placement_epoch() != process.placement.epoch())
    return control->placement_epoch() < process.placement.epoch();
  return decided.step() <= process.trainer.applied() ||
         (decided.step() == process.trainer.target() && decided.outcome() == v1::DROP &&
          decided.attempt() < process.trainer.attempt());
}

// What happens at once, until nothing of it is left.
void World::Settle() {
  const Config& config = setting_->config;
  for (bool again = true; again;) {
    again = !to_drive_.empty();
    const std::vector<int32_t> drive = std::exchange(to_drive_, {});
    for (const int32_t process : drive) Drive(process);
    if (config.chunks_at_once || config.stale_at_once) {
      const auto due = std::find_if(bag_.begin(), bag_.end(),
                                    [this](const auto& message) { return AtOnce(*message); });
      if (due != bag_.end()) {
        const std::shared_ptr<const Message> message = *due;
        bag_.erase(due);
        Deliver(*message);
        again = true;
      }
    }
    for (int32_t s = 0; s < setting_->servers(); ++s) {
      for (int32_t i = 0; config.compute_at_once && i < ComputingCount(s);) {
        if (!MayCompute(s, i)) {
          ++i;
          continue;
        }
        Compute(s, i);
        i = 0;
        again = true;
      }
      while (config.settle_at_once && !servers_[s]->settling.empty()) {
        SettleServer(s);
        again = true;
      }
    }
  }
}

// ---------------------------------------------------------------- events

std::vector<Event> World::Enabled() const {
  std::vector<Event> events;
  for (const auto& message : bag_) {
    Event event;
    event.kind = Event::Kind::kDeliver;
    event.message = message->hash;
    events.push_back(event);
  }
  for (int32_t s = 0; s < setting_->servers(); ++s) {
    Event event;
    event.server = s;
    event.kind = Event::Kind::kCompute;
    for (event.index = 0; event.index < ComputingCount(s); ++event.index) {
      if (MayCompute(s, event.index)) events.push_back(event);
    }
    event.kind = Event::Kind::kFetch;
    event.index = 0;
    if (MayFetch(s)) events.push_back(event);
    event.kind = Event::Kind::kSettle;
    event.index = 0;
    if (!servers_[s]->settling.empty()) events.push_back(event);
  }
  for (int32_t p = 0; p < static_cast<int32_t>(processes_.size()); ++p) {
    const Process& process = *processes_[p];
    for (int32_t s = 0; s < setting_->servers() && Runs(p); ++s) {
      const Link& link = process.links[s];
      Event event;
      event.process = p;
      event.server = s;
      event.kind = Event::Kind::kConnect;
      const bool may = servers_[s]->open && (link.joined || Leads(process, s));
      if (may && !(link.control && (link.data || !link.joined))) events.push_back(event);
      event.kind = Event::Kind::kRetry;
      const bool wants = (process.asked.count(s) > 0 && process.records.count(s) == 0) ||
                         ToOpen(process, s) ||
                         (process.joining && !link.joined && IsMember(process, s));
      if (wants && !link.calling) events.push_back(event);
    }
  }
  EnableFaults(&events);
  return events;
}

bool World::Apply(const Event& event) {
  if (!violation_.empty()) return false;
  std::shared_ptr<const Message> message;
  if (event.kind == Event::Kind::kDeliver || event.kind == Event::Kind::kDuplicate ||
      event.kind == Event::Kind::kLose) {
    const auto found = std::find_if(bag_.begin(), bag_.end(), [&event](const auto& candidate) {
      return candidate->hash == event.message;
    });
    if (found == bag_.end()) return false;
    message = *found;
    if (event.kind != Event::Kind::kDuplicate) bag_.erase(found);
  } else {
    // The rest is rare enough to ask.
    const std::vector<Event> enabled = Enabled();
    const bool possible = std::any_of(enabled.begin(), enabled.end(), [&event](const Event& e) {
      return e.kind == event.kind && e.process == event.process && e.server == event.server &&
             e.index == event.index && e.variant == event.variant && e.zombie == event.zombie;
    });
    if (!possible && event.kind != Event::Kind::kDeadline &&
        (event.kind != Event::Kind::kMoveDeadline ||
         event.process >= static_cast<int32_t>(processes_.size())))
      return false;
  }
  switch (event.kind) {
    case Event::Kind::kDuplicate:
      --duplicates_;
      [[fallthrough]];
    case Event::Kind::kDeliver:
      Deliver(*message);
      break;
    case Event::Kind::kLose:
      --losses_;
      if (message->rpc()) {
        MutableProcess(message->process).links[message->server].calling = false;
      } else {
        Break(message->process, message->server);
      }
      break;
    case Event::Kind::kConnect:
      Connect(event.process, event.server);
      break;
    case Event::Kind::kRetry:
      Call(event.process, event.server);
      break;
    case Event::Kind::kCompute:
      Compute(event.server, event.index);
      break;
    case Event::Kind::kSettle:
      SettleServer(event.server);
      break;
    case Event::Kind::kFetch:
      FetchState(event.server);
      break;
    case Event::Kind::kMoveDeadline: {
      --deadlines_;
      LeaderSends sends;
      Process& leader = MutableProcess(event.process);
      if (leader.leader) leader.leader->OnMoveDeadline(&sends);
      SendFromLeader(event.process, sends);
      AfterMove(event.process);
      break;
    }
    case Event::Kind::kDeadline: {
      --deadlines_;
      Actions actions;
      MutableServer(event.server).machine.OnStepDeadline(kNow, &actions);
      Perform(event.server, std::move(actions));
      break;
    }
    case Event::Kind::kRestart:
      Restart(event);
      break;
  }
  Settle();
  return true;
}

}  // namespace stiefel::model
