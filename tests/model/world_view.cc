// A world as a whole: whether it has ended, whether it can, what may go wrong in it, its hash, its
// events in words.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/model/world.h"

namespace stiefel::model {
namespace {

// Held state of one machine may not grow: rank records, one attempt, one step of votes.
constexpr size_t kLargestMachine = 24 << 10;

}  // namespace

bool World::Done() const {
  for (int32_t rank = 0; rank < setting_->config.trainers; ++rank) {
    const Process& process = *processes_[Current(rank)];
    if (!process.has_weights || process.applied < setting_->config.steps) return false;
    if (process.leader && !process.leader->ready()) return false;
  }
  for (const int32_t server : processes_[Current(0)]->members) {
    if (servers_[server]->machine.consumed_step() < setting_->config.steps) return false;
  }
  return true;
}

bool World::NeedsRestore() const {
  for (int32_t rank = 0; rank < setting_->config.trainers; ++rank) {
    if (processes_[Current(rank)]->restore) return true;
  }
  return false;
}

int64_t World::attempts_dropped() const {
  return std::count_if(truth_->said.begin(), truth_->said.end(),
                       [](const auto& said) { return said.second == "DROP"; });
}

std::pair<int64_t, int32_t> World::OldestOpen() const {
  std::pair<int64_t, int32_t> oldest(INT64_MAX, 0);
  for (const auto& server : servers_) {
    const Attempt& attempt = server->machine.attempt();
    oldest = std::min(oldest, std::make_pair(attempt.step, attempt.attempt));
  }
  return oldest;
}

int32_t World::ConsumedAttempt(int64_t step) const {
  const auto found = truth_->consumed.find(step);
  return found == truth_->consumed.end() ? -1 : found->second.second;
}

std::string World::Waits() const {
  std::string waits;
  for (int32_t s = 0; s < setting_->servers(); ++s) {
    if (!servers_[s]->open) continue;
    const RunMachine& machine = servers_[s]->machine;
    absl::StrAppend(&waits, "; server ", s, " ", machine.PhaseName(), " at ",
                    machine.attempt().step, ".", machine.attempt().attempt, ", awaits ",
                    machine.Awaited());
  }
  if (const auto& leader = processes_[Current(0)]->leader; leader)
    absl::StrAppend(&waits, "; the leader awaits ", leader->Awaited());
  for (int32_t rank = 0; rank < setting_->config.trainers; ++rank)
    absl::StrAppend(&waits, "; rank ", rank, " has applied ", processes_[Current(rank)]->applied);
  return waits;
}

void World::EnableFaults(std::vector<Event>* events) const {
  const Config& config = setting_->config;
  for (const auto& message : bag_) {
    Event event;
    event.message = message->hash;
    event.kind = Event::Kind::kDuplicate;
    if (duplicates_ > 0) events->push_back(event);
    event.kind = Event::Kind::kLose;
    if (losses_ > 0 && processes_[message->process]->alive) events->push_back(event);
  }
  for (int32_t p = 0; p < static_cast<int32_t>(processes_.size()) && deadlines_ > 0; ++p) {
    if (!Runs(p) || !processes_[p]->leader || !processes_[p]->leader->moving()) continue;
    Event event;
    event.kind = Event::Kind::kMoveDeadline;
    event.process = p;
    events->push_back(event);
  }
  for (int32_t s = 0; s < setting_->servers() && deadlines_ > 0; ++s) {
    if (!servers_[s]->open) continue;
    const Attempt& attempt = servers_[s]->machine.attempt();
    if (attempt.deadline == 0 || (attempt.sealed() && config.policy.seal_on_vote)) continue;
    Event event;
    event.kind = Event::Kind::kDeadline;
    event.server = s;
    events->push_back(event);
  }
  for (int32_t rank = 0; rank < config.trainers; ++rank) {
    if (config.restart_rank >= 0 && rank != config.restart_rank) continue;
    const int32_t p = Current(rank);
    for (int32_t variant = 0; variant < 3; ++variant) {
      if (variant == 0 && !processes_[p]->has_weights) continue;
      if (variant == 1 && (!config.old_snapshots || processes_[p]->older_applied < 0)) continue;
      if (variant == 2 && !(config.weights && config.without_weights)) continue;
      Event event;
      event.kind = Event::Kind::kRestart;
      event.process = p;
      event.variant = variant;
      if (restarts_ > 0) events->push_back(event);
      event.zombie = true;
      if (zombies_ > 0) events->push_back(event);
    }
  }
}

std::vector<Event> World::CloseFairly(uint64_t seed) {
  constexpr size_t kMaxEvents = 20000;
  constexpr int kMaxDeadlines = 12;
  std::vector<Event> taken;
  const auto take = [this, &taken](const Event& event) {
    if (Apply(event)) taken.push_back(event);
  };
  losses_ = duplicates_ = zombies_ = 0;
  for (int deadlines = 0; violation_.empty() && !Done();) {
    restarts_ = deadlines_ = 0;
    Event event;
    if (taken.size() > kMaxEvents) {
      Violate(absl::StrCat("stuck: no end after ", kMaxEvents, " events", Waits()));
    } else if (NeedsRestore()) {
      // In WEIGHTS mode the rank can come back with nothing.
      if (!setting_->config.weights) break;
      event.kind = Event::Kind::kRestart;
      event.variant = 2;
      for (int32_t rank = 0; rank < setting_->config.trainers; ++rank) {
        if (processes_[Current(rank)]->restore) event.process = Current(rank);
      }
      Restart(event);
      Settle();
      taken.push_back(event);
    } else if (const std::vector<Event> enabled = Enabled(); !enabled.empty()) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      take(enabled[(seed >> 33) % enabled.size()]);
    } else if (++deadlines > kMaxDeadlines) {
      Violate(absl::StrCat("stuck", Waits()));
    } else {
      event.kind = Event::Kind::kMoveDeadline;
      event.process = Current(0);
      take(event);
      event.kind = Event::Kind::kDeadline;
      for (event.server = 0; event.server < setting_->servers(); ++event.server) {
        if (servers_[event.server]->open) take(event);
        ReleaseIncoming(event.server);
      }
    }
  }
  return taken;
}

Hash World::StateHash() {
  std::string all;
  const auto add = [&all](const Hash& hash) {
    all.append(reinterpret_cast<const char*>(&hash), sizeof(hash));
  };
  for (const auto& server : servers_) {
    if (!server->hashed) {
      const std::string machine = server->machine.CanonicalBytes();
      if (machine.size() > kLargestMachine)
        Violate(absl::StrCat("a server's machine holds ", machine.size(), " bytes"));
      std::string out = absl::StrCat(machine, server->open, server->request);
      if (server->fetch)
        absl::StrAppend(&out, "f", server->fetch->next->opened().placement_epoch());
      for (const auto& [matrix, value] : server->fetched)
        absl::StrAppend(&out, "F", matrix, ".", value);
      for (const auto& [key, tag] : server->placed)
        absl::StrAppend(&out, "p", key[0], ".", key[1], ".", key[2], ".", tag.generation, ".",
                        tag.step, ".", tag.attempt);
      for (const auto* list : {&server->staged, &server->kept}) {
        absl::StrAppend(&out, "/");
        for (const auto& [matrix, staged] : *list)
          absl::StrAppend(&out, matrix, ":", staged.step, ".", staged.attempt, ".", staged.round,
                          ".", staged.delta, staged.flaw, ";");
      }
      for (const Value value : server->weights) absl::StrAppend(&out, "w", value);
      for (const Computing& work : server->computing)
        absl::StrAppend(&out, "c", work.matrix, ".", work.step, ".", work.attempt, ".", work.round,
                        ".", work.epoch, work.met);
      for (const auto& [step, attempt] : server->settling)
        absl::StrAppend(&out, "s", step, ".", attempt);
      for (const int64_t bytes : server->consumed_bytes) absl::StrAppend(&out, "b", bytes);
      server->hash = HashOf(out);
      server->hashed = true;
    }
    add(server->hash);
  }
  for (const auto& process : processes_) {
    if (!process->hashed) {
      std::string out = absl::StrCat(process->alive, process->zombie, process->joining,
                                     process->restore, process->stopped.empty(),
                                     process->has_weights, process->old_copy, process->applied, ".",
                                     process->older_applied, "/", process->life.generation);
      if (process->alive) {
        const std::string machine =
            absl::StrCat(process->trainer.CanonicalBytes(), "/",
                         process->leader ? process->leader->CanonicalBytes() : "");
        if (machine.size() > kLargestMachine)
          Violate(absl::StrCat("a trainer's machines hold ", machine.size(), " bytes"));
        absl::StrAppend(&out, machine, "/", process->placement.epoch(), process->move ? "m" : "-");
        for (const auto& [server, record] : process->records)
          absl::StrAppend(&out, "R", server, record ? record->SerializeAsString() : "-");
        for (const int32_t server : process->asked) absl::StrAppend(&out, "A", server);
        for (const int32_t server : process->leader_servers) absl::StrAppend(&out, "L", server);
        for (const Link& link : process->links)
          absl::StrAppend(&out, link.calling, link.taken_over, link.joined, link.control,
                          link.data);
        for (const auto* list : {&process->weights, &process->older}) {
          for (const Value value : *list) absl::StrAppend(&out, "w", value);
        }
        for (const auto& [key, value] : process->received)
          absl::StrAppend(&out, "r", key.first, ".", key.second, ".", value);
      }
      process->hash = HashOf(out);
      process->hashed = true;
    }
    add(process->hash);
  }
  for (const auto& message : bag_) add(message->hash);
  std::string truth = absl::StrCat(restarts_, ".", zombies_, ".", losses_, ".", duplicates_, ".",
                                   deadlines_, ".", moves_, fetch_fails_);
  for (const auto& [key, said] : truth_->said)
    absl::StrAppend(&truth, "d", key[0], ".", key[1], ".", key[2], said);
  for (const int64_t step : truth_->moved_after) absl::StrAppend(&truth, "m", step);
  for (const auto& [key, value] : truth_->weights)
    absl::StrAppend(&truth, "w", key.first, ".", key.second, ".", value);
  add(HashOf(truth));
  return HashOf(all);
}

std::string World::Describe(const Event& event) const {
  const auto message = [&]() -> std::string {
    for (const auto& candidate : bag_) {
      if (candidate->hash == event.message) return candidate->DebugString();
    }
    return "(not in flight)";
  };
  const auto life = [this](int32_t p) {
    return absl::StrCat("life ", p, " (rank ", processes_[p]->rank, ")");
  };
  switch (event.kind) {
    case Event::Kind::kDeliver:
      return message();
    case Event::Kind::kDuplicate:
      return "[repeated] " + message();
    case Event::Kind::kLose:
      return "[lost, streams break] " + message();
    case Event::Kind::kConnect:
      return absl::StrCat(life(event.process), " connects to server ", event.server);
    case Event::Kind::kRetry:
      return absl::StrCat(life(event.process), " calls server ", event.server, " again");
    case Event::Kind::kCompute:
      return absl::StrCat("server ", event.server, " has computed");
    case Event::Kind::kSettle:
      return absl::StrCat("server ", event.server, " has settled");
    case Event::Kind::kFetch:
      return absl::StrCat("server ", event.server, " has fetched");
    case Event::Kind::kMoveDeadline:
      return absl::StrCat("the move takes too long for ", life(event.process));
    case Event::Kind::kDeadline:
      return absl::StrCat("step deadline at server ", event.server);
    case Event::Kind::kRestart:
      return absl::StrCat("[restart] ", life(event.process),
                          event.zombie ? " is taken for dead" : " dies", ", life ",
                          processes_.size(), " starts with ",
                          event.variant == 0   ? "all that was applied"
                          : event.variant == 1 ? "one step less"
                                               : "nothing");
  }
  return "";
}

}  // namespace stiefel::model
