#include "server/publisher.h"

#include <cstring>
#include <random>

#include "common/checksum.h"
#include "gtest/gtest.h"
#include "proto/protocol.h"

namespace stiefel {
namespace {

// A matrix whose elements tell where they are.
struct Source {
  Source(int64_t rows, int64_t cols) : rows(rows), cols(cols), values(rows * cols) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  }
  PullItem Item(int32_t block, Rect rect) {
    PullItem item;
    item.step = 1;
    item.block = block;
    item.rect = rect;
    item.matrix_cols = cols;
    item.matrix = reinterpret_cast<const char*>(values.data());
    item.pin = alive;
    return item;
  }
  int64_t rows, cols;
  std::vector<float> values;
  std::shared_ptr<int> alive = std::make_shared<int>();
};

std::string PayloadOf(const OutgoingChunk& chunk) {
  std::string payload;
  for (const auto& span : chunk.payload)
    payload.append(static_cast<const char*>(span.data), span.size);
  return payload;
}

TEST(PublisherTest, EveryBlockArrivesWholeOnAFixedGrid) {
  std::mt19937 random(3);
  for (int round = 0; round < 30; ++round) {
    Source source(1 + random() % 300, 1 + random() % 6000);
    std::vector<Rect> rects;
    PullQueue queue;
    for (int b = 0; b < 4; ++b) {
      const int64_t r0 = random() % source.rows, c0 = random() % source.cols;
      Rect rect{r0, r0 + 1 + static_cast<int64_t>(random() % (source.rows - r0)), c0,
                c0 + 1 + static_cast<int64_t>(random() % (source.cols - c0))};
      if (b == 0) rect = WholeRect(source.rows, source.cols);
      rects.push_back(rect);
      queue.Push(source.Item(b, rect));
    }
    std::vector<std::vector<float>> got;
    for (const Rect& rect : rects) got.emplace_back(rect.Area(), -1.0f);
    while (!queue.empty()) {
      const OutgoingChunk chunk = BuildChunk(queue.TakeChunk(), {});
      const std::string payload = PayloadOf(chunk);
      ASSERT_LE(static_cast<int64_t>(payload.size()), kPieceBytes);
      ASSERT_LT(static_cast<int64_t>(payload.size() + chunk.header.ByteSizeLong()),
                kMaxMessageBytes);
      size_t at = 0;
      for (const v1::Piece& piece : chunk.header.pieces()) {
        EXPECT_EQ(piece.offset() % (kPieceBytes / 4), 0);
        const size_t bytes = piece.count() * 4;
        EXPECT_EQ(Crc32c(payload.data() + at, bytes), piece.crc32c());
        std::memcpy(got[piece.block()].data() + piece.offset(), payload.data() + at, bytes);
        at += bytes;
      }
      EXPECT_EQ(at, payload.size());
    }
    for (size_t b = 0; b < rects.size(); ++b) {
      for (int64_t i = 0; i < rects[b].Area(); ++i) {
        const int64_t at = (rects[b].row_begin + i / rects[b].cols()) * source.cols +
                           rects[b].col_begin + i % rects[b].cols();
        ASSERT_EQ(got[b][i], source.values[at]);
      }
    }
  }
}

// What the rank named first is needed first: it interrupts a larger block, which goes on after it
// on the same grid.
TEST(PublisherTest, WhatIsNeededSoonerGoesFirst) {
  Source source(3, kPieceBytes / 4);
  PullQueue queue;
  queue.Push(source.Item(2, WholeRect(3, source.cols)));
  queue.Push(source.Item(1, Rect{0, 1, 0, source.cols}));
  const auto next = [&queue] {
    const ChunkPlan plan = queue.TakeChunk();
    EXPECT_EQ(plan.pieces.size(), 1);
    return std::make_pair(plan.pieces[0].item.block, plan.pieces[0].offset);
  };
  EXPECT_EQ(next(), std::make_pair(1, int64_t{0}));
  EXPECT_EQ(next(), std::make_pair(2, int64_t{0}));
  queue.Push(source.Item(0, Rect{0, 1, 0, source.cols}));
  queue.Push(source.Item(3, Rect{0, 1, 0, source.cols}));
  PullItem older = source.Item(9, Rect{0, 1, 0, source.cols});
  older.step = 0;
  queue.Push(older);
  EXPECT_EQ(next(), std::make_pair(9, int64_t{0}));
  EXPECT_EQ(next(), std::make_pair(0, int64_t{0}));
  EXPECT_EQ(next(), std::make_pair(2, source.cols));
  EXPECT_EQ(next(), std::make_pair(2, 2 * source.cols));
  EXPECT_EQ(next(), std::make_pair(3, int64_t{0}));
  EXPECT_TRUE(queue.empty());
}

TEST(PublisherTest, SmallBlocksTravelTogetherAndLargeOnesAreNotCopied) {
  Source source(1000, 1024);  // 4 MB
  PullQueue queue;
  for (int b = 0; b < 3000; ++b) queue.Push(source.Item(b, {0, 1, 0, 8}));
  EXPECT_EQ(queue.TakeChunk().pieces.size(), static_cast<size_t>(kMaxPiecesPerChunk));
  EXPECT_EQ(queue.TakeChunk().pieces.size(), 3000u - kMaxPiecesPerChunk);
  queue.Push(source.Item(0, WholeRect(1000, 1024)));
  const OutgoingChunk chunk = BuildChunk(queue.TakeChunk(), {});
  ASSERT_EQ(chunk.payload.size(), 1u);
  EXPECT_EQ(chunk.payload[0].data, source.values.data());
  queue.Clear();
  EXPECT_EQ(source.alive.use_count(), 2) << "held by the chunk alone";
}

TEST(PublisherTest, OneChunkIsOfOneStepAttemptAndRound) {
  Source source(4, 4);
  PullQueue queue;
  for (int round = 0; round < 2; ++round) {
    for (int b = 0; b < 2; ++b) {
      PullItem item = source.Item(b, WholeRect(4, 4));
      item.round = round;
      queue.Push(item);
    }
  }
  PullItem absent;
  absent.step = 1;
  absent.round = 1;
  absent.block = 7;
  absent.absent = true;
  queue.Push(absent);
  EXPECT_EQ(queue.TakeChunk().pieces.size(), 2u);
  const OutgoingChunk second = BuildChunk(queue.TakeChunk(), {});
  EXPECT_EQ(second.header.round(), 1);
  ASSERT_EQ(second.header.pieces_size(), 3);
  EXPECT_TRUE(second.header.pieces(2).absent());
  EXPECT_EQ(PayloadOf(second).size(), 2u * 64);
}

TEST(PublisherTest, DroppedUpdatesAreForgottenWithTheirMemory) {
  Source source(4, 4);
  PullQueue queue;
  for (int attempt = 0; attempt < 3; ++attempt) {
    PullItem item = source.Item(0, WholeRect(4, 4));
    item.attempt = attempt;
    queue.Push(item);
  }
  PullItem weights = source.Item(0, WholeRect(4, 4));
  weights.type = v1::ChunkHeader::WEIGHTS_AT;
  queue.Push(weights);
  weights.pin.reset();
  queue.DropUpdates(1, 1, 0);
  EXPECT_EQ(source.alive.use_count(), 3);  // attempt 2 and the weights
  EXPECT_EQ(queue.TakeChunk().pieces[0].item.type, v1::ChunkHeader::WEIGHTS_AT);  // older
  EXPECT_EQ(queue.TakeChunk().pieces[0].item.attempt, 2);
}

TEST(PublisherTest, ConvertsToTheTypeOfTheWire) {
  Source source(3, 5);
  PullQueue queue;
  PullItem item = source.Item(0, {1, 3, 1, 4});
  item.wire = DType::kBf16;
  queue.Push(item);
  const std::string payload = PayloadOf(BuildChunk(queue.TakeChunk(), {}));
  ASSERT_EQ(payload.size(), 12u);
  uint16_t last;
  std::memcpy(&last, payload.data() + 10, 2);
  EXPECT_EQ(last, FloatToBf16(13));
}

}  // namespace
}  // namespace stiefel
