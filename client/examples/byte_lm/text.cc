#include "client/examples/byte_lm/text.h"

#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel::byte_lm {
namespace {

constexpr char kBibleCommand[] = "bible -f genesis1:1-revelation22:21";
constexpr int64_t kSmallestBible = 4'000'000;  // it is 4.4 MB; less is a broken print

// SplitMix64's finaliser: a well-mixed function of its argument.
uint64_t Mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
  return value ^ (value >> 31);
}

absl::StatusOr<std::string> PrintBible() {
  FILE* pipe = popen(kBibleCommand, "r");
  if (pipe == nullptr) {
    return absl::InternalError(absl::StrCat("starting `", kBibleCommand, "`: ", strerror(errno)));
  }
  std::string text;
  char buffer[1 << 16];
  for (size_t got; (got = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, got);
  const int status = pclose(pipe);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    return absl::NotFoundError(
        "the program `bible` is not installed: install the Debian package bible-kjv, or name an "
        "existing text with --text");
  }
  if (status != 0 || static_cast<int64_t>(text.size()) < kSmallestBible) {
    return absl::InternalError(absl::StrCat("`", kBibleCommand, "` ended with status ", status,
                                            " after ", text.size(),
                                            " bytes; expected 0 and at least ", kSmallestBible));
  }
  return text;
}

absl::Status WriteWhole(const std::string& path, const std::string& text) {
  const std::string temporary = absl::StrCat(path, ".", getpid());
  std::ofstream out(temporary, std::ios::binary);
  out.write(text.data(), text.size());
  out.close();
  if (!out || rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string reason = strerror(errno);
    unlink(temporary.c_str());
    return absl::InternalError(absl::StrCat("writing ", path, ": ", reason));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Text> Text::Create(std::string bytes, int64_t context) {
  const int64_t size = static_cast<int64_t>(bytes.size());
  const int64_t held_out = size / 50;
  if (held_out <= context) {
    return absl::InvalidArgumentError(
        absl::StrCat("a text of ", size, " bytes is too short: its held-out part of ", held_out,
                     " bytes must exceed the context of ", context));
  }
  return Text(std::move(bytes), context, size - held_out);
}

absl::StatusOr<Text> Text::Load(const std::string& path, int64_t context) {
  if (access(path.c_str(), F_OK) != 0) {
    STIEFEL_ASSIGN_OR_RETURN(std::string text, PrintBible());
    STIEFEL_RETURN_IF_ERROR(WriteWhole(path, text));
    return Create(std::move(text), context);
  }
  std::ifstream in(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (in.bad() || !in.is_open()) {
    return absl::InternalError(absl::StrCat("reading ", path, ": ", strerror(errno)));
  }
  return Create(std::move(text), context);
}

void Text::Append(int64_t position, Examples* out) const {
  const auto begin = bytes_.begin() + position;
  out->contexts.insert(out->contexts.end(), begin, begin + context_);
  out->targets.push_back(static_cast<uint8_t>(bytes_[position + context_]));
  ++out->count;
}

Examples Text::TrainingBatch(uint64_t seed, int64_t step, int64_t batch, int rank,
                             int world_size) const {
  Examples examples;
  const uint64_t positions = held_out_begin_ - context_;
  const uint64_t stream = Mix(Mix(seed) + step);
  for (int64_t i = batch * rank / world_size; i < batch * (rank + 1) / world_size; ++i) {
    Append(static_cast<int64_t>(Mix(stream + i) % positions), &examples);
  }
  return examples;
}

Examples Text::HeldOut(int64_t first, int64_t count) const {
  Examples examples;
  for (int64_t i = first; i < first + count; ++i) Append(held_out_begin_ + i, &examples);
  return examples;
}

}  // namespace stiefel::byte_lm
