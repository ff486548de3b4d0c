// TrainerMachine: updates, and when a step has ended.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/trainer_machine.h"

namespace stiefel {

// ---------------------------------------------------------------- updates

const v1::Decided* TrainerMachine::DecidedAt(int64_t step) const {
  const auto found = decided_.find(step);
  return found == decided_.end() ? nullptr : &found->second;
}

UpdateVerdict TrainerMachine::OnUpdate(int32_t server, const v1::ChunkHeader& header,
                                       const v1::Piece& piece) {
  const bool weights = header.type() == v1::ChunkHeader::WEIGHTS_AT;
  if (piece.block() < 0 || piece.block() >= static_cast<int32_t>(pull_.size()) ||
      pull_[piece.block()].server != server ||
      (!piece.absent() &&
       (piece.offset() < 0 || piece.count() <= 0 || piece.count() > pull_[piece.block()].elements ||
        piece.offset() > pull_[piece.block()].elements - piece.count()))) {
    step_error_ = absl::DataLossError(absl::StrCat(
        "server ", server, " sent ", piece.count(), " elements at offset ", piece.offset(),
        " of pull block ", piece.block(), ", which do not lie in a block it owns"));
    return UpdateVerdict::kDiscard;
  }
  const v1::Decided* decided = DecidedAt(target());
  if (weights != fresh_) {  // weights are for a trainer without any, and all that it takes
    if (!weights) servers_[server].discarded_ahead = true;
    return UpdateVerdict::kDiscard;
  }
  if (policy_.match_names && !weights && header.step() != target()) {
    if (header.step() > target()) servers_[server].discarded_ahead = true;
    return UpdateVerdict::kDiscard;
  }
  const Version version{header.step(), weights ? -1 : header.attempt(),
                        weights ? -1 : header.round()};
  if (decided != nullptr && !weights && policy_.match_round &&
      (decided->attempt() != version.attempt || decided->round() != version.round))
    return UpdateVerdict::kDiscard;
  Received& received = received_[piece.block()];
  if (version < received.version) return UpdateVerdict::kDiscard;
  if (received.version < version) {
    received = Received();
    received.version = version;
  }
  if (piece.absent()) {
    received.absent = true;
    return UpdateVerdict::kDuplicate;
  }
  if (received.reserved.Contains(piece.offset(), piece.offset() + piece.count()))
    return UpdateVerdict::kDuplicate;
  if (received.reserved.Intersects(piece.offset(), piece.offset() + piece.count()))
    return UpdateVerdict::kDiscard;
  received.reserved.Add(piece.offset(), piece.offset() + piece.count());
  return UpdateVerdict::kPlace;
}

void TrainerMachine::OnUpdatePlaced(const v1::ChunkHeader& header, const v1::Piece& piece) {
  const bool weights = header.type() == v1::ChunkHeader::WEIGHTS_AT;
  Received& received = received_[piece.block()];
  const Version version{header.step(), weights ? -1 : header.attempt(),
                        weights ? -1 : header.round()};
  if (received.version == version) received.placed += piece.count();
}

// ---------------------------------------------------------------- the end of a step

// Rule 9.
bool TrainerMachine::DeliveredFor(int32_t block, const v1::Decided& decided) const {
  const auto& skipped = decided.skipped_matrices();
  if (std::find(skipped.begin(), skipped.end(), pull_[block].matrix) != skipped.end()) return true;
  const Version& version = received_[block].version;
  const bool matches = version == Version{decided.step(), decided.attempt(), decided.round()};
  if (policy_.match_round ? !matches : version.step != decided.step()) return false;
  return Complete(block) || !policy_.complete_deltas;
}

// Called at every wake of a waiting user, so it goes on where it stopped: what was delivered for a
// decision stays so, since updates of other versions are discarded from then on.
bool TrainerMachine::AllDeliveredFor(const v1::Decided& decided) const {
  const Version version{decided.step(), decided.attempt(), decided.round()};
  if (!policy_.match_round || !(scanned_ == version)) delivered_ = 0;
  scanned_ = version;
  const auto count = static_cast<int32_t>(pull_.size());
  while (delivered_ < count && DeliveredFor(delivered_, decided)) ++delivered_;
  return delivered_ == count;
}

// A server sends its weights again after every step that it decides meanwhile.
bool TrainerMachine::FreshDelivered(int32_t block) const {
  const Version& version = received_[block].version;
  return Complete(block) && version.attempt < 0 && version.step == target();
}

std::optional<StepEnd> TrainerMachine::FreshEnd() const {
  for (int32_t block = 0; block < static_cast<int32_t>(pull_.size()); ++block) {
    if (!FreshDelivered(block)) return std::nullopt;
  }
  StepEnd end;
  end.step = target();
  end.outcome = v1::COMMIT;
  return end;
}

std::optional<StepEnd> TrainerMachine::End() const {
  for (const ServerState& server : servers_) {
    if (!server.joined) return std::nullopt;
  }
  if (fresh_) return FreshEnd();
  const v1::Decided* decided = DecidedAt(target());
  if (decided == nullptr) {
    if (!begun_ || !dropped_ || dropped_->attempt() < begun_->attempt()) return std::nullopt;
    decided = &*dropped_;
  }
  if (decided->outcome() == v1::COMMIT) {
    if (!AllDeliveredFor(*decided)) return std::nullopt;
  }
  StepEnd end;
  end.step = decided->step();
  end.attempt = decided->attempt();
  end.round = decided->round();
  end.outcome = decided->outcome();
  end.grad_norm = decided->grad_norm();
  end.skipped_matrices.assign(decided->skipped_matrices().begin(),
                              decided->skipped_matrices().end());
  end.reason = decided->reason();
  return end;
}

bool TrainerMachine::BlockReady(int32_t pull_block) const {
  if (fresh_) return FreshDelivered(pull_block);
  const v1::Decided* decided = DecidedAt(target());
  return decided != nullptr &&
         (decided->outcome() == v1::SKIP || DeliveredFor(pull_block, *decided));
}

std::vector<int32_t> TrainerMachine::UnfinishedServers() const {
  std::vector<int32_t> unfinished;
  const v1::Decided* decided = DecidedAt(target());
  for (int32_t server = 0; server < static_cast<int32_t>(servers_.size()); ++server) {
    bool done = decided != nullptr;
    for (int32_t block = 0;
         done && decided->outcome() == v1::COMMIT && block < static_cast<int32_t>(pull_.size());
         ++block) {
      done = pull_[block].server != server || DeliveredFor(block, *decided);
    }
    if (!done) unfinished.push_back(server);
  }
  return unfinished;
}

}  // namespace stiefel
