#include "server/matrix_store.h"

#include <cmath>
#include <cstring>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"

namespace stiefel {
namespace {

MatrixSpec Spec(int64_t rows, int64_t cols, const std::string& preset, DType wire) {
  MatrixSpec spec;
  spec.name = "w";
  spec.rows = rows;
  spec.cols = cols;
  spec.rule = *PresetRule(preset);
  spec.push_dtype = spec.pull_dtype = wire;
  return spec;
}

// One store, with everything allocated for one rank that pushes all of it.
class Store {
 public:
  Store(MatrixSpec spec, Staging staging, bool weights_mode = false)
      : backend_(*CreateCpuBackend(1)),
        spec_(std::move(spec)),
        store_(*MatrixStore::Create(0, &spec_, weights_mode, backend_)),
        stream_(*backend_->CreateStream()) {
    RankState rank;
    rank.push.push_back({0, WholeRect(spec_.rows, spec_.cols), -1, 1});
    EXPECT_TRUE(MatrixStore::AllocateState({store_.get()}, backend_).ok());
    EXPECT_TRUE(MatrixStore::AllocateSteps({store_.get()}, staging, {rank}, backend_).ok());
    attempt_.ranks.resize(1);
  }

  MatrixStore& operator*() { return *store_; }
  MatrixStore* operator->() { return store_.get(); }
  const Backend& backend() const { return *backend_; }

  // Computes a step from a gradient of `value` everywhere, and finishes it.
  void Compute(int64_t step, float value, const MatrixStore* partner = nullptr) {
    auto* gradient = reinterpret_cast<float*>(store_->PieceTarget(0, 0, 0));
    for (int64_t i = 0; i < spec_.elements(); ++i) gradient[i] = value;
    auto job = store_->BeginJob({step, 0, 0}, attempt_, 1, partner);
    ASSERT_TRUE(job.ok()) << job.status();
    auto workspace = *backend_->Allocate(store_->WorkspaceBytes());
    JobEnd end;
    ASSERT_TRUE(RunStepJob(*job, stream_.get(), &workspace, &end).ok());
    end.micros = 5;
    store_->FinishJob(*job, end);
  }
  void Commit(int64_t step) {
    if (auto absorb = store_->Commit(step)) {
      EXPECT_TRUE(RunAbsorbJob(*absorb, stream_.get()).ok());
    }
  }
  absl::StatusOr<MatrixJob> Begin(int64_t step, const MatrixStore* partner) {
    return store_->BeginJob({step, 0, 0}, attempt_, 1, partner);
  }
  float Sent() { return store_->update()->buffer->floats()[0]; }
  uint64_t Hash() { return HashMatrix(store_->PinForHash()); }

 private:
  std::shared_ptr<Backend> backend_;
  MatrixSpec spec_;
  std::unique_ptr<MatrixStore> store_;
  std::unique_ptr<Stream> stream_;
  Attempt attempt_;
};

TEST(MatrixStoreTest, BytesPerParameterAreThoseOfTheDesign) {
  // DELTA, bf16 on the wire: M 4, G 2, delta 2, and M' 4 where it is staged.
  const int64_t n = 1000 * 1000;
  EXPECT_LE(
      Store(Spec(1000, 1000, "muon", DType::kBf16), Staging::kLazy).backend().AllocatedBytes(),
      9 * n);
  EXPECT_LE(
      Store(Spec(1000, 1000, "muon", DType::kBf16), Staging::kDouble).backend().AllocatedBytes(),
      13 * n);
}

TEST(MatrixStoreTest, NothingIsVisibleBeforeTheDecision) {
  for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
    Store store(Spec(4, 4, "lion", DType::kFp32), staging);
    const uint64_t empty = store.Hash();
    store.Compute(1, 1);
    EXPECT_EQ(store.Hash(), empty);
    store->Discard();
    EXPECT_FALSE(store->update().has_value());
    store.Compute(1, 1);
    store.Commit(1);
    EXPECT_NE(store.Hash(), empty);
    EXPECT_EQ(store->figures().commits, 1);
    EXPECT_EQ(store->figures().compute_micros, 10);
    const uint64_t one = store.Hash();
    store.Compute(2, 5);
    store->Skip("why");
    EXPECT_EQ(store.Hash(), one);
    EXPECT_EQ(store->figures().last_skip_reason, "why");
    store->SetAbsent({3, 0, 0});
    store->Skip("absent has nothing to skip");
    EXPECT_EQ(store->figures().skips, 1);
  }
}

// Momentum of rank one: rows of one length, all alike, have a spectral norm of sqrt(rows) lengths.
TEST(MatrixStoreTest, FiguresTellTheSpectralNormOfRowWiseSteps) {
  Store store(Spec(6, 10, "periodic_rowwise_muon", DType::kFp32), Staging::kDouble);
  store.Compute(1, 1);
  store.Commit(1);
  EXPECT_FALSE(store->figures().row_wise_spectral.has_value());
  store.Compute(2, 1);
  EXPECT_FALSE(store->figures().row_wise_spectral.has_value());
  store.Commit(2);
  EXPECT_EQ(store->figures().last_kind, "row_wise");
  EXPECT_NEAR(store->figures().row_wise_spectral.value(), std::sqrt(6.0), 1e-5);
}

// Small state is staged beside the old one even where the rest is taken in after the decision.
TEST(MatrixStoreTest, StagingChangesNoBitOfTheState) {
  for (const std::string preset : {"dion3", "normuon", "samuon", "muonbp"}) {
    MatrixSpec spec = Spec(6, 10, preset, DType::kFp32);
    if (!spec.rule.tiles.empty()) {
      ASSERT_TRUE(SetOption(spec.rule, "tile", "4").ok());
    }
    Store twice(spec, Staging::kDouble), lazy(spec, Staging::kLazy);
    for (int64_t step = 1; step <= 6; ++step) {
      const uint64_t before = lazy.Hash();
      for (Store* store : {&twice, &lazy}) store->Compute(step, static_cast<float>(step));
      EXPECT_EQ(lazy.Hash(), before) << preset;
      if (step == 3) {
        twice->Skip("why");
        lazy->Discard();
      } else {
        twice.Commit(step);
        lazy.Commit(step);
      }
      EXPECT_EQ(lazy.Hash() == before, step == 3) << preset;
      EXPECT_EQ(lazy.Hash(), twice.Hash()) << preset;
    }
    // Step 6 is the refresh of phase 0, period 5.
    EXPECT_EQ(lazy->figures().last_kind, "refresh");
    twice.Compute(7, 1);
    twice.Commit(7);
    EXPECT_EQ(twice->figures().last_kind, preset == "muonbp" ? "tiled" : "refresh");
  }
}

// A factor's job reads what the partner had before the step, however far the partner gets.
TEST(MatrixStoreTest, APartnersMemoryStaysWhileAJobReadsIt) {
  MatrixSpec specs[2] = {Spec(3, 8, "polora", DType::kFp32), Spec(6, 3, "polora", DType::kFp32)};
  for (int f = 0; f < 2; ++f) {
    specs[f].rule.pair = f == 0 ? "b" : "a";
    specs[f].partner_shape.emplace(specs[1 - f].rows, specs[1 - f].cols);
  }
  Store a(specs[0], Staging::kLazy, true), b(specs[1], Staging::kLazy, true);
  for (int64_t i = 0; i < 24; ++i) a->weights()->floats()[i] = static_cast<float>(i % 5);
  for (int64_t i = 0; i < 18; ++i) b->weights()->floats()[i] = static_cast<float>(i % 7);
  auto job = a.Begin(1, &*b);
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_EQ(job->buffers.partner_state.size(), 2u);
  const auto seen = [&] {
    std::vector<float> values(job->buffers.partner_weights, job->buffers.partner_weights + 18);
    values.insert(values.end(), job->buffers.partner_state[1], job->buffers.partner_state[1] + 6);
    return values;
  };
  const std::vector<float> before = seen();
  EXPECT_EQ(std::vector<float>(before.begin() + 18, before.end()), std::vector<float>(6, 0));
  for (int64_t step = 1; step <= 4; ++step) {
    b.Compute(step, static_cast<float>(step), &*a);
    b.Commit(step);
  }
  EXPECT_EQ(seen(), before);
  EXPECT_NE(std::vector<float>(b->weights()->floats(), b->weights()->floats() + 18),
            std::vector<float>(before.begin(), before.begin() + 18));
}

TEST(MatrixStoreTest, PinnedBuffersAreLeftAloneAndUsedAgainLater) {
  for (const bool weights : {false, true}) {
    Store store(Spec(4, 4, "sgd", DType::kFp32), Staging::kDouble, weights);
    if (weights) std::memset(store->weights()->data(), 0, 64);
    store.Compute(1, 1);
    const float first = store.Sent();
    const auto* data = store->update()->buffer->floats();
    auto pin = SharedBuffer::Pin(store->update()->buffer);
    store.Commit(1);
    const int64_t before = store.backend().AllocatedBytes();
    for (int64_t step = 2; step <= 6; ++step) {
      store.Compute(step, static_cast<float>(step));
      store.Commit(step);
    }
    EXPECT_EQ(data[0], first);
    // One more buffer, and no more however long the reader takes.
    EXPECT_EQ(store.backend().AllocatedBytes(), before + 64);
    pin.reset();
    for (int64_t step = 7; step <= 9; ++step) {
      store.Compute(step, static_cast<float>(step));
      store.Commit(step);
    }
    EXPECT_EQ(store.backend().AllocatedBytes(), before + 64);
  }
}

TEST(MatrixStoreTest, NonFiniteUpdatesAreNotSent) {
  Store store(Spec(4, 4, "sgd", DType::kFp32), Staging::kDouble);
  store.Compute(1, std::numeric_limits<float>::infinity());
  ASSERT_TRUE(store->update().has_value());
  EXPECT_EQ(store->update()->buffer, nullptr);
  store->Skip("the step was skipped");
  EXPECT_EQ(store->figures().last_skip_reason,
            "16 non-finite gradient elements in w, pushed by rank 0");
}

// What a server hands over is all that the next step needs: both stores go on alike.
TEST(MatrixStoreTest, StateMovesToAnotherStore) {
  for (const char* preset : {"muon", "adamw", "periodic_rowwise_muon", "sgd"}) {
    for (const Staging staging : {Staging::kDouble, Staging::kLazy}) {
      for (const bool weights : {false, true}) {
        Store from(Spec(12, 20, preset, DType::kFp32), staging, weights);
        Store to(Spec(12, 20, preset, DType::kFp32), Staging::kDouble, weights);
        if (weights) std::memset(from->weights()->data(), 0, from->weights()->bytes());
        for (int64_t step = 1; step <= 3; ++step) {
          from.Compute(step, 0.5f + static_cast<float>(step));
          from.Commit(step);
        }
        const StateImage image = from->PinState();
        const auto targets = to->TargetsOf(image.state);
        ASSERT_TRUE(targets.ok()) << targets.status();
        ASSERT_EQ(targets->size(), image.spans.size());
        for (size_t i = 0; i < targets->size(); ++i) {
          ASSERT_EQ((*targets)[i].bytes, image.spans[i].bytes);
          std::memcpy((*targets)[i].data, image.spans[i].data, image.spans[i].bytes);
        }
        to->TakeState(image.state);
        EXPECT_EQ(to.Hash(), from.Hash()) << preset;
        EXPECT_EQ(to->figures().commits, 3);
        for (Store* store : {&from, &to}) {
          store->Compute(4, -1);
          store->Commit(4);
        }
        EXPECT_EQ(to.Hash(), from.Hash()) << preset;
      }
    }
  }
}

TEST(MatrixStoreTest, StateOfAnotherShapeIsRefused) {
  Store from(Spec(4, 6, "muon", DType::kFp32), Staging::kDouble);
  Store to(Spec(4, 8, "muon", DType::kFp32), Staging::kDouble);
  EXPECT_TRUE(to->TargetsOf(from->PinState().state).ok());  // nothing but zeros yet
  from.Compute(1, 1);
  from.Commit(1);
  const auto targets = to->TargetsOf(from->PinState().state);
  EXPECT_EQ(targets.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(targets.status().message().find("is 128 bytes"), absl::string_view::npos)
      << targets.status();
}

}  // namespace
}  // namespace stiefel
