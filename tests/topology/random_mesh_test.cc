// Random meshes: models cut in every way that client/topology.h knows, trained through servers in
// this process by one thread for each rank, equal one process that pushes the whole reduced
// gradient to one server. Also run under ThreadSanitizer. truth.h says why equality is demanded
// where it is.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "tests/inmemory/cluster.h"
#include "tests/model/scale.h"
#include "tests/topology/truth.h"

namespace stiefel::testing {
namespace {

using Values = std::vector<float>;

// A rank's gradient of one part of a parameter as it lies in its memory, in the wire's dtype. What
// pads it is not a number: a byte of it on a server would skip the step.
class LocalGradient {
 public:
  LocalGradient(const Truth& truth, const DrawnRun& run, size_t parameter, const Role& role,
                int32_t part, int64_t step)
      : bf16_(run.parameters[parameter].push_dtype == DType::kBf16) {
    for (const int64_t element : role.elements) {
      Add(truth.Gradient(parameter, role, part, step, element));
    }
    for (int i = 0; i < 5; ++i) Add(std::numeric_limits<float>::quiet_NaN());
  }
  TensorView View(const LocalBlock& at) const {
    return bf16_ ? at.View(halves_.data(), ElementType::kBf16)
                 : at.View(floats_.data(), ElementType::kFp32);
  }

 private:
  void Add(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    floats_.push_back(value);
    halves_.push_back(static_cast<uint16_t>(bits >> 16));
  }

  bool bf16_;
  Values floats_;
  std::vector<uint16_t> halves_;
};

struct Trained {
  std::vector<Values> weights;  // by parameter, in the order of the rank's own tensor
  std::vector<double> norms;    // by step
};

// What the rank hands over in a step, in an order of its own.
void PushStep(const DrawnRun& run, const Truth& truth, const BlocksOfOneRank& blocks, int64_t step,
              std::vector<LocalGradient>* memory, Trainer* trainer) {
  struct Push {
    int32_t block, part;
    const LocalGradient* gradient;
  };
  std::vector<Push> pushes;
  memory->reserve(run.parameters.size() * 3);  // kept where they are
  int32_t before = -1;
  for (size_t b = 0; b < blocks.push.size(); ++b) {
    const int32_t p = blocks.push_at[b].parameter;
    const Role& role = truth.RoleOf(blocks.rank, p);
    for (int32_t part = 0; p != before && part < run.spreads[p].parts; ++part) {
      memory->emplace_back(truth, run, p, role, part, step);
    }
    before = p;
    for (int32_t part = 0; part < run.spreads[p].parts; ++part) {
      pushes.push_back({static_cast<int32_t>(b), part,
                        &(*memory)[memory->size() - run.spreads[p].parts + part]});
    }
  }
  std::shuffle(pushes.begin(), pushes.end(), std::mt19937_64(run.seed * 31 + step + blocks.rank));
  for (const Push& push : pushes) {
    const LocalBlock& at = blocks.push_at[push.block];
    const int64_t rows = run.parameters[at.parameter].rows() / truth.Matrices(at.parameter);
    const int64_t matrix = blocks.push[push.block].rect.row_begin / rows;
    if (truth.Absent(at.parameter, truth.RoleOf(blocks.rank, at.parameter), push.part, step,
                     matrix)) {
      ASSERT_OK(trainer->PushAbsent(push.block, push.part));
    } else {
      ASSERT_OK(trainer->Push(push.block, push.gradient->View(at), push.part));
    }
  }
}

void TrainRank(const DrawnRun& run, const Truth& truth, MemoryCluster* cluster,
               const BlocksOfOneRank& blocks, Trained* trained) {
  SCOPED_TRACE(run.Describe());  // this is a thread of its own
  for (size_t p = 0; p < run.parameters.size(); ++p) {
    const Role& role = truth.RoleOf(blocks.rank, p);
    ASSERT_EQ(blocks.held[p].rows * blocks.held[p].cols, role.elements.size());
    Values& weights = trained->weights.emplace_back();
    for (const int64_t element : role.elements) weights.push_back(truth.InitialWeight(p, element));
  }
  TrainerOptions options = cluster->Options(blocks.rank, run.ranks());
  blocks.SetIn(&options);
  BePatient(&options);
  options.mode = run.mode;
  options.data_streams = 1;
  auto trainer = MustConnect(*cluster, options, run.parameters);
  ASSERT_NE(trainer, nullptr);
  const auto view = [&](const LocalBlock& at) {
    return at.MutableView(trained->weights[at.parameter].data(), ElementType::kFp32);
  };
  for (size_t b = 0; run.mode == UpdateMode::kWeights && b < blocks.push.size(); ++b) {
    ASSERT_OK(trainer->InitWeights(blocks.push[b].parameter, blocks.push[b].rect,
                                   view(blocks.push_at[b])));
  }
  for (int64_t step = 1; step <= kSteps; ++step) {
    StepOptions fields;
    fields.weight = run.WeightOf(blocks.rank);
    ASSERT_OK(trainer->Begin(step, fields));
    std::vector<LocalGradient> memory;
    ASSERT_NO_FATAL_FAILURE(PushStep(run, truth, blocks, step, &memory, trainer.get()));
    ASSERT_OK(trainer->EndPush());
    const auto outcome = trainer->Wait();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
    trained->norms.push_back(outcome->grad_norm);
    for (size_t b = 0; b < blocks.pull.size(); ++b) {
      ASSERT_OK(trainer->Apply(static_cast<int32_t>(b), view(blocks.pull_at[b])));
    }
    ASSERT_OK(trainer->Done());
  }
  ASSERT_OK(trainer->Close());
}

// The mesh's ranks, and the broadcasts of those that pull for others.
std::vector<Trained> TrainMesh(const DrawnRun& run, const Truth& truth) {
  std::vector<Trained> ranks(run.ranks());
  const auto blocks = BlocksOfMesh(run.mesh, run.parameters, run.spreads);
  EXPECT_TRUE(blocks.ok()) << blocks.status();
  if (!blocks.ok()) return ranks;
  MemoryCluster cluster(run.servers);
  RunRanks(run.ranks(),
           [&](int32_t rank) { TrainRank(run, truth, &cluster, (*blocks)[rank], &ranks[rank]); });
  if (::testing::Test::HasFailure()) return ranks;
  for (int32_t rank = 0; rank < run.ranks(); ++rank) {
    for (size_t p = 0; p < run.parameters.size(); ++p) {
      const int32_t puller = (*blocks)[rank].held[p].puller;
      EXPECT_EQ(truth.RoleOf(puller, p).elements, truth.RoleOf(rank, p).elements);
      ranks[rank].weights[p] = ranks[puller].weights[p];
    }
  }
  return ranks;
}

struct Whole {
  Trained trained;
  std::vector<bool> exact;  // by parameter
};

// One process, one server, nothing cut but stacks: their matrices may be absent one by one.
void TrainWhole(const DrawnRun& run, const Truth& truth, Whole* whole) {
  std::vector<ParameterSpec> parameters = run.parameters;
  MemoryCluster cluster(1);
  TrainerOptions options = cluster.Options(0, 1);
  BePatient(&options);
  options.mode = run.mode;
  for (size_t p = 0; p < parameters.size(); ++p) {
    ParameterSpec& spec = parameters[p];
    spec.pull_dtype = spec.pull_dtype.value_or(spec.push_dtype);
    spec.push_dtype = DType::kFp32;
    const int64_t rows = spec.rows() / truth.Matrices(p);
    for (int64_t m = 0; m < truth.Matrices(p); ++m) {
      options.push.push_back({spec.name, {m * rows, (m + 1) * rows, 0, spec.cols()}});
    }
    Values& weights = whole->trained.weights.emplace_back();
    for (int64_t e = 0; e < spec.rows() * spec.cols(); ++e) {
      weights.push_back(truth.InitialWeight(p, e));
    }
  }
  whole->exact.assign(parameters.size(), true);
  auto trainer = MustConnect(cluster, options, parameters);
  ASSERT_NE(trainer, nullptr);
  for (size_t p = 0; run.mode == UpdateMode::kWeights && p < parameters.size(); ++p) {
    ASSERT_OK(trainer->InitWeights(parameters[p].name, View(whole->trained.weights[p])));
  }
  for (int64_t step = 1; step <= kSteps; ++step) {
    ASSERT_OK(trainer->Begin(step));
    std::vector<std::optional<Reduced>> reduced;
    for (size_t p = 0; p < parameters.size(); ++p) {
      for (int64_t m = 0; m < truth.Matrices(p); ++m) {
        reduced.push_back(truth.Reduce(p, step, m));
        whole->exact[p] = whole->exact[p] && (!reduced.back() || reduced.back()->exact);
      }
    }
    for (size_t b = 0; b < reduced.size(); ++b) {
      const auto block = static_cast<int32_t>(b);
      ASSERT_OK(reduced[b] ? trainer->Push(block, View(reduced[b]->gradient))
                           : trainer->PushAbsent(block));
    }
    ASSERT_OK(trainer->EndPush());
    const auto outcome = trainer->Wait();
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    ASSERT_EQ(outcome->outcome, Outcome::kCommit) << outcome->reason;
    whole->trained.norms.push_back(outcome->grad_norm);
    std::vector<MutableTensorView> views;
    for (Values& w : whole->trained.weights) views.push_back(MutableView(&w));
    ASSERT_OK(trainer->ApplyAll(views));
    ASSERT_OK(trainer->Done());
  }
  ASSERT_OK(trainer->Close());
}

struct Comparison {
  int64_t bitwise = 0, rounded = 0;  // parameters
  double worst = 0;                  // of the rounded, as a part of the largest weight
  double moved = 1;                  // the least that any moved in the steps, likewise
};

void Compare(const DrawnRun& run, const Truth& truth, const Whole& whole,
             const std::vector<Trained>& ranks, Comparison* all) {
  for (size_t p = 0; p < run.parameters.size(); ++p) {
    const Values& expected = whole.trained.weights[p];
    ++(whole.exact[p] ? all->bitwise : all->rounded);
    double largest = 0, moved = 0;
    for (size_t e = 0; e < expected.size(); ++e) {
      largest = std::max<double>(largest, std::abs(expected[e]));
      moved = std::max<double>(moved, std::abs(expected[e] - truth.InitialWeight(p, e)));
    }
    if (moved > 0) all->moved = std::min(all->moved, moved / largest);  // else always absent
    for (int32_t rank = 0; rank < run.ranks(); ++rank) {
      const Role& role = truth.RoleOf(rank, p);
      for (size_t i = 0; i < role.elements.size(); ++i) {
        const float mine = ranks[rank].weights[p][i], theirs = expected[role.elements[i]];
        if (std::memcmp(&mine, &theirs, sizeof(mine)) == 0) continue;
        const double error = std::abs(static_cast<double>(mine) - theirs) / largest;
        if (!whole.exact[p]) all->worst = std::max(all->worst, error);
        ASSERT_TRUE(!whole.exact[p] && error <= 1e-6)
            << "rank " << rank << ", p" << p << " element " << role.elements[i] << ": " << mine
            << ", one process " << theirs << (whole.exact[p] ? ", must be equal" : "");
      }
    }
  }
  for (int64_t step = 0; step < kSteps; ++step) {
    const double norm = whole.trained.norms[step];
    EXPECT_NEAR(ranks[0].norms[step], norm, 1e-6 * norm) << "step " << step + 1;
  }
}

// Meshes at a time: most of one's time goes by until all its ranks have joined.
constexpr int32_t kLanes = 4;

void RunMesh(const DrawnRun& run, Comparison* comparison) {
  SCOPED_TRACE(run.Describe());
  const Truth truth(run);
  Whole whole;
  ASSERT_NO_FATAL_FAILURE(TrainWhole(run, truth, &whole));
  const std::vector<Trained> trained = TrainMesh(run, truth);
  if (::testing::Test::HasFailure()) return;
  Compare(run, truth, whole, trained, comparison);
}

TEST(RandomMeshTest, EqualsOneProcess) {
  const int64_t meshes = model::Scaled(200, 200);
  const auto draw = [](int64_t mesh) {
    return Draw(static_cast<uint64_t>(mesh + 1), model::FullScale());
  };
  const auto began = std::chrono::steady_clock::now();
  std::vector<Comparison> comparisons(meshes);
  RunRanks(kLanes, [&](int32_t lane) {
    for (int64_t mesh = lane; mesh < meshes && !HasFailure(); mesh += kLanes) {
      RunMesh(draw(mesh), &comparisons[mesh]);
    }
  });
  ASSERT_FALSE(HasFailure());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  StrategyCounts strategies;
  Comparison all;
  int64_t ranks = 0;
  for (int64_t mesh = 0; mesh < meshes; ++mesh) {
    const DrawnRun run = draw(mesh);
    strategies.Add(run);
    ranks += run.ranks();
    all.bitwise += comparisons[mesh].bitwise;
    all.rounded += comparisons[mesh].rounded;
    all.worst = std::max(all.worst, comparisons[mesh].worst);
    all.moved = std::min(all.moved, comparisons[mesh].moved);
  }
  std::printf(
      "%lld meshes, %lld ranks, %.1f s: %lld parameters bitwise equal to one process, %lld with a "
      "mean that rounds: error at most %.2g of the largest weight; all moved by at least %.2g of "
      "it\n",
      static_cast<long long>(meshes), static_cast<long long>(ranks), took.count(),
      static_cast<long long>(all.bitwise), static_cast<long long>(all.rounded), all.worst,
      all.moved);
  for (const auto& [name, count] : strategies.counts()) {
    std::printf("  %-24s in %lld meshes\n", name.c_str(), static_cast<long long>(count));
    if (meshes >= 200) {
      EXPECT_GE(count, 5) << name;
    }
  }
}

}  // namespace
}  // namespace stiefel::testing
