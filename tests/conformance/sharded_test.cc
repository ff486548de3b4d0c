// Shards against the fp64 reference of the whole matrix, and against each other.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "plan/cost.h"
#include "plan/shards.h"
#include "tests/conformance/differential.h"
#include "tests/conformance/option_cases.h"
#include "tests/conformance/sharded_matrix.h"
#include "tests/model/scale.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;
using Kind = CollectivePart::Kind;
using Ended = ShardedStep::Outcome;

// 1 to `most` shards, some of them a single row or column.
std::vector<int64_t> RandomCuts(int64_t rows, int64_t cols, int64_t most, std::mt19937_64* random) {
  const int64_t length = LongSide(rows, cols);
  const auto pick = [random](int64_t n) {
    return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n));
  };
  std::vector<int64_t> cuts;
  for (int64_t i = pick(most); i > 0 && length > 1; --i)
    cuts.push_back(1 + (pick(4) == 0 ? pick(std::min<int64_t>(3, length - 1)) : pick(length - 1)));
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  return cuts;
}

bool CanBeSharded(const Rule& rule, int64_t rows, int64_t cols) {
  return rule.family == RuleFamily::kSpectral && ValidateSharding(rule, rows, cols).ok();
}

StepUnderTest StepOf(ShardedMatrix* matrix) {
  return [matrix](const HostView& view, const StepArgs& args, const StepOptions& options) {
    return matrix->Step(view, args, options);
  };
}

HostView View(const Dense& g) { return {WholeGradient(g)}; }

// Figures, 8 bytes an element and the m x m matrices, within a page of the formula in the header.
void ExpectStatedWorkspace(const ShardedMatrix& matrix, const Rule& rule, int64_t rows,
                           int64_t cols) {
  const int64_t m = std::min(rows, cols);
  for (size_t i = 0; i < matrix.rects().size(); ++i) {
    const ShardedRule& own = matrix.rule(static_cast<int32_t>(i));
    const int64_t squares = own.Method().find("gram") != std::string::npos ? 6 : 3;
    const auto shards = static_cast<int64_t>(matrix.rects().size());
    EXPECT_LE(own.WorkspaceBytes(), 8 * matrix.rects()[i].Area() + 4 * squares * m * m + 16 * m +
                                        80 * shards + 8 * matrix.rects()[i].cols() + 1024)
        << DescribeRule(rule);
  }
}

template <typename T>
using ShardedTest = ConformanceTest<T>;
TYPED_TEST_SUITE(ShardedTest, BackendsUnderTest);

TYPED_TEST(ShardedTest, EveryCombinationOfOptionsAgreesWithTheReferenceOfTheWhole) {
  std::vector<OptionCase> cases;
  for (const OptionCase& c : AllOptionCases()) {
    if (CanBeSharded(c.rule, c.rows, c.cols)) cases.push_back(c);
  }
  const size_t all = cases.size();
  if (!model::FullScale()) cases = Sampled(std::move(cases), model::Scaled(200, 0), 12);
  std::mt19937_64 random(5);
  Agreement agreement;
  size_t cut = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const OptionCase& c = cases[i];
    const std::vector<int64_t> cuts = RandomCuts(c.rows, c.cols, 5, &random);
    cut += !cuts.empty();
    SCOPED_TRACE(DescribeRule(c.rule) + " in " + std::to_string(cuts.size() + 1) + " shards");
    ShardedMatrix matrix(this->backend_.get(), c.rule, c.rows, c.cols, cuts);
    ExpectStatedWorkspace(matrix, c.rule, c.rows, c.cols);
    CompareWithReference(StepOf(&matrix), c.rule, c.rows, c.cols, PhaseOf(c, i), 3, 1000 * i,
                         &agreement);
    if (this->HasFatalFailure()) return;
  }
  // Each was held to its own bound, which is that of the whole matrix: unscaled coefficients may
  // amplify beyond the 5e-4 that ALargeMatrixAgreesWithTheWhole holds.
  std::cout << cases.size() << " of " << all << " combinations of two options, " << cut
            << " of them cut\nlargest error " << agreement.worst_error
            << " of the largest entry, and " << agreement.worst << " of the tolerance, at "
            << agreement.where << "\n";
}

TYPED_TEST(ShardedTest, AwkwardShapesAgreeWithTheReferenceOfTheWhole) {
  std::mt19937_64 random(6);
  Agreement agreement;
  const std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 1},   {1, 17},  {17, 1},  {2, 2},
                                                           {13, 13}, {31, 97}, {97, 31}, {65, 66},
                                                           {70, 70}, {64, 200}};
  for (const auto& [rows, cols] : shapes) {
    for (const Rule& rule :
         {MakeRule("muon"), MakeRule("periodic_rowwise_muon", {{"row_axis", "short"}}),
          MakeRule("muon", {{"form", "standard"}}), MakeRule("turbo_muon"),
          MakeRule("muon", {{"coefficients", "polar_express"}})}) {
      if (!CanBeSharded(rule, rows, cols)) continue;
      // Random cuts, and every row or column a shard of its own.
      for (const int64_t most : {int64_t{5}, LongSide(rows, cols)}) {
        const std::vector<int64_t> cuts = most == 5
                                              ? RandomCuts(rows, cols, most, &random)
                                              : EvenCuts(rows, cols, std::min<int64_t>(most, 40));
        ShardedMatrix matrix(this->backend_.get(), rule, rows, cols, cuts);
        CompareWithReference(StepOf(&matrix), rule, rows, cols, 0, 3,
                             static_cast<uint64_t>(rows * cols), &agreement);
      }
    }
  }
  std::cout << "largest error " << agreement.worst_error << " of the largest entry\n";
}

// Zero matrices, rows of zeros and rank one.
TYPED_TEST(ShardedTest, DegenerateGradientsAreRightAndFinite) {
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{6, 20}, {20, 6}}) {
    std::vector<Dense> gradients = {Dense(rows, cols), RandomNormal(rows, cols, 1),
                                    RandomNormal(rows, cols, 2)};
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        if (i % 3 == 1 || j == 2) gradients[1](i, j) = 0;
        gradients[2](i, j) = static_cast<double>((i + 1) * (j % 5 - 2));
      }
    }
    for (const Dense& gradient : gradients) {
      for (const Rule& rule :
           {MakeRule("muon"), MakeRule("turbo_muon"), MakeRule("muon", {{"form", "standard"}}),
            MakeRule("periodic_rowwise_muon", {{"row_axis", "short"}, {"phase", "1"}}),
            MakeRule("periodic_rowwise_muon", {{"row_axis", "long"}, {"phase", "1"}})}) {
        ShardedMatrix matrix(this->backend_.get(), rule, rows, cols, {1, 9});
        ReferenceRule reference(rule, rows, cols);
        const StepArgs args = ArgsOf(rule, rule.phase, 1);
        const Outcome got = matrix.Step(View(gradient), args);
        EXPECT_TRUE(AllFinite(got.delta)) << DescribeRule(rule);
        EXPECT_LE(RelativeError(got.delta, reference.Step(gradient, args).delta), 5e-4)
            << DescribeRule(rule) << " " << rows << " x " << cols;
        EXPECT_EQ(got.result.nonfinite_update, 0);
      }
    }
  }
}

// 2 and 3 shards of 1024 x 4096, a refresh and a row-wise step, against the whole matrix in fp32.
TYPED_TEST(ShardedTest, ALargeMatrixAgreesWithTheWhole) {
  const int64_t rows = 256 * model::Scaled(4, 4), cols = 4 * rows;
  const Rule rule = MakeRule("periodic_rowwise_muon", {{"compute", "fp32"}});
  MatrixOnDevice whole(this->backend_.get(), rule, rows, cols);
  std::vector<std::unique_ptr<ShardedMatrix>> sharded;
  for (const std::vector<int64_t>& cuts :
       std::vector<std::vector<int64_t>>{{cols / 2}, {cols / 4 + 87, cols - 1096 * rows / 1024}})
    sharded.push_back(
        std::make_unique<ShardedMatrix>(this->backend_.get(), rule, rows, cols, cuts));
  for (int64_t step = 1; step <= 2; ++step) {
    const HostView view = View(Rounded(RandomNormal(rows, cols, static_cast<uint64_t>(step))));
    const StepArgs args = ArgsOf(rule, 0, step);
    const Dense want = ToDense(whole.Step(view, args).delta, rows, cols);
    for (const auto& matrix : sharded) {
      const double error = RelativeError(matrix->Step(view, args).delta, want);
      EXPECT_LE(error, 5e-4);
      std::cout << rows << " x " << cols << " in " << matrix->rects().size() << " shards, step "
                << step << ": largest error " << error << " of the largest entry\n";
    }
  }
}

TYPED_TEST(ShardedTest, BitsDoNotDependOnWhoRunsTheStagesNorOnStaging) {
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{70, 200}, {200, 70}}) {
    for (const Rule& rule :
         {MakeRule("muon"), MakeRule("periodic_rowwise_muon", {{"row_axis", "short"}}),
          MakeRule("muon", {{"form", "standard"}, {"normalise", "aol"}})}) {
      const std::unique_ptr<Backend> other = this->MakeBackend(3);
      ShardedMatrix one(this->backend_.get(), rule, rows, cols, {40, 90, 91}, {1, 3});
      ShardedMatrix many(this->backend_.get(), rule, rows, cols, {40, 90, 91}, {4, 17});
      ShardedMatrix lazy(other.get(), rule, rows, cols, {40, 90, 91}, {2, 99});
      std::vector<Outcome> of_one, of_many, of_lazy;
      for (int64_t step = 1; step <= 4; ++step) {
        const HostView view = View(RandomNormal(rows, cols, static_cast<uint64_t>(step)));
        const StepArgs args = ArgsOf(rule, 0, step);
        StepOptions options;
        options.delta_dtype = step % 2 == 0 ? DType::kBf16 : DType::kFp16;
        of_one.push_back(one.Step(view, args, options));
        of_many.push_back(many.Step(view, args, options));
        options.lazy = true;
        of_lazy.push_back(lazy.Step(view, args, options));
      }
      ExpectSame(of_one, of_many, DescribeRule(rule) + " threads");
      ExpectSame(of_one, of_lazy, DescribeRule(rule) + " lazy");
    }
  }
}

// A step whose round is run again, and WEIGHTS mode: as MatrixRule, staged outputs alone change.
TYPED_TEST(ShardedTest, WeightsModeDeliversWhatDeltaModeWould) {
  constexpr int64_t kRows = 30, kCols = 80;
  const Rule rule = MakeRule("muon", {{"weight_decay", "0.5"}});
  ShardedMatrix matrix(this->backend_.get(), rule, kRows, kCols, {33});
  const HostView view = View(RandomNormal(kRows, kCols, 4));
  const StepArgs args = ArgsOf(rule, 0, 1);
  StepOptions options;
  options.commit = false;
  const Outcome delta = matrix.Step(view, args, options);
  options.weights = std::vector<float>(kRows * kCols, 2.0f);
  const Outcome weights = matrix.Step(view, args, options);
  const auto decay = static_cast<float>(1 - args.lr * args.weight_decay);
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    EXPECT_EQ(weights.weights[i], decay * 2.0f + delta.delta[i]);
    EXPECT_NEAR(weights.payload[i], weights.weights[i], 0.01);
  }
  EXPECT_EQ(weights.state[0], std::vector<float>(kRows * kCols));
}

TYPED_TEST(ShardedTest, ExchangesWhatIsStated) {
  const auto exchanged = [&](const Rule& rule, int64_t rows, int64_t cols, StepKind kind) {
    ShardedMatrix matrix(this->backend_.get(), rule, rows, cols, {20, 50});
    StepArgs args = ArgsOf(rule, 0, 1);
    args.kind = kind;
    int64_t sums = 0, elsewhere = 0;
    for (const ShardedMatrix::Shard& shard :
         matrix.StepOfShards(View(RandomNormal(rows, cols, 1)), args)) {
      int64_t own = 0;
      for (const CollectivePart& part : shard.collectives) {
        if (part.kind == Kind::kSumFp32) {
          EXPECT_EQ(part.count, std::min(rows, cols) * std::min(rows, cols));
          ++own;
        } else {
          elsewhere = part.kind == Kind::kSumFp64 ? part.count * 8 : part.count;
        }
      }
      EXPECT_TRUE(sums == 0 || sums == own);
      sums = own;
    }
    if (kind == StepKind::kRefresh) {
      EXPECT_EQ(sums, matrix.rule(0).RefreshSums()) << DescribeRule(rule);
      EXPECT_EQ(sums, RefreshSums(rule, rows, cols, /*longest=*/30));
    }
    return std::make_pair(sums, elsewhere);
  };
  const Rule muon = MakeRule("muon");
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(exchanged(muon, 30, 80, StepKind::kRefresh), Pair(2, 80));
  EXPECT_EQ(exchanged(MakeRule("muon", {{"restarts", "1,3"}, {"form", "gram"}}), 80, 30,
                      StepKind::kRefresh),
            Pair(3, 80));
  EXPECT_EQ(exchanged(MakeRule("muon", {{"form", "standard"}}), 80, 30, StepKind::kRefresh),
            Pair(5, 80));
  EXPECT_EQ(exchanged(MakeRule("muon", {{"coefficients", "convergent"}, {"steps", "8"}}), 80, 30,
                      StepKind::kRefresh),
            Pair(8, 80));
  // Row-wise: rows lie within row shards; across column shards m norms and a count are summed.
  EXPECT_EQ(exchanged(muon, 80, 30, StepKind::kOffRefresh), Pair(0, 0));
  EXPECT_EQ(exchanged(muon, 30, 80, StepKind::kOffRefresh), Pair(0, 31 * 8));
  const Rule columns = MakeRule("periodic_rowwise_muon", {{"row_axis", "cols"}});
  EXPECT_EQ(exchanged(columns, 30, 80, StepKind::kOffRefresh), Pair(0, 0));
  EXPECT_EQ(exchanged(columns, 80, 30, StepKind::kOffRefresh), Pair(0, 31 * 8));
}

TYPED_TEST(ShardedTest, ANonFiniteShardEndsAllAfterTheFirstExchange) {
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{{20, 60}, {60, 20}}) {
    for (const StepKind kind : {StepKind::kRefresh, StepKind::kOffRefresh}) {
      const Rule rule = MakeRule("periodic_rowwise_muon");
      ShardedMatrix matrix(this->backend_.get(), rule, rows, cols, {10, 30});
      StepArgs args = ArgsOf(rule, 0, 1);
      args.kind = kind;
      Dense gradient = RandomNormal(rows, cols, 1);
      gradient(15, 15) = kind == StepKind::kRefresh ? NAN : INFINITY;  // in the second shard
      const auto shards = matrix.StepOfShards(View(gradient), args);
      for (size_t i = 0; i < shards.size(); ++i) {
        const StepResult& result = shards[i].outcome.result;
        EXPECT_EQ(result.nonfinite_gradient, i == 1 ? 1 : 0);
        EXPECT_EQ(result.nonfinite_update > 0, i == 1);
        // Rows that lie within shards are nobody else's business.
        const bool crosses = kind == StepKind::kRefresh || rows < cols;
        EXPECT_EQ(shards[i].ended, i == 1 || crosses ? Ended::kNonFinite : Ended::kComputed);
        EXPECT_EQ(shards[i].collectives.size(), crosses ? 1u : 0u);
        EXPECT_FALSE(result.newton_schulz);
      }
    }
  }
}

TYPED_TEST(ShardedTest, AnAbsentGradientIsZeroUnlessNoShardHasOne) {
  constexpr int64_t kRows = 20, kCols = 60;
  const Rule rule = MakeRule("periodic_rowwise_muon");
  for (const StepKind kind : {StepKind::kRefresh, StepKind::kOffRefresh}) {
    StepArgs args = ArgsOf(rule, 0, 2);
    args.kind = kind;
    ShardedMatrix matrix(this->backend_.get(), rule, kRows, kCols, {10, 30});
    ShardedMatrix zeros(this->backend_.get(), rule, kRows, kCols, {10, 30});
    const HostView first = View(RandomNormal(kRows, kCols, 1));
    matrix.Step(first, ArgsOf(rule, 0, 1));
    zeros.Step(first, ArgsOf(rule, 0, 1));
    for (const auto& shard : matrix.StepOfShards({}, args)) {
      EXPECT_EQ(shard.ended, Ended::kAbsent);
      EXPECT_EQ(shard.collectives.size(), 1u);
      EXPECT_EQ(shard.outcome.result.sum_squares, 0);
    }
    // Only the last shard has one: as if the others had zeros.
    Dense partly = RandomNormal(kRows, kCols, 2);
    for (int64_t i = 0; i < kRows; ++i) std::fill_n(&partly(i, 0), 30, 0.0);
    const Dense last = Block(partly, 0, 30, kRows, kCols - 30);
    const HostView view = {{{Rect{0, kRows, 30, kCols}, last.values}}};
    ExpectSame({matrix.Step(view, args)}, {zeros.Step(View(partly), args)}, "absent");
  }
  // Within the shards nothing is exchanged, and each is left as it is.
  StepArgs args = ArgsOf(rule, 0, 2);
  ShardedMatrix tall(this->backend_.get(), rule, kCols, kRows, {10, 30});
  const Outcome before = tall.Step(View(RandomNormal(kCols, kRows, 1)), ArgsOf(rule, 0, 1));
  for (const auto& shard : tall.StepOfShards({}, args)) EXPECT_EQ(shard.ended, Ended::kAbsent);
  StepOptions options;
  options.commit = false;
  EXPECT_EQ(tall.Step({}, args, options).state, before.state);
}

TYPED_TEST(ShardedTest, CreateAndBeginRefuseWhatDoesNotFit) {
  Backend* const backend = this->backend_.get();
  const auto why = [&](const Rule& rule, const ShardOf& shard) {
    const auto made = ShardedRule::Create(rule, shard, backend);
    EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(made.status().message());
  };
  const Rule muon = MakeRule("muon");
  EXPECT_THAT(why(MakeRule("adamw"), {8, 4, 0, {3}}), HasSubstr("element-wise"));
  EXPECT_THAT(why(MakeRule("normuon"), {8, 4, 0, {3}}), HasSubstr("row variance"));
  EXPECT_THAT(why(muon, {8, 4, 0, {8}}), HasSubstr("8 x 4"));
  EXPECT_THAT(why(muon, {8, 4, 2, {3}}), HasSubstr("shard 2 of a 8 x 4 matrix in 2 shards"));
  EXPECT_THAT(why(muon, {0, 4, 0, {}}), HasSubstr("0"));

  const auto rule = std::move(ShardedRule::Create(muon, {8, 4, 1, {3}}, backend)).value();
  MatrixMemory memory(backend, rule->State(), 5, 4, rule->WorkspaceBytes());
  const auto step = memory.Begin(View(RandomNormal(5, 4, 1)), {}, std::nullopt);
  const auto begin = [&](const StepArgs& args, DeviceBuffer* workspace) {
    StepResult result;
    return rule->Begin(step->gradient, args, step->buffers, workspace, &result).status();
  };
  StepArgs args = ArgsOf(muon, 0, 1);
  EXPECT_TRUE(begin(args, memory.workspace()).ok());
  DeviceBuffer small = *backend->Allocate(rule->WorkspaceBytes() - 64);
  EXPECT_THAT(std::string(begin(args, &small).message()), HasSubstr("workspace"));
  args.clip_scale = NAN;
  EXPECT_THAT(std::string(begin(args, memory.workspace()).message()), HasSubstr("clip_scale"));
  args.clip_scale = 1;
  step->gradient.pieces[0].rect.row_end = 6;
  EXPECT_EQ(begin(args, memory.workspace()).code(), absl::StatusCode::kInvalidArgument);
}

// |O O^T - I|_F / sqrt(m) from m x m matrices agrees with that of O itself.
TYPED_TEST(ShardedTest, ReportsTheResidualOfTheWhole) {
  constexpr int64_t kRows = 12, kCols = 40;  // all rows are sampled
  for (const char* form : {"gram", "standard"}) {
    const Rule rule = MakeRule("muon", {{"form", form}, {"scale", "none"}});
    ShardedMatrix matrix(this->backend_.get(), rule, kRows, kCols, {7, 20});
    StepArgs args = ArgsOf(rule, 0, 1);
    args.lr = 1;
    const Outcome got = matrix.Step(View(RandomNormal(kRows, kCols, 8)), args);
    const Dense o = ToDense(got.delta, kRows, kCols);
    Dense gram = Multiply(o, Transpose(o));
    for (int64_t i = 0; i < kRows; ++i) gram(i, i) -= 1;
    EXPECT_NEAR(got.result.residual, FrobeniusNorm(gram) / std::sqrt(kRows), 1e-5) << form;
  }
}

}  // namespace
}  // namespace stiefel
