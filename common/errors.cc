#include "common/errors.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace stiefel {

absl::Status StepMismatch(absl::string_view what, int64_t got, int64_t expected) {
  return absl::FailedPreconditionError(
      absl::StrCat("step ", got, " for ", what, ": expected ", expected));
}

absl::Status AttemptMismatch(absl::string_view what, int64_t step, int64_t got, int64_t expected) {
  return absl::FailedPreconditionError(absl::StrCat("attempt ", got, " of step ", step, " for ",
                                                    what, ": expected attempt ", expected));
}

absl::Status PlacementEpochMismatch(absl::string_view what, int64_t got, int64_t expected) {
  return absl::FailedPreconditionError(absl::StrCat("placement_epoch ", got, " for ", what,
                                                    ": expected ", expected, "; rejoin the run"));
}

absl::Status StaleIncarnation(int64_t rank, int64_t got_generation, uint64_t got_id,
                              int64_t current_generation, uint64_t current_id) {
  return absl::FailedPreconditionError(absl::StrFormat(
      "rank %d: incarnation (%d, %016x) was replaced by (%d, %016x); this process is fenced and "
      "must stop",
      rank, got_generation, got_id, current_generation, current_id));
}

absl::Status RunMismatch(absl::string_view what, absl::string_view got, absl::string_view held) {
  return absl::FailedPreconditionError(
      absl::StrCat(what, " names run ", got, ", but this server holds run ", held));
}

absl::Status UnknownName(absl::string_view kind, absl::string_view name) {
  return absl::NotFoundError(absl::StrCat("no ", kind, " is named '", name, "'"));
}

absl::Status DuplicateName(absl::string_view kind, absl::string_view name) {
  return absl::InvalidArgumentError(absl::StrCat("two entries name the ", kind, " '", name, "'"));
}

absl::Status SizeMismatch(absl::string_view what, int64_t got, int64_t expected,
                          absl::string_view unit) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": got ", got, " ", unit, ", expected ", expected));
}

absl::Status IndexOutOfRange(absl::string_view what, int64_t index, int64_t count) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": index ", index, " is outside [0, ", count, ")"));
}

absl::Status BadShape(absl::string_view what, int64_t rows, int64_t cols) {
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": shape ", rows, " x ", cols,
      (rows <= 0 || cols <= 0) ? " is not positive" : " is too large: its bytes overflow int64"));
}

absl::Status ChecksumMismatch(absl::string_view what, uint32_t got, uint32_t expected) {
  return absl::DataLossError(absl::StrFormat(
      "%s: crc32c of the bytes is %08x, the sender stated %08x", what, got, expected));
}

absl::Status DoesNotFit(absl::string_view what, int64_t needed_bytes, int64_t limit_bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " needs ", needed_bytes, " bytes, the limit is ", limit_bytes));
}

}  // namespace stiefel
