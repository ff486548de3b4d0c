#include "tests/conformance/sharded_matrix.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <thread>

#include "common/mutex.h"
#include "plan/shards.h"

namespace stiefel {
namespace {

std::vector<char> Bytes(const void* data, int64_t bytes) {
  const auto* begin = static_cast<const char*>(data);
  return std::vector<char>(begin, begin + bytes);
}

// What others may still be served of a collective when it is done: the outcome, and what was
// gathered.
std::vector<char> Served(const CollectivePart& part, int64_t shards) {
  switch (part.kind) {
    case CollectivePart::Kind::kGather: {
      std::vector<char> served = Bytes(part.in, part.count);
      const std::vector<char> out = Bytes(part.out, part.count * shards);
      served.insert(served.end(), out.begin(), out.end());
      return served;
    }
    case CollectivePart::Kind::kSumFp32:
      return Bytes(part.out, part.count * 4);
    case CollectivePart::Kind::kSumFp64:
      return Bytes(part.out, part.count * 8);
  }
  return {};
}

// Elements of `rect` of a row-major matrix of `cols` columns.
template <typename T>
std::vector<T> Cut(const std::vector<T>& values, int64_t cols, const Rect& rect) {
  std::vector<T> part;
  for (int64_t i = rect.row_begin; i < rect.row_end; ++i) {
    part.insert(part.end(), values.begin() + i * cols + rect.col_begin,
                values.begin() + i * cols + rect.col_end);
  }
  return part;
}

void Put(const std::vector<float>& part, const Rect& rect, int64_t cols,
         std::vector<float>* whole) {
  if (part.empty()) return;
  for (int64_t i = 0; i < rect.rows(); ++i) {
    std::copy_n(part.begin() + i * rect.cols(), rect.cols(),
                whole->begin() + (rect.row_begin + i) * cols + rect.col_begin);
  }
}

// Shards that are ready for their next stage.
class ReadyShards {
 public:
  ReadyShards(int32_t shards, uint64_t seed) : left_(shards), random_(seed) {
    for (int32_t i = 0; i < shards; ++i) ready_.push_back(i);
  }
  void Add(int32_t shard) {
    MutexLock lock(&mutex_);
    ready_.push_back(shard);
    changed_.NotifyAll();
  }
  void Finish() {
    MutexLock lock(&mutex_);
    --left_;
    changed_.NotifyAll();
  }
  // Any of them; -1 when all have finished.
  int32_t Next() {
    MutexLock lock(&mutex_);
    while (ready_.empty() && left_ > 0) changed_.Wait(&mutex_);
    if (left_ == 0) return -1;
    std::swap(ready_[random_() % ready_.size()], ready_.back());
    const int32_t shard = ready_.back();
    ready_.pop_back();
    return shard;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<int32_t> ready_ ABSL_GUARDED_BY(mutex_);
  int32_t left_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

struct ShardedMatrix::Running {
  std::unique_ptr<MatrixMemory::Step> memory;
  StepOptions options;
  std::unique_ptr<ShardedStep> step;
  std::vector<char> served;  // at the end of the last collective
  Shard shard;
};

ShardedMatrix::ShardedMatrix(Backend* backend, const Rule& rule, int64_t rows, int64_t cols,
                             std::vector<int64_t> cuts, Driving driving)
    : rows_(rows),
      cols_(cols),
      rects_(ShardRects(rows, cols, cuts)),
      driving_(driving),
      collective_({static_cast<int32_t>(rects_.size())}) {
  for (size_t i = 0; i < rects_.size(); ++i) {
    const ShardOf shard = {rows, cols, static_cast<int32_t>(i), cuts};
    rules_.push_back(std::move(ShardedRule::Create(rule, shard, backend)).value());
    memory_.push_back(std::make_unique<MatrixMemory>(backend, rules_[i]->State(), rects_[i].rows(),
                                                     rects_[i].cols(),
                                                     rules_[i]->WorkspaceBytes()));
  }
}

HostView ShardedMatrix::ViewOf(const HostView& view, int32_t shard) const {
  HostView own = view;
  own.pieces.clear();
  const auto within = [](const Rect& rect, const Rect& outer) {
    return Rect{rect.row_begin - outer.row_begin, rect.row_end - outer.row_begin,
                rect.col_begin - outer.col_begin, rect.col_end - outer.col_begin};
  };
  for (const HostPiece& piece : view.pieces) {
    const Rect common = Intersect(piece.rect, rects_[shard]);
    if (common.empty()) continue;
    HostPiece cut = piece;
    cut.rect = within(common, rects_[shard]);
    cut.values = Cut(piece.values, piece.rect.cols(), within(common, piece.rect));
    own.pieces.push_back(std::move(cut));
  }
  return own;
}

StepOptions ShardedMatrix::OptionsOf(const StepOptions& options, int32_t shard) const {
  StepOptions own = options;
  if (options.weights.has_value()) own.weights = Cut(*options.weights, cols_, rects_[shard]);
  return own;
}

void ShardedMatrix::Drive(const StepArgs& args, std::vector<std::unique_ptr<Running>>* running) {
  const auto shards = static_cast<int32_t>(rects_.size());
  ReadyShards ready(shards, driving_.seed++);
  const auto run = [&] {
    for (int32_t i = ready.Next(); i >= 0; i = ready.Next()) {
      Running& own = *(*running)[i];
      std::vector<CollectivePart>& collectives = own.shard.collectives;
      const absl::Status status = own.step->RunStage(memory_[i]->stream());
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_TRUE(memory_[i]->stream()->Synchronize().ok());
      if (!collectives.empty()) {
        EXPECT_EQ(Served(collectives.back(), shards), own.served) << "collective memory changed";
      }
      if (!own.step->next().has_value()) {
        own.shard.ended = own.step->outcome();
        ready.Finish();
        continue;
      }
      EXPECT_EQ(own.step->index(), static_cast<int32_t>(collectives.size()));
      collectives.push_back(*own.step->next());
      CollectiveKey key;
      key.step = args.step;
      key.index = own.step->index();
      collective_.Start(key, collectives.back(), [&own, &ready, i, shards](const absl::Status& s) {
        EXPECT_TRUE(s.ok()) << s;
        own.served = Served(own.shard.collectives.back(), shards);
        ready.Add(i);
      });
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < driving_.threads; ++i) others.emplace_back(run);
  run();
  for (std::thread& other : others) other.join();
}

std::vector<ShardedMatrix::Shard> ShardedMatrix::StepOfShards(const HostView& view,
                                                              const StepArgs& args,
                                                              const StepOptions& options) {
  std::vector<std::unique_ptr<Running>> running;
  for (size_t i = 0; i < rects_.size(); ++i) {
    auto own = std::make_unique<Running>();
    own->options = OptionsOf(options, static_cast<int32_t>(i));
    own->memory =
        memory_[i]->Begin(ViewOf(view, static_cast<int32_t>(i)), own->options, std::nullopt);
    absl::StatusOr<std::unique_ptr<ShardedStep>> step =
        rules_[i]->Begin(own->memory->gradient, args, own->memory->buffers, memory_[i]->workspace(),
                         &own->shard.outcome.result);
    EXPECT_TRUE(step.ok()) << step.status();
    own->step = std::move(*step);
    running.push_back(std::move(own));
  }
  Drive(args, &running);
  std::vector<Shard> shards;
  for (size_t i = 0; i < rects_.size(); ++i) {
    Running& own = *running[i];
    own.options.commit = options.commit && own.shard.ended == ShardedStep::Outcome::kComputed;
    memory_[i]->Take(
        own.memory.get(), own.options,
        [&](Stream* stream, const GradientView& gradient, const std::vector<float*>& state) {
          return rules_[i]->Absorb(stream, gradient, args, state);
        },
        &own.shard.outcome);
    shards.push_back(std::move(own.shard));
  }
  return shards;
}

Outcome ShardedMatrix::Step(const HostView& view, const StepArgs& args,
                            const StepOptions& options) {
  const std::vector<Shard> shards = StepOfShards(view, args, options);
  const int64_t elements = rows_ * cols_;
  Outcome whole;
  (options.weights.has_value() ? whole.weights : whole.delta).resize(elements);
  if (options.weights.has_value()) whole.payload.resize(elements);
  whole.state.assign(shards[0].outcome.state.size(), std::vector<float>(elements));
  double squares = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const Outcome& part = shards[i].outcome;
    Put(part.delta, rects_[i], cols_, &whole.delta);
    Put(part.weights, rects_[i], cols_, &whole.weights);
    Put(part.payload, rects_[i], cols_, &whole.payload);
    for (size_t s = 0; s < whole.state.size(); ++s)
      Put(part.state[s], rects_[i], cols_, &whole.state[s]);
    whole.result.sum_squares += part.result.sum_squares;
    whole.result.nonfinite_gradient += part.result.nonfinite_gradient;
    whole.result.nonfinite_update += part.result.nonfinite_update;
    squares +=
        part.result.update_rms * part.result.update_rms * static_cast<double>(rects_[i].Area());
    whole.result.newton_schulz = part.result.newton_schulz;
    if (i > 0) {
      EXPECT_EQ(part.result.residual, whole.result.residual) << "shard " << i;
    }
    whole.result.residual = part.result.residual;
  }
  whole.result.update_rms = std::sqrt(squares / static_cast<double>(elements));
  return whole;
}

}  // namespace stiefel
