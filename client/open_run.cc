#include "client/open_run.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/plan_inputs.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/mutex.h"
#include "common/status.h"
#include "plan/placement.h"

namespace stiefel {
namespace {

// What may pass by itself: the server is starting, or the network is.
bool Transient(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsResourceExhausted(status) || absl::IsUnknown(status) || absl::IsInternal(status);
}

bool ServerMayCome(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

// While an older life of the rank still counts as alive, or the run is between two leaders. A
// deadline is final: the server held the call as long as it was asked to, and says who is missing.
bool JoinMayCome(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsNotFound(status) || absl::IsAlreadyExists(status);
}

// A server looks at the deadlines of joins a few times a second, and then says who is missing.
constexpr int64_t kJoinGraceMicros = 2000000;

// How often a rank looks whether the leader has opened the run.
constexpr int64_t kPollMicros = 200000;
constexpr int64_t kLastLookMicros = 1000000;
// How long a server may take to say where a run went.
constexpr int64_t kLocateMicros = 2000000;

void Pause(int64_t micros) {
  Mutex mutex;
  CondVar never;
  MutexLock lock(&mutex);
  const int64_t until = RealClock().NowMicros() + micros;
  while (never.WaitUntilMicros(&mutex, until)) {
  }
}

absl::StatusOr<Plan> PlanRun(const Layout& layout, const Survey& survey) {
  PlanRequest request;
  request.matrices = PlanMatricesOf(layout);
  for (const LayoutMatrix& matrix : layout.matrices())
    request.forced_shards.push_back(layout.parameters()[matrix.parameter].shards);
  for (const v1::ServerInfo& info : survey.infos) request.servers.push_back(PlanServerOf(info));
  request.memory = PlanMemoryOf(layout, survey.infos);
  request.push_copies = PushCopies(layout);
  return MakePlan(request);
}

bool SameCuts(const v1::JoinRunResponse& a, const v1::JoinRunResponse& b) {
  return std::equal(a.cuts().begin(), a.cuts().end(), b.cuts().begin(), b.cuts().end(),
                    [](const v1::Cuts& x, const v1::Cuts& y) {
                      return x.parameter() == y.parameter() &&
                             std::equal(x.at().begin(), x.at().end(), y.at().begin(), y.at().end());
                    });
}

void CloseAgain(const Servers& servers, uint64_t run_uid, const Incarnation& leader) {
  v1::CloseRunRequest close;
  close.mutable_sender()->set_run_uid(run_uid);
  close.mutable_sender()->set_placement_epoch(1);
  *close.mutable_sender()->mutable_incarnation() = leader.ToProto();
  CallEach(servers, "CloseRun", close.SerializeAsString(), 2000000);
}

// A server without the run is one that the old leader did not get to, as long as no step was
// decided anywhere; later it is one that came back empty.
absl::Status CheckNoneLostItsState(const Servers& servers, const Layout& layout,
                                   const Survey& survey) {
  const auto empty = std::find(survey.held.begin(), survey.held.end(), std::nullopt);
  if (empty == survey.held.end()) return absl::OkStatus();
  for (size_t s = 0; s < survey.held.size(); ++s) {
    const auto& held = survey.held[s];
    if (!held || held->last_consumed_step() < held->start_step()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "run \"", layout.options().run, "\" is at step ", held->last_consumed_step(), " on server ",
        servers.addresses[s], ", and server ", servers.addresses[empty - survey.held.begin()],
        " does not hold it: it has lost its part of the state (step 0 there). Restore it, or give "
        "the run another name to start anew"));
  }
  return absl::OkStatus();
}

// What records name.
struct NamedServers {
  std::set<std::string> needed;  // of the newest placement in force, or of one prepared after it
  std::set<std::string> left;    // of older ones alone
};

NamedServers ServersNamedBy(const std::vector<v1::TakeOverResponse>& records) {
  int64_t in_force = 0;
  for (const v1::TakeOverResponse& record : records)
    in_force = std::max(in_force, record.placement_epoch());
  NamedServers named;
  const auto add = [&named, in_force](const auto& servers, int64_t epoch) {
    (epoch >= in_force ? named.needed : named.left).insert(servers.begin(), servers.end());
  };
  for (const v1::TakeOverResponse& record : records) {
    add(record.opened().servers(), record.opened().placement_epoch());
    for (const v1::Prepare* move : {&record.opened().moves_in(), &record.prepare()})
      add(move->placement().servers(), move->placement().epoch());
  }
  return named;
}

std::vector<std::string> Without(const std::set<std::string>& all,
                                 const std::set<std::string>& those) {
  std::vector<std::string> rest;
  std::set_difference(all.begin(), all.end(), those.begin(), those.end(), std::back_inserter(rest));
  return rest;
}

// Those of the servers that say anything now; the others go to *silent.
std::vector<std::string> Answering(const Servers& servers, std::set<std::string>* silent) {
  const std::vector<absl::StatusOr<std::string>> answers = CallEach(
      servers, "GetServerInfo", v1::GetServerInfoRequest().SerializeAsString(), kLocateMicros);
  std::vector<std::string> answering;
  for (size_t s = 0; s < answers.size(); ++s) {
    if (answers[s].ok()) {
      answering.push_back(servers.addresses[s]);
    } else {
      silent->insert(servers.addresses[s]);
    }
  }
  return answering;
}

}  // namespace

bool Survey::HeldAnywhere() const {
  return std::any_of(held.begin(), held.end(), [](const auto& run) { return run.has_value(); });
}

bool Survey::HeldEverywhere() const {
  return std::all_of(held.begin(), held.end(), [](const auto& run) { return run.has_value(); });
}

absl::StatusOr<Survey> AskServers(const Servers& servers, const Layout& layout, int64_t deadline) {
  Survey survey;
  absl::StatusOr<std::vector<v1::ServerInfo>> infos = CallAllAs<v1::ServerInfo>(
      servers, "GetServerInfo",
      [](int, int64_t) { return v1::GetServerInfoRequest().SerializeAsString(); }, Transient,
      deadline);
  // It takes connections and says nothing: that is no better than refusing them.
  if (absl::IsDeadlineExceeded(infos.status())) {
    return absl::UnavailableError(
        absl::StrCat(infos.status().message(), ": it takes connections, but does not answer"));
  }
  STIEFEL_ASSIGN_OR_RETURN(survey.infos, std::move(infos));
  survey.held.resize(survey.infos.size());
  const int32_t rank = layout.options().rank;
  int first = -1;
  for (size_t s = 0; s < survey.infos.size(); ++s) {
    for (const v1::ServerInfo::HeldRun& run : survey.infos[s].runs()) {
      if (run.name() != layout.options().run) continue;
      survey.held[s] = run;
      if (rank < run.largest_generation_size()) {
        survey.generation = std::max(survey.generation, run.largest_generation(rank) + 1);
      }
      if (first >= 0 && survey.held[first]->run_uid() != run.run_uid()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "two runs are named \"", run.name(), "\": server ", servers.addresses[first],
            " holds uid ", survey.held[first]->run_uid(), " at step ",
            survey.held[first]->last_consumed_step(), ", server ", servers.addresses[s], " uid ",
            run.run_uid(), " at step ", run.last_consumed_step(),
            "; the older one is released after its takeover timeout (",
            survey.held[first]->release_seconds(), " s and ", run.release_seconds(), " s)"));
      }
      first = static_cast<int>(s);
    }
  }
  return survey;
}

absl::StatusOr<Survey> AwaitOpen(const Servers& servers, const Layout& layout,
                                 int64_t connect_deadline, int64_t deadline) {
  absl::StatusOr<Survey> survey = AskServers(servers, layout, connect_deadline);
  for (;;) {
    if (!survey.ok() || survey->HeldEverywhere()) return survey;
    if (RealClock().NowMicros() >= deadline) {
      const auto missing = std::find(survey->held.begin(), survey->held.end(), std::nullopt);
      return absl::DeadlineExceededError(absl::StrCat(
          "server ", servers.addresses[missing - survey->held.begin()], " does not hold run \"",
          layout.options().run, "\": the leader (rank 0) has ", "not opened it there"));
    }
    Pause(kPollMicros);
    // The last look has time for an answer, so that it is the leader that is named.
    survey =
        AskServers(servers, layout, std::max(deadline, RealClock().NowMicros() + kLastLookMicros));
  }
}

absl::StatusOr<v1::OpenRunRequest> OpenRun(const Servers& servers, const Layout& layout,
                                           const Survey& survey, uint64_t run_uid,
                                           const Incarnation& leader, int64_t deadline) {
  STIEFEL_ASSIGN_OR_RETURN(const Plan plan, PlanRun(layout, survey));
  v1::OpenRunRequest request = layout.OpenRequest();
  request.set_run_uid(run_uid);
  *request.mutable_leader() = leader.ToProto();
  for (const int64_t phase : plan.phases) request.add_phases(static_cast<int32_t>(phase));
  for (const int32_t owner : plan.owners) request.add_owners(owner);
  for (size_t i = 0; i < plan.cuts.size(); ++i) {
    if (plan.cuts[i].empty()) continue;
    v1::Cuts* cuts = request.add_cuts();
    cuts->set_parameter(static_cast<int32_t>(i));
    cuts->mutable_at()->Add(plan.cuts[i].begin(), plan.cuts[i].end());
  }
  const auto opened = CallAllAs<v1::OpenRunResponse>(
      servers, "OpenRun",
      [&request](int server, int64_t) {
        request.set_server_index(server);
        return request.SerializeAsString();
      },
      ServerMayCome, deadline);
  if (opened.ok()) return request;
  CloseAgain(servers, run_uid, leader);
  return opened.status();
}

absl::StatusOr<std::vector<v1::TakeOverResponse>> TakeOver(const Servers& servers,
                                                           const Layout& layout,
                                                           const Survey& survey,
                                                           const Incarnation& leader,
                                                           int64_t deadline) {
  v1::TakeOverRequest request;
  request.set_name(layout.options().run);
  *request.mutable_leader() = leader.ToProto();
  Servers holders;
  Servers others;
  std::vector<int> other_index;
  for (size_t s = 0; s < servers.connections.size(); ++s) {
    Servers& list = survey.held[s] ? holders : others;
    list.addresses.push_back(servers.addresses[s]);
    list.connections.push_back(servers.connections[s]);
    if (survey.held[s]) {
      request.set_run_uid(survey.held[s]->run_uid());
    } else {
      other_index.push_back(static_cast<int>(s));
    }
  }
  STIEFEL_RETURN_IF_ERROR(CheckNoneLostItsState(servers, layout, survey));
  const auto make_request = [&request](int, int64_t) { return request.SerializeAsString(); };
  STIEFEL_ASSIGN_OR_RETURN(
      const std::vector<v1::TakeOverResponse> found,
      CallAllAs<v1::TakeOverResponse>(holders, "TakeOver", make_request, JoinMayCome, deadline));
  v1::OpenRunRequest opened = found[0].opened();
  const std::vector<std::string> list(opened.servers().begin(), opened.servers().end());
  if (list != servers.addresses && found[0].placement_epoch() == 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run \"", layout.options().run, "\" was opened on servers ", absl::StrJoin(list, ", "),
        "; this leader was given ", absl::StrJoin(servers.addresses, ", ")));
  }
  if (others.connections.empty()) return found;
  STIEFEL_RETURN_IF_ERROR(CallAllAs<v1::OpenRunResponse>(
                              others, "OpenRun",
                              [&opened, &other_index](int server, int64_t) {
                                opened.set_server_index(other_index[server]);
                                return opened.SerializeAsString();
                              },
                              ServerMayCome, deadline)
                              .status());
  return CallAllAs<v1::TakeOverResponse>(servers, "TakeOver", make_request, JoinMayCome, deadline);
}

absl::Status TakeOverOthers(const Layout& layout, const Incarnation& leader, int64_t deadline,
                            const std::function<Servers(const std::vector<std::string>&)>& connect,
                            Servers* servers, std::vector<v1::TakeOverResponse>* records) {
  std::set<std::string> asked(servers->addresses.begin(), servers->addresses.end());
  std::set<std::string> passed_over;
  v1::TakeOverRequest request;
  request.set_name(layout.options().run);
  *request.mutable_leader() = leader.ToProto();
  request.set_run_uid((*records)[0].opened().run_uid());
  for (;;) {
    const NamedServers named = ServersNamedBy(*records);
    std::vector<std::string> more = Without(named.needed, asked);
    const bool needed = !more.empty();
    if (!needed) {
      more = Without(named.left, asked);
      more = Answering(connect(Without({more.begin(), more.end()}, passed_over)), &passed_over);
      if (more.empty()) return absl::OkStatus();
    }
    const Servers others = connect(more);
    for (size_t s = 0; s < more.size(); ++s) {
      asked.insert(more[s]);
      Servers one{{others.addresses[s]}, {others.connections[s]}};
      auto answer = CallAllAs<v1::TakeOverResponse>(
          one, "TakeOver", [&request](int, int64_t) { return request.SerializeAsString(); },
          [needed](const absl::Status& status) {
            return (needed && absl::IsUnavailable(status)) || absl::IsAlreadyExists(status);
          },
          deadline);
      if (absl::IsNotFound(answer.status()) || (!needed && !answer.ok())) continue;
      STIEFEL_RETURN_IF_ERROR(answer.status());
      servers->addresses.push_back(one.addresses[0]);
      servers->connections.push_back(one.connections[0]);
      records->push_back(std::move((*answer)[0]));
    }
  }
}

absl::StatusOr<std::vector<v1::JoinRunResponse>> JoinRun(const Servers& servers,
                                                         const Layout& layout,
                                                         const Incarnation& incarnation,
                                                         std::optional<int64_t> applied,
                                                         int64_t deadline) {
  v1::JoinRunRequest request = layout.JoinRequest();
  *request.mutable_incarnation() = incarnation.ToProto();
  request.clear_applied_step();
  if (applied) request.set_applied_step(*applied);
  return CallAllAs<v1::JoinRunResponse>(
      servers, "JoinRun",
      [&request](int, int64_t left) {
        request.set_wait_seconds(static_cast<double>(left) / 1e6);
        return request.SerializeAsString();
      },
      JoinMayCome, deadline, kJoinGraceMicros);
}

absl::Status CheckJoined(const Servers& servers, const Layout& layout,
                         const std::vector<v1::JoinRunResponse>& answers) {
  for (size_t s = 0; s < answers.size(); ++s) {
    const v1::JoinRunResponse& answer = answers[s];
    const std::vector<std::string> list(answer.servers().begin(), answer.servers().end());
    if (list != servers.addresses) {
      return absl::FailedPreconditionError(absl::StrCat(
          "run \"", layout.options().run, "\" was opened on servers ", absl::StrJoin(list, ", "),
          "; rank ", layout.options().rank, " was given ", absl::StrJoin(servers.addresses, ", ")));
    }
    const v1::JoinRunResponse& first = answers[0];
    if (answer.run_uid() == first.run_uid() &&
        answer.placement_epoch() == first.placement_epoch() &&
        answer.owners_size() == first.owners_size() &&
        std::equal(answer.owners().begin(), answer.owners().end(), first.owners().begin()) &&
        SameCuts(answer, first)) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "servers ", servers.addresses[0], " and ", servers.addresses[s], " hold run uid ",
        first.run_uid(), " epoch ", first.placement_epoch(), " and uid ", answer.run_uid(),
        " epoch ", answer.placement_epoch(), " under one name, or disagree on owners or cuts"));
  }
  const v1::JoinRunResponse& first = answers[0];
  const bool weights = layout.options().mode == UpdateMode::kWeights;
  if ((first.update_mode() == v1::WEIGHTS) != weights) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run \"", layout.options().run, "\" is in ", v1::UpdateMode_Name(first.update_mode()),
        " mode, rank ", layout.options().rank, " wants ", weights ? "WEIGHTS" : "DELTA"));
  }
  // Matrix indexes are the same on all ranks only if the lists are.
  if (first.parameters_size() != static_cast<int>(layout.matrices().size())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run \"", layout.options().run, "\" has ", first.parameters_size(), " matrices, rank ",
        layout.options().rank, " registers ", layout.matrices().size()));
  }
  for (int i = 0; i < first.parameters_size(); ++i) {
    if (first.parameters(i).name() == layout.matrices()[i].name) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("matrix ", i, " of run \"", layout.options().run, "\" is \"",
                     first.parameters(i).name(), "\", rank ", layout.options().rank,
                     " registers \"", layout.matrices()[i].name, "\" there"));
  }
  for (const int32_t owner : first.owners()) {
    if (owner < 0 || owner >= first.servers_size())
      return IndexOutOfRange("owner of a shard", owner, first.servers_size());
  }
  return absl::OkStatus();
}

std::vector<std::string> LocateRun(const Servers& given, const std::string& run, int64_t deadline) {
  for (;;) {
    bool all_answered = true;
    v1::ServerInfo::HeldRun newest;
    for (const absl::StatusOr<std::string>& answer :
         CallEach(given, "GetServerInfo", v1::GetServerInfoRequest().SerializeAsString(),
                  kLocateMicros)) {
      v1::ServerInfo info;
      all_answered = all_answered && answer.ok();
      if (!answer.ok() || !info.ParseFromString(*answer)) continue;
      for (const v1::ServerInfo::HeldRun& held : info.runs()) {
        if (held.name() == run && held.placement_epoch() > newest.placement_epoch()) newest = held;
      }
    }
    // Epoch 1 is where it was opened: the list given is to agree with it.
    if (newest.placement_epoch() > 1 && newest.servers_size() > 0)
      return {newest.servers().begin(), newest.servers().end()};
    if (all_answered || newest.placement_epoch() == 1 || RealClock().NowMicros() >= deadline)
      return given.addresses;
    Pause(kPollMicros);
  }
}

}  // namespace stiefel
