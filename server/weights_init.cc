#include "server/weights_init.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/dtype.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {
namespace {

DType WireType(const v1::Piece& piece) {
  switch (piece.dtype()) {
    case v1::BF16:
      return DType::kBf16;
    case v1::FP16:
      return DType::kFp16;
    default:
      return DType::kFp32;
  }
}

Rect RectOf(const v1::Rectangle& wire) {
  return Rect{wire.row_begin(), wire.row_end(), wire.col_begin(), wire.col_end()};
}

// Adds a disjoint rectangle, joined to one that it continues downwards: weights usually come in
// bands of rows, and the list stays short.
void AddRect(const Rect& rect, std::vector<Rect>* rects) {
  for (Rect& r : *rects) {
    if (r.col_begin != rect.col_begin || r.col_end != rect.col_end) continue;
    if (r.row_end == rect.row_begin) {
      r.row_end = rect.row_end;
      return;
    }
    if (rect.row_end == r.row_begin) {
      r.row_begin = rect.row_begin;
      return;
    }
  }
  rects->push_back(rect);
}

}  // namespace

WeightsInit::WeightsInit(std::shared_ptr<const RunSpec> spec,
                         std::map<int32_t, std::shared_ptr<SharedBuffer>> weights)
    : spec_(std::move(spec)), incomplete_(weights.size()) {
  for (auto& [index, buffer] : weights) {
    targets_[index].pin = SharedBuffer::Pin(buffer);
    targets_[index].weights = std::move(buffer);
  }
}

absl::Status WeightsInit::Check(const IncomingChunk& chunk) const {
  int64_t expected = 0;
  for (const v1::Piece& piece : chunk.header().pieces()) {
    if (piece.block() < 0 || piece.block() >= static_cast<int64_t>(spec_->matrices().size()))
      return IndexOutOfRange("matrix of a piece of initial weights", piece.block(),
                             static_cast<int64_t>(spec_->matrices().size()));
    const MatrixSpec& matrix = spec_->matrices()[piece.block()];
    if (!spec_->Owns(piece.block()))
      return absl::InvalidArgumentError(absl::StrCat("\"", matrix.Label(), "\" is owned by server ",
                                                     matrix.owner, ", not by server ",
                                                     spec_->opened().server_index()));
    const Rect rect = RectOf(piece.rect());
    if (absl::Status valid = ValidateRect(rect, matrix.rows, matrix.cols); !valid.ok())
      return absl::Status(valid.code(), absl::StrCat("initial weights of \"", matrix.Label(),
                                                     "\": ", valid.message()));
    if (piece.count() != rect.Area())
      return SizeMismatch(absl::StrCat("count of a piece of \"", matrix.name, "\""), piece.count(),
                          rect.Area(), "elements");
    if (!v1::DataType_IsValid(piece.dtype()))
      return absl::InvalidArgumentError(absl::StrCat("initial weights of \"", matrix.name,
                                                     "\": unknown data type ",
                                                     static_cast<int>(piece.dtype())));
    if (!CheckedMulAdd(piece.count(), DTypeSize(WireType(piece)), &expected))
      return BadShape(matrix.name, matrix.rows, matrix.cols);
  }
  if (expected == chunk.payload_bytes()) return absl::OkStatus();
  return SizeMismatch("payload of a chunk of initial weights", chunk.payload_bytes(), expected,
                      "bytes");
}

// Compares what is covered already, then writes what is not.
absl::Status WeightsInit::Place(int32_t index, const Rect& rect, const float* values,
                                Target* target) {
  const MatrixSpec& matrix = spec_->matrices()[index];
  float* const weights = target->weights->floats();
  const auto value_at = [&](int64_t row, int64_t col) {
    return values + (row - rect.row_begin) * rect.cols() + (col - rect.col_begin);
  };
  for (const Rect& before : target->covered) {
    const Rect common = Intersect(before, rect);
    for (int64_t row = common.row_begin; row < common.row_end && !common.empty(); ++row) {
      const float* held = weights + row * matrix.cols + common.col_begin;
      const float* sent = value_at(row, common.col_begin);
      if (std::memcmp(held, sent, static_cast<size_t>(common.cols()) * sizeof(float)) == 0)
        continue;
      int64_t i = 0;
      while (std::memcmp(held + i, sent + i, sizeof(float)) == 0) ++i;
      return absl::AlreadyExistsError(absl::StrCat(
          "initial weight [", matrix.place.row_begin + row, ", ",
          matrix.place.col_begin + common.col_begin + i, "] of \"", matrix.name, "\" is ", held[i],
          " and was sent again as ", sent[i], "; copies must be equal"));
    }
  }
  if (target->complete) return absl::OkStatus();
  for (const Rect& fresh : Gaps(rect, target->covered)) {
    for (int64_t row = fresh.row_begin; row < fresh.row_end; ++row) {
      std::memcpy(weights + row * matrix.cols + fresh.col_begin, value_at(row, fresh.col_begin),
                  static_cast<size_t>(fresh.cols()) * sizeof(float));
    }
    AddRect(fresh, &target->covered);
  }
  return absl::OkStatus();
}

absl::StatusOr<WeightsInit::Progress> WeightsInit::Take(IncomingChunk* chunk) {
  STIEFEL_RETURN_IF_ERROR(Check(*chunk));
  Progress progress;
  std::vector<char> wire;
  std::vector<float> values;
  for (const v1::Piece& piece : chunk->header().pieces()) {
    const DType dtype = WireType(piece);
    wire.resize(static_cast<size_t>(piece.count() * DTypeSize(dtype)));
    const uint32_t crc = chunk->CopyNext(wire.data(), static_cast<int64_t>(wire.size()));
    if (piece.has_crc32c() && crc != piece.crc32c())
      return ChecksumMismatch(
          absl::StrCat("initial weights of \"", spec_->matrices()[piece.block()].name, "\""), crc,
          piece.crc32c());
    values.resize(static_cast<size_t>(piece.count()));
    Convert(wire.data(), dtype, values.data(), DType::kFp32, piece.count());

    MutexLock lock(&mutex_);
    progress.accepted_elements += piece.count();
    if (closed_) continue;
    Target& target = targets_.at(piece.block());
    STIEFEL_RETURN_IF_ERROR(Place(piece.block(), RectOf(piece.rect()), values.data(), &target));
    const MatrixSpec& matrix = spec_->matrices()[piece.block()];
    if (target.complete || !Gaps(WholeRect(matrix.rows, matrix.cols), target.covered, 1).empty())
      continue;
    target.complete = true;
    progress.completed_now = --incomplete_ == 0;
  }
  MutexLock lock(&mutex_);
  progress.complete = incomplete_ == 0;
  return progress;
}

void WeightsInit::Close() {
  MutexLock lock(&mutex_);
  closed_ = true;
  targets_.clear();
}

}  // namespace stiefel
