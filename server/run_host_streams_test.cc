// Chunks and streams that trainers break, repeat, damage or do not read.
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/run_host.h"
#include "server/testing/memory_cluster.h"

namespace stiefel::testing {
namespace {

using ::testing::HasSubstr;

// ---------------------------------------------------------------- chunks

TEST(RunHostStreamsTest, DuplicatesAreNotAdded) {
  // CASES D27: pieces out of order and repeated.
  const std::vector<Matrix> matrices = {{"a", 4, 8, "sgd"}};
  MemoryCluster cluster(matrices);
  cluster.Begin(1);
  const auto g = Gradient(matrices[0], 1);
  const std::string bytes = BytesOf(g);
  for (const int64_t begin : {24, 8, 24, 0, 16, 0, 8}) {
    v1::ChunkHeader header = cluster[0].Header(1);
    MemoryTrainer::AddPiece(&header, 0, begin, bytes.substr(begin * 4, 32));
    ASSERT_TRUE(cluster[0].Chunk(header, bytes.substr(begin * 4, 32)).ok());
  }
  cluster.EndAndVote(1);
  const auto delta = cluster.Delta(0, 0, 1);
  for (size_t i = 0; i < g.size(); ++i)
    EXPECT_EQ(delta[i], static_cast<float>(-RuleOf(matrices[0]).lr) * g[i]);
  EXPECT_EQ(cluster.server().StatusNow().runs(0).chunks_duplicate(), 3);
  // After the vote they are stale, and acknowledged.
  EXPECT_TRUE(cluster[0].Push(1, 0, g).ok());
}

TEST(RunHostStreamsTest, DamagedPieceIsForgottenAndMayComeAgain) {
  const std::vector<Matrix> matrices = {{"a", 4, 8, "sgd"}};
  MemoryCluster cluster(matrices);
  cluster.Begin(1);
  const auto g = Gradient(matrices[0], 1);
  std::string bytes = BytesOf(g);
  v1::ChunkHeader header = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&header, 0, 0, bytes);
  std::string damaged = bytes;
  damaged[17] ^= 1;
  EXPECT_EQ(cluster[0].Chunk(header, damaged).code(), absl::StatusCode::kDataLoss);
  v1::TrainerMessage query;
  query.mutable_arrived_query()->set_step(1);
  cluster[0].Send(query);
  EXPECT_EQ(cluster[0].Next(v1::ServerMessage::kArrived).arrived().parts(0).bounds_size(), 0);
  EXPECT_TRUE(cluster[0].Chunk(header, bytes).ok());
  cluster.EndAndVote(1);
  EXPECT_EQ(cluster.Delta(0, 0, 1)[4], static_cast<float>(-RuleOf(matrices[0]).lr) * g[4]);
  // Equal bounds with another checksum.
  v1::ChunkHeader other = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&other, 0, 0, damaged);
  EXPECT_TRUE(cluster[0].Chunk(other, damaged).ok()) << "sealed: discarded";
}

TEST(RunHostStreamsTest, HostileChunksChangeNothing) {
  const std::vector<Matrix> matrices = {{"a", 4, 8, "sgd"}};
  MemoryCluster cluster(matrices, 2);
  const std::string payload(32, 'x');
  const auto chunk = [&](auto change) {
    v1::ChunkHeader header = cluster[0].Header(1);
    MemoryTrainer::AddPiece(&header, 0, 0, payload);
    change(&header);
    return cluster[0].Chunk(header, payload);
  };
  EXPECT_EQ(chunk([](auto*) {}).code(), absl::StatusCode::kFailedPrecondition) << "no credit yet";
  cluster.Begin(1);
  using Code = absl::StatusCode;
  const auto piece = [](v1::ChunkHeader* h) { return h->mutable_pieces(0); };
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(25); }).code(), Code::kOutOfRange);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(-1); }).code(), Code::kOutOfRange);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(INT64_MAX); }).code(), Code::kOutOfRange);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_count(9); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_count(-8); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_count(INT64_MAX); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_block(1); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_block(-1); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_part(1); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { h->set_type(v1::ChunkHeader::UPDATE); }).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { h->mutable_sender()->set_rank(1); }).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(chunk([&](auto* h) { h->mutable_sender()->set_run_uid(8); }).code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(chunk([&](auto* h) { h->mutable_sender()->set_placement_epoch(2); }).code(),
            Code::kFailedPrecondition);
  EXPECT_EQ(chunk([&](auto* h) { h->set_step(2); }).code(), Code::kFailedPrecondition);
  EXPECT_EQ(chunk([&](auto* h) { h->set_attempt(1); }).code(), Code::kFailedPrecondition);
  EXPECT_TRUE(chunk([&](auto* h) { h->set_step(0); }).ok()) << "stale: discarded";
  EXPECT_TRUE(chunk([](auto*) {}).ok());
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_crc32c(1); }).code(), Code::kDataLoss);
  EXPECT_EQ(chunk([&](auto* h) { piece(h)->set_offset(4); }).code(), Code::kInvalidArgument)
      << "overlaps without being equal";
  v1::ChunkHeader absent = cluster[0].Header(1);
  absent.add_pieces()->set_absent(true);
  EXPECT_EQ(cluster[0].Chunk(absent, "").code(), Code::kInvalidArgument) << "data came before";
}

TEST(RunHostStreamsTest, CreditGrowsWithWhatIsConsumedAndBoundsWhatIsTaken) {
  // CASES E7. A window is 4 MiB; the block is 20 MiB.
  const std::vector<Matrix> matrices = {{"a", 5, 1 << 20, "sgd"}};
  ServerOptions options = Options();
  options.credit_window_bytes = kMaxMessageBytes;
  MemoryCluster cluster(matrices, 2, options);
  for (int rank = 0; rank < 2; ++rank) cluster[rank].Begin(1);
  const v1::Credit first = cluster[0].Next(v1::ServerMessage::kCredit).credit();
  EXPECT_EQ(first.granted_bytes(), kMaxMessageBytes);
  const std::string row(4 << 20, '\0');
  v1::ChunkHeader header = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&header, 0, 0, row);
  ASSERT_TRUE(cluster[0].Chunk(header, row).ok());
  EXPECT_EQ(cluster[0].Next(v1::ServerMessage::kCredit).credit().granted_bytes(),
            2 * kMaxMessageBytes);
  v1::TrainerMessage query;
  query.mutable_arrived_query()->set_step(1);
  cluster[0].Send(query);
  const v1::Arrived arrived = cluster[0].Next(v1::ServerMessage::kArrived).arrived();
  EXPECT_EQ(arrived.consumed_bytes(), kMaxMessageBytes);
  EXPECT_EQ(arrived.parts(0).bounds(1), 1 << 20);
  // Beyond the credit and one window more in one chunk.
  const std::string much(13 << 20, '\0');
  v1::ChunkHeader large = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&large, 0, 1 << 20, much);
  EXPECT_EQ(cluster[0].Chunk(large, much).code(), absl::StatusCode::kResourceExhausted);
}

// ---------------------------------------------------------------- streams

TEST(RunHostStreamsTest, SlowReaderHoldsUpNobody) {
  const std::vector<Matrix> matrices = {{"a", 512, 2048, "sgd"}};  // 4 MiB: two chunks
  MemoryCluster cluster(matrices, 2);
  cluster[1].set_reading(false);
  for (int64_t step = 1; step <= 2; ++step) {
    cluster.Begin(step);
    for (int rank = 0; rank < 2; ++rank)
      ASSERT_TRUE(cluster[rank].Push(step, 0, Gradient(matrices[0], step)).ok());
    cluster.EndAndVote(step);
    cluster.Delta(0, 0, step);
    cluster.Decide(step, v1::COMMIT);
  }
  cluster[1].set_reading(true);
  EXPECT_EQ(cluster.Delta(1, 0, 2), cluster.Delta(0, 0, 2));
}

TEST(RunHostStreamsTest, MemoryThatSomebodyStillReadsIsNotOverwritten) {
  for (const v1::UpdateMode mode : {v1::DELTA, v1::WEIGHTS}) {
    const std::vector<Matrix> matrices = {{"a", 64, 64, "sgd"}};
    MemoryCluster cluster(matrices, 1, Opened(matrices, 1, mode), {Whole(matrices, 1)});
    if (mode == v1::WEIGHTS) {
      ASSERT_TRUE(cluster[0].InitWeights(0, {0, 64, 0, 64}, Gradient(matrices[0], 5)).ok());
    }
    cluster[0].set_keep_chunks(true);
    std::vector<OutgoingChunk> kept;  // as slices of a dead stream would
    std::vector<std::string> bytes;
    for (int64_t step = 1; step <= 4; ++step) {
      cluster.Begin(step);
      ASSERT_TRUE(cluster[0].Push(step, 0, Gradient(matrices[0], step)).ok());
      cluster.EndAndVote(step);
      bytes.push_back(BytesOf(cluster.Delta(0, 0, step)));
      for (OutgoingChunk& chunk : cluster[0].TakeChunks()) kept.push_back(std::move(chunk));
      cluster.Decide(step, v1::COMMIT);
    }
    ASSERT_EQ(kept.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(
          std::string(static_cast<const char*>(kept[i].payload[0].data), kept[i].payload[0].size),
          bytes[i])
          << "step " << i + 1;
    }
  }
}

TEST(RunHostStreamsTest, BrokenStreamGetsEverythingAgain) {
  const std::vector<Matrix> matrices = {{"a", 512, 2048, "sgd"}, {"b", 8, 8}};
  MemoryCluster cluster(matrices, 2);
  cluster[1].set_reading(false);
  cluster.Begin(1);
  for (int rank = 0; rank < 2; ++rank) {
    for (int m = 0; m < 2; ++m)
      ASSERT_TRUE(cluster[rank].Push(1, m, Gradient(matrices[m], m)).ok());
  }
  cluster.EndAndVote(1);
  cluster.Delta(0, 0, 1);
  cluster[1].DropData();
  cluster[1].set_reading(true);
  cluster.Decide(1, v1::COMMIT);
  // The step is decided, and kept for whoever has not applied it (PROTOCOL rule 5).
  ASSERT_TRUE(cluster[1].ConnectData().ok());
  EXPECT_EQ(cluster.Delta(1, 0, 1), cluster.Delta(0, 0, 1));
  EXPECT_EQ(cluster.Delta(1, 1, 1), cluster.Delta(0, 1, 1));
}

TEST(RunHostStreamsTest, ColumnBlocksAndNarrowTypesArriveWhole) {
  const std::vector<Matrix> matrices = {{"a", 6, 3000, "sgd", v1::BF16}};
  v1::JoinRunRequest join = Whole(matrices, 1);
  *join.mutable_pull(0)->mutable_rect() = Rectangle(1, 5, 2, 2999);  // long rows: spans
  v1::PullBlock* narrow = join.add_pull();
  narrow->set_parameter("a");
  *narrow->mutable_rect() = Rectangle(0, 6, 10, 17);  // short rows: gathered
  MemoryCluster cluster(matrices, 1, Opened(matrices, 1), {join});
  cluster.Begin(1);
  std::vector<uint16_t> g(6 * 3000);
  for (size_t i = 0; i < g.size(); ++i) g[i] = FloatToBf16(static_cast<float>(i % 251));
  const std::string bytes(reinterpret_cast<const char*>(g.data()), g.size() * 2);
  v1::ChunkHeader header = cluster[0].Header(1);
  MemoryTrainer::AddPiece(&header, 0, 0, bytes, 2);
  ASSERT_TRUE(cluster[0].Chunk(header, bytes).ok());
  cluster.EndAndVote(1);
  const float step = static_cast<float>(-RuleOf(matrices[0]).lr);
  const Rect rects[] = {{1, 5, 2, 2999}, {0, 6, 10, 17}};
  for (int block = 0; block < 2; ++block) {
    const Rect& rect = rects[block];
    const std::string got = cluster[0].Await(block, 1, 0, 0, 2 * rect.Area()).bytes;
    ASSERT_EQ(static_cast<int64_t>(got.size()), 2 * rect.Area());
    for (int64_t i = 0; i < rect.Area(); ++i) {
      uint16_t value;
      std::memcpy(&value, got.data() + 2 * i, 2);
      const int64_t at =
          (rect.row_begin + i / rect.cols()) * 3000 + rect.col_begin + i % rect.cols();
      ASSERT_EQ(value, FloatToBf16(step * Bf16ToFloat(g[at]))) << "block " << block << " " << i;
    }
  }
}

TEST(RunHostStreamsTest, NewerIncarnationFencesTheOlder) {
  const std::vector<Matrix> matrices = {{"a", 8, 8}};
  MemoryCluster cluster(matrices, 2);
  cluster[1].DropData();
  cluster.clock().Advance(20 * 1000000);  // its lease ends
  cluster[0].Send([] {
    v1::TrainerMessage heartbeat;
    heartbeat.mutable_heartbeat();
    return heartbeat;
  }());
  MemoryTrainer newer(&cluster.server(), 1, Incarnation(2, 5));
  newer.Join(Whole(matrices, 2));
  ASSERT_TRUE(newer.Joined().ok());
  EXPECT_TRUE(cluster[1].Next(v1::ServerMessage::kRefused).refused().fenced());
  EXPECT_EQ(cluster[1].AwaitControlEnd().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(cluster[1].ConnectData().ok());
  EXPECT_TRUE(newer.Connect().ok());
}

}  // namespace
}  // namespace stiefel::testing
