#ifndef STIEFEL_CLIENT_EXAMPLES_BYTE_LM_TEXT_H_
#define STIEFEL_CLIENT_EXAMPLES_BYTE_LM_TEXT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace stiefel::byte_lm {

// Examples are count contexts of `context` bytes and the byte that follows each.
struct Examples {
  std::vector<uint8_t> contexts;
  std::vector<uint8_t> targets;
  int64_t count = 0;
};

// A text, the last 2 % of which is held out. Constant after construction.
class Text {
 public:
  // INVALID_ARGUMENT if the held-out part does not hold a single example of `context` bytes.
  static absl::StatusOr<Text> Create(std::string bytes, int64_t context);

  // Reads `path`. If there is no such file the King James Bible is printed into it first, by the
  // program `bible` of Debian's package bible-kjv; the file appears whole or not at all, also when
  // several processes do this at once. NOT_FOUND if that program is missing, INTERNAL for other
  // failures; and Create's errors.
  static absl::StatusOr<Text> Load(const std::string& path, int64_t context);

  // The part of rank `rank` in the batch of `step`: examples [rank * batch / world_size, (rank + 1)
  // * batch / world_size) of the batch, which depends on the seed and the step alone and is drawn
  // from the training part. REQUIRES: 0 <= rank < world_size.
  Examples TrainingBatch(uint64_t seed, int64_t step, int64_t batch, int rank,
                         int world_size) const;

  // Number of held-out examples, and examples [first, first + count) of them.
  // REQUIRES: 0 <= first, first + count <= held_out_count().
  int64_t held_out_count() const { return size() - held_out_begin_ - context_; }
  Examples HeldOut(int64_t first, int64_t count) const;

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }

 private:
  Text(std::string bytes, int64_t context, int64_t held_out_begin)
      : bytes_(std::move(bytes)), context_(context), held_out_begin_(held_out_begin) {}
  void Append(int64_t position, Examples* out) const;

  std::string bytes_;
  int64_t context_;
  int64_t held_out_begin_;
};

}  // namespace stiefel::byte_lm

#endif  // STIEFEL_CLIENT_EXAMPLES_BYTE_LM_TEXT_H_
