// What is in flight in the model: one message between a server and one life of a rank.
#ifndef STIEFEL_TESTS_MODEL_MESSAGE_H_
#define STIEFEL_TESTS_MODEL_MESSAGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "stiefel/v1/optimizer.pb.h"

namespace stiefel::model {

// 128-bit XXH3.
using Hash = std::pair<uint64_t, uint64_t>;
Hash HashOf(std::string_view bytes);

// Stands for the contents of a gradient, a delta or weights: equal values, equal bits.
using Value = uint64_t;
Value Mix(Value a, Value b);

// Whose gradient a piece is: the life of its rank, and the attempt it was computed for.
struct Tag {
  int64_t generation = 0;
  int64_t step = 0;
  int32_t attempt = 0;
};

struct ChunkUp {
  v1::ChunkHeader header;
  Tag tag;
};
struct ChunkDown {
  v1::ChunkHeader header;
  Value value = 0;
};
struct JoinAnswer {
  absl::Status status;
  v1::JoinRunResponse response;
  int64_t applied;  // of the call that it answers, -1: none
};
struct TakeOverAnswer {
  absl::Status status;
  v1::TakeOverResponse response;
};
struct OpenAnswer {
  absl::Status status;
};

struct Message {
  int32_t server = 0;
  int32_t process = 0;  // the life of a rank at the other end
  std::variant<v1::TrainerMessage, ChunkUp, v1::JoinRunRequest, v1::TakeOverRequest,
               v1::OpenRunRequest, v1::ServerMessage, ChunkDown, JoinAnswer, TakeOverAnswer,
               OpenAnswer>
      body;
  Hash hash;

  bool up() const { return body.index() < 5; }
  // A call or its answer, not a message of a stream.
  bool rpc() const { return (body.index() >= 2 && body.index() <= 4) || body.index() >= 7; }
  // One line for a trace.
  std::string DebugString() const;
};

// Hashes it. Equal contents, equal hash.
std::shared_ptr<const Message> Seal(Message message);

// The messages in flight: a set, in the order of their hashes. Something sent again while it is in
// flight is there once; the model repeats deliveries instead.
using Bag = std::vector<std::shared_ptr<const Message>>;
void Insert(Bag* bag, std::shared_ptr<const Message> message);

}  // namespace stiefel::model

#endif  // STIEFEL_TESTS_MODEL_MESSAGE_H_
