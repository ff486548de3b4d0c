#include "tests/model/message.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace stiefel::model {
namespace {

std::string Bytes(const Message& message) {
  std::string bytes =
      absl::StrCat(message.body.index(), ".", message.server, ".", message.process, ":");
  std::visit(
      [&bytes](const auto& body) {
        using Body = std::decay_t<decltype(body)>;
        if constexpr (std::is_same_v<Body, ChunkUp>) {
          body.header.AppendToString(&bytes);
          absl::StrAppend(&bytes, "|", body.tag.generation, ".", body.tag.step, ".",
                          body.tag.attempt);
        } else if constexpr (std::is_same_v<Body, ChunkDown>) {
          body.header.AppendToString(&bytes);
          absl::StrAppend(&bytes, "|", body.value);
        } else if constexpr (std::is_same_v<Body, OpenAnswer>) {
          absl::StrAppend(&bytes, body.status.ToString());
        } else if constexpr (std::is_same_v<Body, JoinAnswer> ||
                             std::is_same_v<Body, TakeOverAnswer>) {
          body.response.AppendToString(&bytes);
          absl::StrAppend(&bytes, "|", body.status.ToString());
          if constexpr (std::is_same_v<Body, JoinAnswer>) absl::StrAppend(&bytes, body.applied);
        } else {
          body.AppendToString(&bytes);
        }
      },
      message.body);
  return bytes;
}

std::string StepOf(int64_t step, int32_t attempt) { return absl::StrCat(" ", step, ".", attempt); }

std::string Describe(const v1::TrainerMessage& m) {
  switch (m.kind_case()) {
    case v1::TrainerMessage::kBeginStep:
      return "BeginStep" + StepOf(m.begin_step().step(), m.begin_step().attempt());
    case v1::TrainerMessage::kEndPush:
      return "EndPush" + StepOf(m.end_push().step(), m.end_push().attempt());
    case v1::TrainerMessage::kRescale:
      return "Rescale" + StepOf(m.rescale().step(), m.rescale().attempt());
    case v1::TrainerMessage::kDecide:
      return absl::StrCat("Decide", StepOf(m.decide().step(), m.decide().attempt()), " ",
                          v1::Outcome_Name(m.decide().outcome()), " round ", m.decide().round());
    case v1::TrainerMessage::kArrivedQuery:
      return "ArrivedQuery";
    case v1::TrainerMessage::kPrepare:
      return absl::StrCat("Prepare ", m.prepare().placement().epoch());
    case v1::TrainerMessage::kCancelPrepare:
      return absl::StrCat("CancelPrepare ", m.cancel_prepare().epoch());
    case v1::TrainerMessage::kSwitchPlacement:
      return absl::StrCat("Switch ", m.switch_placement().epoch());
    case v1::TrainerMessage::kUpdatesQuery:
      return "UpdatesQuery";
    default:
      return "other";
  }
}

std::string Describe(const v1::ServerMessage& m) {
  switch (m.kind_case()) {
    case v1::ServerMessage::kCredit:
      return "Credit" + StepOf(m.credit().step(), m.credit().attempt());
    case v1::ServerMessage::kArrived:
      return "Arrived" + StepOf(m.arrived().step(), m.arrived().attempt());
    case v1::ServerMessage::kVote:
      return absl::StrCat("Vote", StepOf(m.vote().step(), m.vote().attempt()), " round ",
                          m.vote().round(), m.vote().failed() ? " failed" : "");
    case v1::ServerMessage::kDrop:
      return "Drop" + StepOf(m.drop().step(), m.drop().attempt());
    case v1::ServerMessage::kDecided:
      return absl::StrCat("Decided", StepOf(m.decided().step(), m.decided().attempt()), " ",
                          v1::Outcome_Name(m.decided().outcome()));
    case v1::ServerMessage::kDecideAck:
      return "DecideAck" + StepOf(m.decide_ack().step(), m.decide_ack().attempt());
    case v1::ServerMessage::kEpochAck:
      return absl::StrCat("EpochAck ", m.epoch_ack().epoch(), " ",
                          v1::EpochAck::State_Name(m.epoch_ack().state()), " ",
                          m.epoch_ack().reason());
    case v1::ServerMessage::kMoved:
      return absl::StrCat("Moved ", m.moved().placement().epoch());
    case v1::ServerMessage::kRefused:
      return absl::StrCat("Refused", m.refused().fenced() ? " (fenced): " : ": ",
                          m.refused().message());
    default:
      return "other";
  }
}

std::string Describe(const v1::ChunkHeader& header, const char* what) {
  return absl::StrCat(what, StepOf(header.step(), header.attempt()), " round ", header.round(),
                      " block ", header.pieces(0).block(), " at ", header.pieces(0).offset(),
                      header.pieces(0).absent() ? " absent" : "");
}

}  // namespace

Hash HashOf(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

Value Mix(Value a, Value b) {
  const Value pair[2] = {a, b};
  return XXH3_64bits(pair, sizeof(pair));
}

std::string Message::DebugString() const {
  const std::string what = std::visit(
      [](const auto& body) -> std::string {
        using Body = std::decay_t<decltype(body)>;
        if constexpr (std::is_same_v<Body, ChunkUp>) {
          return Describe(body.header, "gradient");
        } else if constexpr (std::is_same_v<Body, ChunkDown>) {
          return Describe(body.header,
                          body.header.type() == v1::ChunkHeader::WEIGHTS_AT ? "weights" : "update");
        } else if constexpr (std::is_same_v<Body, JoinAnswer>) {
          return absl::StrCat("JoinRun answer: ", body.status.ToString());
        } else if constexpr (std::is_same_v<Body, TakeOverAnswer>) {
          return absl::StrCat("TakeOver answer: ", body.status.ToString());
        } else if constexpr (std::is_same_v<Body, OpenAnswer>) {
          return absl::StrCat("OpenRun answer: ", body.status.ToString());
        } else if constexpr (std::is_same_v<Body, v1::OpenRunRequest>) {
          return absl::StrCat("OpenRun with moves_in, placement ", body.placement_epoch());
        } else if constexpr (std::is_same_v<Body, v1::JoinRunRequest>) {
          return absl::StrCat("JoinRun, applied ",
                              body.has_applied_step() ? absl::StrCat(body.applied_step()) : "none");
        } else if constexpr (std::is_same_v<Body, v1::TakeOverRequest>) {
          return "TakeOver";
        } else {
          return Describe(body);
        }
      },
      body);
  return up() ? absl::StrCat("life ", process, " -> server ", server, ": ", what)
              : absl::StrCat("server ", server, " -> life ", process, ": ", what);
}

std::shared_ptr<const Message> Seal(Message message) {
  message.hash = HashOf(Bytes(message));
  return std::make_shared<const Message>(std::move(message));
}

void Insert(Bag* bag, std::shared_ptr<const Message> message) {
  const auto place =
      std::lower_bound(bag->begin(), bag->end(), message,
                       [](const auto& a, const auto& b) { return a->hash < b->hash; });
  if (place != bag->end() && (*place)->hash == message->hash) return;
  bag->insert(place, std::move(message));
}

}  // namespace stiefel::model
