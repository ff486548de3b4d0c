#include "client/leader_machine.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace stiefel {
namespace {

constexpr int32_t kAllAttempts = std::numeric_limits<int32_t>::max();

// What commit=whole_step skips for, and commit=per_matrix leaves out.
bool NonFinite(const v1::Vote::Matrix& matrix) {
  return matrix.nonfinite_gradient() > 0 || matrix.nonfinite_update() > 0;
}

v1::Decide MakeDecision(int64_t step, int32_t attempt, v1::Outcome outcome, std::string reason) {
  v1::Decide decision;
  decision.set_step(step);
  decision.set_attempt(attempt);
  decision.set_outcome(outcome);
  decision.set_reason(std::move(reason));
  return decision;
}

// Rule 6: a committed step was summed from one incarnation per rank, on every server. Empty if so.
std::string IncarnationMismatch(const std::vector<const v1::Vote*>& votes) {
  for (size_t server = 1; server < votes.size(); ++server) {
    for (int rank = 0; rank < votes[0]->summed_size(); ++rank) {
      const Incarnation first(votes[0]->summed(rank));
      const Incarnation other = rank < votes[server]->summed_size()
                                    ? Incarnation(votes[server]->summed(rank))
                                    : Incarnation();
      if (first != other) {
        return absl::StrCat("server 0 summed rank ", rank, " as ", first.DebugString(), ", server ",
                            server, " as ", other.DebugString());
      }
    }
  }
  return "";
}

// Every matrix of the step in registration order.
std::vector<const v1::Vote::Matrix*> InOrder(const std::vector<const v1::Vote*>& votes) {
  std::vector<const v1::Vote::Matrix*> matrices;
  for (const v1::Vote* vote : votes) {
    for (const v1::Vote::Matrix& matrix : vote->matrices()) matrices.push_back(&matrix);
  }
  std::sort(matrices.begin(), matrices.end(),
            [](const auto* a, const auto* b) { return a->matrix() < b->matrix(); });
  return matrices;
}

}  // namespace

LeaderMachine::LeaderMachine(int32_t servers, ProtocolPolicy policy)
    : policy_(policy), records_(servers), members_(servers, true) {}

LeaderMachine LeaderMachine::Opened(int32_t servers, int64_t start_step, ProtocolPolicy policy) {
  LeaderMachine leader(servers, policy);
  leader.decided_ = {start_step - 1, kAllAttempts};
  return leader;
}

LeaderMachine LeaderMachine::TakingOver(int32_t servers, ProtocolPolicy policy) {
  LeaderMachine leader(servers, policy);
  leader.records_missing_ = servers;
  leader.decided_ = {0, kAllAttempts};
  return leader;
}

void LeaderMachine::KnowShards(const v1::OpenRunRequest& opened) {
  first_shards_.clear();
  if (opened.cuts().empty()) return;
  int32_t shards = 0;
  auto cuts = opened.cuts().begin();
  for (int32_t parameter = 0; parameter < opened.parameters_size(); ++parameter) {
    first_shards_.push_back(shards++);
    if (cuts == opened.cuts().end() || cuts->parameter() != parameter) continue;
    shards += cuts->at_size();
    ++cuts;
  }
}

std::pair<int32_t, int32_t> LeaderMachine::ShardsBeside(int32_t shard) const {
  const auto next = std::upper_bound(first_shards_.begin(), first_shards_.end(), shard);
  if (next == first_shards_.begin()) return {shard, shard + 1};
  return {*(next - 1), next == first_shards_.end() ? std::numeric_limits<int32_t>::max() : *next};
}

LeaderMachine::Open& LeaderMachine::OpenAt(const Key& key) {
  Open& open = open_[key];
  open.servers.resize(members_.size());
  return open;
}

void LeaderMachine::OnRecord(int32_t server, const v1::TakeOverResponse& record,
                             LeaderSends* sends) {
  if (records_[server] || records_missing_ == 0) return;
  records_[server] = record;
  if (record.opened().parameters_size() > 0) KnowShards(record.opened());
  records_missing_ = policy_.take_over_all ? records_missing_ - 1 : 0;
  if (records_missing_ == 0) CompleteFound(sends);
}

// Rule 13: a decision found anywhere goes to all; so does a Rescale; otherwise the same sealed
// votes are judged afresh.
void LeaderMachine::CompleteFound(LeaderSends* sends) {
  FindMembers();
  std::optional<v1::Decide> latest;
  for (size_t server = 0; server < records_.size(); ++server) {
    const auto& record = records_[server];
    if (!record || record->placement_epoch() != epoch_) continue;  // older: of before a switch
    decided_ = std::max(decided_, Key(record->consumed_step(), kAllAttempts));
    for (const auto* found : {record->has_last_consumed() ? &record->last_consumed() : nullptr,
                              record->has_last_attempt() ? &record->last_attempt() : nullptr}) {
      if (found == nullptr) continue;
      if (!latest || Key(latest->step(), latest->attempt()) < Key(found->step(), found->attempt()))
        latest = *found;
    }
  }
  if (latest && policy_.complete_found) {
    Settle(*latest);
    SetOutstanding(*latest);
    SendDecision(sends);
  }
  for (int32_t server = 0; server < static_cast<int32_t>(members_.size()); ++server) {
    if (!records_[server] || !members_[server]) continue;
    if (records_[server]->placement_epoch() != epoch_) continue;
    const v1::TakeOverResponse& record = *records_[server];
    const Key key(record.open_step(), record.open_attempt());
    if (Decided(key)) continue;
    ServerVotes& votes = OpenAt(key).servers[server];
    if (record.has_vote_round0()) votes.round0 = record.vote_round0();
    if (record.has_vote_round1()) votes.round1 = record.vote_round1();
    if (record.has_drop()) votes.drop = record.drop();
    if (record.has_rescale() && policy_.complete_found) {
      open_[key].rescale = record.rescale();
    }
  }
  for (const auto& [key, open] : open_) {
    if (open.rescale) SendRescale(*open.rescale, sends);
  }
  FindMove(sends);
  TryDecide(sends);
}

void LeaderMachine::OnVote(int32_t server, const v1::Vote& vote, LeaderSends* sends) {
  const Key key(vote.step(), vote.attempt());
  if (Decided(key)) return;
  ServerVotes& votes = OpenAt(key).servers[server];
  (vote.round() == 0 ? votes.round0 : votes.round1) = vote;
  TryDecide(sends);
}

void LeaderMachine::OnDrop(int32_t server, const v1::Drop& drop, LeaderSends* sends) {
  const Key key(drop.step(), drop.attempt());
  if (Decided(key)) return;
  OpenAt(key).servers[server].drop = drop;
  TryDecide(sends);
}

void LeaderMachine::OnDecideAck(int32_t server, const v1::DecideAck& ack, LeaderSends* sends) {
  if (!outstanding_ || outstanding_->decision.step() != ack.step() ||
      outstanding_->decision.attempt() != ack.attempt())
    return;
  outstanding_->acknowledged[server] = true;
  for (const bool acknowledged : outstanding_->acknowledged) {
    if (!acknowledged) return;
  }
  outstanding_.reset();
  TryDecide(sends);
  AdvanceMove(sends);
}

void LeaderMachine::OnServerUp(int32_t server, LeaderSends* sends) {
  if (move_ && !move_->answered[server]) SendPhase(server, sends);
  if (!policy_.resend_votes) return;
  if (outstanding_ && !outstanding_->acknowledged[server]) {
    v1::TrainerMessage message;
    *message.mutable_decide() = outstanding_->decision;
    sends->push_back({server, std::move(message)});
  }
  for (const auto& [key, open] : open_) {
    if (!open.rescale || open.servers[server].round1) continue;
    v1::TrainerMessage message;
    *message.mutable_rescale() = *open.rescale;
    sends->push_back({server, std::move(message)});
  }
}

void LeaderMachine::TryDecide(LeaderSends* sends) {
  if (records_missing_ > 0) return;
  if (outstanding_ && policy_.one_decision) return;
  for (auto& [key, open] : open_) {
    std::optional<v1::Decide> decision = Judge(key, &open, sends);
    if (!decision) {
      if (policy_.one_decision) return;
      continue;
    }
    Settle(*decision);
    SetOutstanding(*std::move(decision));
    return SendDecision(sends);
  }
}

std::optional<v1::Decide> LeaderMachine::Judge(const Key& key, Open* open, LeaderSends* sends) {
  std::vector<const ServerVotes*> voters;
  for (size_t s = 0; s < open->servers.size(); ++s) {
    if (members_[s]) voters.push_back(&open->servers[s]);
  }
  for (const ServerVotes* voter : voters) {
    const ServerVotes& votes = *voter;
    if (votes.drop) return MakeDecision(key.first, key.second, v1::DROP, votes.drop->reason());
  }
  std::vector<const v1::Vote*> round0;
  std::vector<const v1::Vote*> round1;
  for (const ServerVotes* voter : voters) {
    const ServerVotes& votes = *voter;
    if (votes.round1 && votes.round1->failed())
      return MakeDecision(key.first, key.second, v1::DROP, votes.round1->failure());
    if (votes.round0) round0.push_back(&*votes.round0);
    if (votes.round1) round1.push_back(&*votes.round1);
  }
  const std::vector<const v1::Vote*>& votes = open->rescale ? round1 : round0;
  if (votes.empty() || (votes.size() < voters.size() && policy_.all_votes)) return std::nullopt;
  if (const std::string mismatch = IncarnationMismatch(votes);
      !mismatch.empty() && policy_.compare_incarnations) {
    return MakeDecision(key.first, key.second, v1::DROP,
                        absl::StrCat("step ", key.first, ": ", mismatch));
  }
  return JudgeVotes(key, votes, open->rescale.has_value(), open, sends);
}

std::optional<v1::Decide> LeaderMachine::JudgeVotes(const Key& key,
                                                    const std::vector<const v1::Vote*>& votes,
                                                    bool rescaled, Open* open, LeaderSends* sends) {
  const bool per_matrix = votes[0]->commit() == v1::PER_MATRIX;
  double sum_squares = 0;
  v1::Decide decision = MakeDecision(key.first, key.second, v1::COMMIT, "");
  std::string why;
  const auto explain = [&why](const std::string& what) {
    if (why.size() < 1024) absl::StrAppend(&why, why.empty() ? "" : "; ", what);
  };
  const std::vector<const v1::Vote::Matrix*> matrices = InOrder(votes);
  for (auto begin = matrices.begin(); begin != matrices.end();) {  // the shards of a matrix
    const int32_t last = ShardsBeside((*begin)->matrix()).second;
    const auto end = std::find_if(begin, matrices.end(),
                                  [last](const auto* matrix) { return matrix->matrix() >= last; });
    bool finite = true;
    bool finite_gradient = true;
    for (auto shard = begin; shard != end; ++shard) {
      finite_gradient = finite_gradient && (*shard)->nonfinite_gradient() == 0;
      if (!NonFinite(**shard)) continue;
      finite = false;
      explain((*shard)->explanation().empty()
                  ? absl::StrCat("non-finite values in matrix ", (*shard)->matrix())
                  : (*shard)->explanation());
    }
    for (auto shard = begin; shard != end; ++shard) {
      if (!finite) decision.add_skipped_matrices((*shard)->matrix());
      if (finite_gradient) sum_squares += (*shard)->sum_squares();
    }
    begin = end;
  }
  for (const double local : votes[0]->local_sum_squares()) sum_squares += local;
  for (int rank = 0; rank < votes[0]->local_finite_size(); ++rank) {
    if (!votes[0]->local_finite(rank))
      explain(
          absl::StrCat("non-finite gradient in parameters that rank ", rank, " updates itself"));
  }
  decision.set_grad_norm(std::sqrt(sum_squares));
  if (!why.empty() && !per_matrix) {
    decision.clear_skipped_matrices();
    decision.set_outcome(v1::SKIP);
    decision.set_reason(absl::StrCat("step ", key.first, " skipped: ", why));
    return decision;
  }
  if (!why.empty())
    decision.set_reason(absl::StrCat("step ", key.first, ": matrices skipped: ", why));
  if (!rescaled && votes[0]->has_max_grad_norm() &&
      decision.grad_norm() > votes[0]->max_grad_norm()) {
    v1::Rescale rescale;
    rescale.set_step(key.first);
    rescale.set_attempt(key.second);
    rescale.set_scale(votes[0]->max_grad_norm() / decision.grad_norm());
    open->rescale = rescale;
    SendRescale(rescale, sends);
    return std::nullopt;
  }
  decision.set_round(rescaled ? 1 : 0);
  return decision;
}

void LeaderMachine::Settle(const v1::Decide& decision) {
  decided_ = std::max(
      decided_,
      Key(decision.step(), decision.outcome() == v1::DROP ? decision.attempt() : kAllAttempts));
  open_.erase(open_.begin(), open_.upper_bound(decided_));
}

void LeaderMachine::SetOutstanding(v1::Decide decision) {
  std::vector<bool> acknowledged = members_;
  acknowledged.flip();
  outstanding_ = Outstanding{std::move(decision), std::move(acknowledged)};
}

void LeaderMachine::SendDecision(LeaderSends* sends) {
  for (int32_t server = 0; server < static_cast<int32_t>(members_.size()); ++server) {
    if (!members_[server]) continue;
    v1::TrainerMessage message;
    *message.mutable_decide() = outstanding_->decision;
    sends->push_back({server, std::move(message)});
  }
}

void LeaderMachine::SendRescale(const v1::Rescale& rescale, LeaderSends* sends) const {
  for (int32_t server = 0; server < static_cast<int32_t>(members_.size()); ++server) {
    if (!members_[server]) continue;
    v1::TrainerMessage message;
    *message.mutable_rescale() = rescale;
    sends->push_back({server, std::move(message)});
  }
}

std::string LeaderMachine::Awaited() const {
  std::vector<int32_t> waiting;
  const auto servers = static_cast<int32_t>(members_.size());
  if (records_missing_ > 0) {
    for (int32_t s = 0; s < servers; ++s) {
      if (!records_[s]) waiting.push_back(s);
    }
    return absl::StrCat("TakeOver answers of ", waiting.size(), " servers, first ", waiting[0]);
  }
  if (outstanding_) {
    for (int32_t s = 0; s < servers; ++s) {
      if (!outstanding_->acknowledged[s])
        return absl::StrCat("server ", s, " to record the decision on step ",
                            outstanding_->decision.step());
    }
  }
  if (move_ || !failure_.ok()) return AwaitedByMove();
  for (const auto& [key, open] : open_) {
    for (int32_t s = 0; s < servers; ++s) {
      if (members_[s] && !(open.rescale ? open.servers[s].round1 : open.servers[s].round0))
        return absl::StrCat("vote of server ", s, " on step ", key.first);
    }
  }
  return "";
}

std::string LeaderMachine::CanonicalBytes() const {
  std::string out = absl::StrCat(records_missing_, "/", decided_.first, ".", decided_.second);
  for (const auto& record : records_)
    absl::StrAppend(&out, "|", record ? record->SerializeAsString() : "-");
  if (outstanding_) {
    absl::StrAppend(&out, "|o", outstanding_->decision.SerializeAsString());
    for (const bool acknowledged : outstanding_->acknowledged) absl::StrAppend(&out, acknowledged);
  }
  for (const auto& [key, open] : open_) {
    absl::StrAppend(&out, "|k", key.first, ".", key.second);
    if (open.rescale) absl::StrAppend(&out, "R", open.rescale->SerializeAsString());
    for (const ServerVotes& votes : open.servers) {
      absl::StrAppend(&out, ";", votes.round0 ? votes.round0->SerializeAsString() : "-", ",",
                      votes.round1 ? votes.round1->SerializeAsString() : "-", ",",
                      votes.drop ? votes.drop->SerializeAsString() : "-");
    }
  }
  AppendMove(&out);
  return out;
}

}  // namespace stiefel
