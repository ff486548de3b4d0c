// One RunMachine with its world around it, for unit tests: sends events, keeps the actions.
#ifndef STIEFEL_SERVER_RUN_MACHINE_FIXTURE_H_
#define STIEFEL_SERVER_RUN_MACHINE_FIXTURE_H_

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/run_machine.h"
#include "server/run_machine_testing.h"

namespace stiefel::testing {

class MachineFixture {
 public:
  explicit MachineFixture(RunShape shape = {}, int32_t server_index = 0, ProtocolPolicy policy = {})
      : MachineFixture(shape, *RunSpec::Create(OpenRequest(shape, server_index)), policy) {}
  MachineFixture(RunShape shape, std::shared_ptr<const RunSpec> spec, ProtocolPolicy policy = {})
      : shape(shape), machine(std::move(spec), now, policy), life(shape.world_size, {1, 100}) {
    if (shape.mode == v1::WEIGHTS) machine.OnWeightsReady(&actions);
  }

  Actions Take() { return std::exchange(actions, {}); }

  // Every action of type A since the last Take.
  template <typename A>
  std::vector<A> All() const {
    std::vector<A> all;
    for (const Action& action : actions) {
      if (const A* found = std::get_if<A>(&action)) all.push_back(*found);
    }
    return all;
  }

  // Messages of one kind to one rank since the last Take.
  std::vector<v1::ServerMessage> Sent(int32_t rank, v1::ServerMessage::KindCase kind) const {
    std::vector<v1::ServerMessage> messages;
    for (const auto& send : All<action::SendControl>()) {
      if (send.rank == rank && send.message.kind_case() == kind) messages.push_back(send.message);
    }
    return messages;
  }

  // The answer of a join; nullopt while it waits.
  std::optional<action::AnswerJoin> Answer(uint64_t token) const {
    for (const auto& answer : All<action::AnswerJoin>()) {
      if (answer.token == token) return answer;
    }
    return std::nullopt;
  }

  // Joins without connecting. The token is returned.
  uint64_t Join(int32_t rank, std::optional<int64_t> applied = 0) {
    machine.OnJoin(++token, JoinRequest(shape, rank, life[rank], applied), now, now + 1000000,
                   &actions);
    return token;
  }
  absl::Status Connect(int32_t rank) {
    const absl::Status up = machine.OnControlUp(SenderOf(rank, life[rank], epoch), now, &actions);
    return up.ok() ? machine.OnDataUp(SenderOf(rank, life[rank], epoch), now, &actions) : up;
  }
  void JoinAll() {
    for (int32_t rank = 0; rank < shape.world_size; ++rank) Join(rank);
    for (int32_t rank = 0; rank < shape.world_size; ++rank) (void)Connect(rank);
  }

  v1::TrainerMessage From(int32_t rank) const {
    v1::TrainerMessage message;
    *message.mutable_sender() = SenderOf(rank, life[rank], epoch);
    return message;
  }
  void Send(const v1::TrainerMessage& message) { machine.OnControlMessage(message, now, &actions); }
  void Begin(int32_t rank, int64_t step, int32_t attempt = 0, v1::CommonFields common = {}) {
    v1::TrainerMessage message = From(rank);
    message.mutable_begin_step()->set_step(step);
    message.mutable_begin_step()->set_attempt(attempt);
    *message.mutable_begin_step()->mutable_common() = std::move(common);
    Send(message);
  }
  void End(int32_t rank, int64_t step, int32_t attempt = 0, double local_sum_squares = 0) {
    v1::TrainerMessage message = From(rank);
    message.mutable_end_push()->set_step(step);
    message.mutable_end_push()->set_attempt(attempt);
    if (local_sum_squares > 0) message.mutable_end_push()->set_local_sum_squares(local_sum_squares);
    Send(message);
  }
  // One whole block.
  absl::StatusOr<PieceVerdict> Push(int32_t rank, int64_t step, int32_t attempt = 0,
                                    int32_t block = 0, bool absent = false) {
    v1::ChunkHeader header;
    header.set_type(v1::ChunkHeader::GRADIENT);
    *header.mutable_sender() = SenderOf(rank, life[rank], epoch);
    header.set_step(step);
    header.set_attempt(attempt);
    v1::Piece piece;
    piece.set_block(block);
    piece.set_absent(absent);
    if (!absent) piece.set_count(shape.elements);
    auto verdict = machine.OnPiece(header, piece, now);
    if (verdict.ok() && *verdict == PieceVerdict::kPlace)
      machine.OnPlaced(header, piece, now, &actions);
    return verdict;
  }
  void Computed(int32_t matrix, int64_t step, int32_t attempt = 0, int32_t round = 0,
                const absl::Status& failure = absl::OkStatus()) {
    v1::Vote::Matrix result;
    result.set_matrix(matrix);
    result.set_sum_squares(4);
    machine.OnComputed(step, attempt, round, result, failure, &actions);
  }
  void Rescale(int64_t step, double scale, int32_t attempt = 0) {
    v1::TrainerMessage message = From(0);
    message.mutable_rescale()->set_step(step);
    message.mutable_rescale()->set_attempt(attempt);
    message.mutable_rescale()->set_scale(scale);
    Send(message);
  }
  void Decide(v1::Outcome outcome, int64_t step, int32_t attempt = 0, int32_t round = 0) {
    v1::TrainerMessage message = From(0);
    message.mutable_decide()->set_step(step);
    message.mutable_decide()->set_attempt(attempt);
    message.mutable_decide()->set_round(round);
    message.mutable_decide()->set_outcome(outcome);
    Send(message);
  }
  // All ranks begin, push and end; everything is computed: the vote is out.
  void Collect(int64_t step, int32_t attempt = 0, v1::CommonFields common = {}) {
    if (const auto& last = machine.last_attempt())
      machine.OnSettled(last->step(), last->attempt(), &actions);
    for (int32_t rank = 0; rank < shape.world_size; ++rank) Begin(rank, step, attempt, common);
    for (int32_t rank = 0; rank < shape.world_size; ++rank) {
      for (const int32_t matrix : machine.spec().owned()) (void)Push(rank, step, attempt, matrix);
      End(rank, step, attempt);
    }
    for (const int32_t matrix : machine.spec().owned()) Computed(matrix, step, attempt);
  }
  void Commit(int64_t step, int32_t attempt = 0) {
    Collect(step, attempt);
    Decide(v1::COMMIT, step, attempt);
    machine.OnSettled(step, attempt, &actions);
  }
  // The rank's process is replaced by one of the next generation: lease over, joins again.
  uint64_t Replace(int32_t rank, std::optional<int64_t> applied) {
    machine.OnLeaseEnd(rank, now);
    life[rank] = Incarnation(life[rank].generation + 1, 200 + rank);
    if (rank == 0) (void)machine.OnTakeOver(TakeOver(life[0]), now, &actions);
    return Join(rank, applied);
  }

  RunShape shape;
  int64_t now = 1000000;
  Actions actions;
  RunMachine machine;
  std::vector<Incarnation> life;  // by rank
  int64_t epoch = 1;              // that the ranks speak under
  uint64_t token = 0;
};

}  // namespace stiefel::testing

#endif  // STIEFEL_SERVER_RUN_MACHINE_FIXTURE_H_
