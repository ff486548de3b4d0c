#ifndef STIEFEL_COMMON_ERRORS_H_
#define STIEFEL_COMMON_ERRORS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

// The project's domain errors, built in one place so that each kind always has the same code and
// always carries its numbers. `what` names the thing the error is about ("matrix h.3.w", "BeginStep
// of rank 2").

namespace stiefel {

// FAILED_PRECONDITION: a message for another step than the one this process is at.
absl::Status StepMismatch(absl::string_view what, int64_t got, int64_t expected);

// FAILED_PRECONDITION: a message for another attempt of the right step.
absl::Status AttemptMismatch(absl::string_view what, int64_t step, int64_t got, int64_t expected);

// FAILED_PRECONDITION: a message under another placement.
absl::Status PlacementEpochMismatch(absl::string_view what, int64_t got, int64_t expected);

// FAILED_PRECONDITION: the sender's life of `rank` was replaced by a newer one. Incarnations
// compare as (generation, id).
absl::Status StaleIncarnation(int64_t rank, int64_t got_generation, uint64_t got_id,
                              int64_t current_generation, uint64_t current_id);

// FAILED_PRECONDITION: a message for another run, or another life of the run, than the one held
// here.
absl::Status RunMismatch(absl::string_view what, absl::string_view got, absl::string_view held);

// NOT_FOUND: nothing of this kind ("parameter", "preset") has that name.
absl::Status UnknownName(absl::string_view kind, absl::string_view name);

// INVALID_ARGUMENT: two things of this kind have one name.
absl::Status DuplicateName(absl::string_view kind, absl::string_view name);

// INVALID_ARGUMENT: a size, in `unit` ("bytes", "elements"), that is not the declared one.
absl::Status SizeMismatch(absl::string_view what, int64_t got, int64_t expected,
                          absl::string_view unit);

// INVALID_ARGUMENT: an index outside [0, count).
absl::Status IndexOutOfRange(absl::string_view what, int64_t index, int64_t count);

// INVALID_ARGUMENT: a matrix that is empty, negative, or too large for int64 bytes.
absl::Status BadShape(absl::string_view what, int64_t rows, int64_t cols);

// DATA_LOSS: the bytes are not those that were sent.
absl::Status ChecksumMismatch(absl::string_view what, uint32_t got, uint32_t expected);

// RESOURCE_EXHAUSTED: `what` needs more bytes than there are.
absl::Status DoesNotFit(absl::string_view what, int64_t needed_bytes, int64_t limit_bytes);

}  // namespace stiefel

#endif  // STIEFEL_COMMON_ERRORS_H_
