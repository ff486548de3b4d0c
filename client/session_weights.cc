// Initial weights of a run in WEIGHTS mode.
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "common/checksum.h"
#include "common/clock.h"
#include "common/errors.h"
#include "common/status.h"

namespace stiefel {
namespace {

v1::DataType ToProto(DType dtype) {
  return dtype == DType::kBf16 ? v1::BF16 : dtype == DType::kFp16 ? v1::FP16 : v1::FP32;
}

int64_t Now() { return RealClock().NowMicros(); }

// Rectangles of at most `elements` elements that make up `rect`, row-major one after the other.
std::vector<Rect> CutRect(const Rect& rect, int64_t elements) {
  std::vector<Rect> pieces;
  const int64_t cols = rect.cols();
  const int64_t rows = std::max<int64_t>(1, elements / cols);
  for (int64_t row = rect.row_begin; row < rect.row_end; row += rows) {
    const int64_t row_end = std::min(rect.row_end, row + rows);
    for (int64_t col = rect.col_begin; col < rect.col_end; col += elements) {
      const int64_t col_end = rows > 1 ? rect.col_end : std::min(rect.col_end, col + elements);
      pieces.push_back({row, row_end, col, col_end});
      if (rows > 1) break;
    }
  }
  return pieces;
}

struct Reply {
  Mutex mutex;
  CondVar changed;
  bool done ABSL_GUARDED_BY(mutex) = false;
  absl::Status status ABSL_GUARDED_BY(mutex);
  std::string response ABSL_GUARDED_BY(mutex);
};

// Chunks of one shard, whose elements of `rect` lie row-major at `data`.
void AddChunks(int32_t shard, const Rect& rect, const char* data, DType dtype,
               const v1::Sender& sender, int64_t chunk_bytes, BorrowedMemory* lent,
               std::vector<OutgoingChunk>* chunks) {
  const int64_t size = DTypeSize(dtype);
  for (const Rect& piece : CutRect(rect, chunk_bytes / size)) {
    OutgoingChunk chunk;
    chunk.header.set_type(v1::ChunkHeader::INIT_WEIGHTS);
    *chunk.header.mutable_sender() = sender;
    v1::Piece* wire = chunk.header.add_pieces();
    wire->set_block(shard);
    wire->set_count(piece.Area());
    wire->set_dtype(ToProto(dtype));
    wire->mutable_rect()->set_row_begin(piece.row_begin);
    wire->mutable_rect()->set_row_end(piece.row_end);
    wire->mutable_rect()->set_col_begin(piece.col_begin);
    wire->mutable_rect()->set_col_end(piece.col_end);
    const size_t bytes = static_cast<size_t>(piece.Area() * size);
    wire->set_crc32c(Crc32c(data, bytes));
    chunk.payload.push_back({data, bytes});
    chunk.keepalive = lent->Lend();
    chunks->push_back(std::move(chunk));
    data += bytes;
  }
}

}  // namespace

absl::Status Session::InitWeights(int32_t parameter, const Rect& rect, const TensorView& weights) {
  Caller caller(this);
  const ParameterSpec& spec = layout_.parameters()[parameter];
  const std::string what = absl::StrCat("weights of \"", spec.name, "\" ", rect.DebugString());
  if (layout_.options().mode != UpdateMode::kWeights) {
    return absl::FailedPreconditionError(what + ": in DELTA mode servers hold no weights");
  }
  if (absl::Status valid = ValidateRect(rect, spec.rows(), spec.cols()); !valid.ok()) {
    return absl::Status(valid.code(), absl::StrCat(what, ": ", valid.message()));
  }
  STIEFEL_ASSIGN_OR_RETURN(const Walk walk, CheckView(weights, rect.rows(), rect.cols(), what));
  const DType dtype = walk.type == ElementType::kBf16   ? DType::kBf16
                      : walk.type == ElementType::kFp16 ? DType::kFp16
                                                        : DType::kFp32;
  const std::vector<WireBlock> wires = layout_.Cut(parameter, rect);
  const bool scattered = std::any_of(wires.begin(), wires.end(), [&rect](const WireBlock& wire) {
    return wire.rect.cols() != rect.cols();
  });
  std::unique_ptr<char[]> staging;
  const char* data = walk.data;
  if (!walk.contiguous || walk.type == ElementType::kFp64 || scattered) {
    staging.reset(new char[static_cast<size_t>(rect.Area() * DTypeSize(dtype))]);
    for (const WireBlock& wire : wires) {
      CopyAs(walk.Part(wire.in_block), dtype, staging.get() + wire.first * DTypeSize(dtype));
    }
    data = staging.get();
  }
  v1::Sender sender;
  std::vector<int32_t> owners;
  {
    MutexLock lock(&mutex_);
    STIEFEL_RETURN_IF_ERROR(FinalError());
    sender = sender_;
    owners = owners_;
  }
  // The loans of this call alone: gradients may be under way at the same time.
  const auto lent = std::make_shared<BorrowedMemory>();
  std::map<int32_t, std::vector<OutgoingChunk>> chunks;  // by server
  for (const WireBlock& wire : wires) {
    AddChunks(wire.shard, wire.rect, data + wire.first * DTypeSize(dtype), dtype, sender,
              chunk_bytes_, lent.get(), &chunks[owners[wire.shard]]);
  }
  absl::Status first;
  for (auto& [server, list] : chunks) {
    absl::Status sent = SendInitWeights(server, std::move(list));
    if (first.ok()) first = std::move(sent);
  }
  while (!lent->WaitReturned(Now() + 1000000)) {
  }
  return first;
}

absl::Status Session::SendInitWeights(int32_t server, std::vector<OutgoingChunk> chunks) {
  std::shared_ptr<ServerConnection> connection;
  std::string address;
  {
    MutexLock lock(&mutex_);
    connection = servers_[server].connection;
    address = servers_[server].address;
  }
  const auto reply = std::make_shared<Reply>();
  connection->InitWeights(std::move(chunks),
                          absl::ToInt64Microseconds(layout_.options().join_timeout),
                          [reply](const absl::Status& status, const std::string& response) {
                            MutexLock lock(&reply->mutex);
                            reply->done = true;
                            reply->status = OwnCopy(status);
                            reply->response = response;
                            reply->changed.NotifyAll();
                          });
  v1::InitWeightsResponse response;
  {
    MutexLock lock(&reply->mutex);
    while (!reply->done) reply->changed.Wait(&reply->mutex);
    if (!reply->status.ok()) {
      return AtServer(address, reply->status);
    }
    if (!response.ParseFromString(reply->response)) {
      return AtServer(address, absl::DataLossError("the response to InitWeights does not parse"));
    }
  }
  MutexLock lock(&mutex_);
  if (response.complete()) servers_[server].weights_needed = false;
  return absl::OkStatus();
}

}  // namespace stiefel
