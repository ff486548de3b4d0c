#include "cli/apply_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "cli/tensor_files.h"
#include "kernels/reference/dense.h"

namespace stiefel {
namespace {

using ::testing::HasSubstr;

TestTensor Random(const std::string& name, const std::vector<int64_t>& shape, uint64_t seed,
                  const std::string& dtype = "F32") {
  int64_t elements = 1;
  for (int64_t size : shape) elements *= size;
  return {name, dtype, shape, RandomNormal(1, elements, seed).values};
}

class ApplyCommandTest : public ::testing::Test {
 protected:
  ApplyCommandTest() : folder_(TestFolder()) {}

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  // As main does: parses the line, runs the command. What it prints goes to output_.
  absl::Status Run(std::vector<std::string> arguments) {
    CLI::App app;
    absl::Status result;
    AddApplyCommand(&app, &result);
    arguments.push_back("apply");
    // CLI11 takes them last first; the sub-command is the first.
    std::reverse(arguments.begin(), arguments.end() - 1);
    testing::internal::CaptureStdout();
    try {
      app.parse(arguments);
    } catch (const CLI::ParseError& error) {
      result = absl::InvalidArgumentError(error.what());
    }
    output_ = testing::internal::GetCapturedStdout();
    return result;
  }

  // Runs on this gradient file; OUT is `out`.
  absl::Status Apply(const std::string& out, const std::vector<std::string>& more,
                     const std::string& grads = "g") {
    std::vector<std::string> arguments = {"--grads", Path(grads), "--out", Path(out)};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Run(arguments);
  }

  std::map<std::string, TestTensor> Result(const std::string& out) const {
    return ReadTensors(Path(out));
  }

  const std::string folder_;
  std::string output_;
};

// The largest difference of two tensors, over the largest entry of the second.
double RelativeError(const TestTensor& a, const TestTensor& b) {
  const Dense x(1, static_cast<int64_t>(a.values.size()), a.values);
  const Dense y(1, static_cast<int64_t>(b.values.size()), b.values);
  EXPECT_EQ(a.shape, b.shape);
  if (a.shape != b.shape || MaxAbs(y) == 0) return MaxAbs(x);
  return MaxAbs(Combine(1, x, -1, y)) / MaxAbs(y);
}

// A model with everything in it.
const std::vector<std::string> kMixedRules = {"--preset=muon",
                                              "--rule=*bias:adamw",
                                              "--rule=qkv:cmuon,splits=8,8,8",
                                              "--rule=up:dion3",
                                              "--rule=down:periodic_rowwise_muon,phase=1",
                                              "--stack-dims=1",
                                              "--stack-dims=conv:0"};

std::vector<TestTensor> MixedGradients(int64_t steps) {
  std::vector<TestTensor> tensors;
  uint64_t seed = 1;
  for (int64_t step = 1; step <= steps; ++step) {
    const std::string end = absl::StrCat("/step", step);
    tensors.push_back(Random("w" + end, {20, 30}, seed++, "F64"));
    tensors.push_back(Random("bias" + end, {30}, seed++, "BF16"));
    tensors.push_back(Random("qkv" + end, {24, 16}, seed++));
    tensors.push_back(Random("up" + end, {32, 12}, seed++, "F16"));
    tensors.push_back(Random("down" + end, {12, 32}, seed++));
    tensors.push_back(Random("experts" + end, {3, 10, 14}, seed++));
    tensors.push_back(Random("conv" + end, {8, 3, 2, 2}, seed++));
  }
  return tensors;
}

TEST_F(ApplyCommandTest, CpuAgreesWithTheReferenceOnAMixedModel) {
  WriteTensors(Path("g"), MixedGradients(4));
  std::vector<std::string> arguments = kMixedRules;
  arguments.push_back("--backend=reference");
  absl::Status status = Apply("reference", arguments);
  ASSERT_TRUE(status.ok()) << status;
  status = Apply("cpu", kMixedRules);
  ASSERT_TRUE(status.ok()) << status;
  const auto wanted = Result("reference"), got = Result("cpu");
  ASSERT_EQ(got.size(), wanted.size());
  int deltas = 0, states = 0;
  for (const auto& [name, tensor] : wanted) {
    ASSERT_EQ(got.count(name), 1u) << name;
    EXPECT_EQ(tensor.dtype, "F64");
    EXPECT_EQ(got.at(name).dtype, "F32");
    EXPECT_LE(RelativeError(got.at(name), tensor), 2e-5) << name;
    ++(name.rfind("state/", 0) == 0 ? states : deltas);
  }
  EXPECT_EQ(deltas, 7 * 4);
  // One momentum each, the variance of adamw, and selected and row_variance of dion3.
  EXPECT_EQ(states, 7 + 1 + 2);
  EXPECT_EQ(wanted.at("state/experts/momentum").shape, (std::vector<int64_t>{3, 10, 14}));
  EXPECT_EQ(wanted.at("state/up/row_variance").shape, (std::vector<int64_t>{32, 1}));
}

TEST_F(ApplyCommandTest, NeitherThreadsNorCompanyChangeABit) {
  const std::vector<TestTensor> all = MixedGradients(3);
  WriteTensors(Path("g"), all);
  for (const char* backend : {"cpu", "reference"}) {
    std::vector<std::string> arguments = kMixedRules;
    arguments.push_back(absl::StrCat("--backend=", backend));
    arguments.push_back("--overwrite");
    arguments.push_back("--threads=1");
    ASSERT_TRUE(Apply("one", arguments).ok());
    arguments.back() = "--threads=3";
    ASSERT_TRUE(Apply("three", arguments).ok());
    EXPECT_EQ(FileBytes(Path("one")), FileBytes(Path("three"))) << backend;

    std::vector<TestTensor> alone;
    for (const TestTensor& tensor : all) {
      if (tensor.name.rfind("w/", 0) == 0) alone.push_back(tensor);
    }
    WriteTensors(Path("alone"), alone);
    const absl::Status status =
        Apply("w", {"--preset=muon", absl::StrCat("--backend=", backend), "--overwrite"}, "alone");
    ASSERT_TRUE(status.ok()) << status;
    const auto together = Result("one");
    for (const auto& [name, tensor] : Result("w")) {
      EXPECT_EQ(tensor.values, together.at(name).values) << name;
    }
  }
}

TEST_F(ApplyCommandTest, AStackIsItsMatrices) {
  const TestTensor stack = Random("e", {3, 10, 14}, 5);
  std::vector<TestTensor> apart;
  for (int64_t i = 0; i < 3; ++i) {
    apart.push_back({absl::StrCat("e", i),
                     "F32",
                     {10, 14},
                     {stack.values.begin() + i * 140, stack.values.begin() + (i + 1) * 140}});
  }
  WriteTensors(Path("stacked"), {stack});
  WriteTensors(Path("apart"), apart);
  ASSERT_TRUE(Apply("a", {"--preset=normuon", "--steps=2", "--stack-dims=1"}, "stacked").ok());
  ASSERT_TRUE(Apply("b", {"--preset=normuon", "--steps=2"}, "apart").ok());
  const auto a = Result("a"), b = Result("b");
  for (const char* step : {"/step1", "/step2"}) {
    std::vector<double> joined;
    for (int64_t i = 0; i < 3; ++i) {
      const auto& values = b.at(absl::StrCat("e", i, step)).values;
      joined.insert(joined.end(), values.begin(), values.end());
    }
    EXPECT_EQ(a.at(absl::StrCat("e", step)).values, joined);
  }
  EXPECT_EQ(a.at("state/e/row_variance").shape, (std::vector<int64_t>{3, 10, 1}));
}

TEST_F(ApplyCommandTest, WeightsFollowTheDeltas) {
  const std::vector<TestTensor> gradients = {Random("w/step1", {6, 4}, 1),
                                             Random("w/step2", {6, 4}, 2)};
  WriteTensors(Path("g"), gradients);
  const TestTensor weights = Random("w", {6, 4}, 3, "BF16");
  WriteTensors(Path("weights"), {weights, Random("other", {2}, 4)});
  const auto start = Result("weights").at("w");
  for (const char* backend : {"cpu", "reference"}) {
    ASSERT_TRUE(Apply("out", {"--preset=muon_torch", "--weights", Path("weights"), "--overwrite",
                              absl::StrCat("--backend=", backend)})
                    .ok());
    const auto out = Result("out");
    TestTensor expected = start;
    for (const char* step : {"w/step1", "w/step2"}) {
      for (size_t i = 0; i < expected.values.size(); ++i) {
        expected.values[i] = (1 - 1e-3 * 0.1) * expected.values[i] + out.at(step).values[i];
      }
    }
    EXPECT_LE(RelativeError(out.at("weights/w"), expected), 1e-6) << backend;
  }
}

TEST_F(ApplyCommandTest, PoloraPairsStepTogether) {
  std::vector<TestTensor> gradients;
  for (int64_t step = 1; step <= 3; ++step) {
    gradients.push_back(Random(absl::StrCat("q.A/step", step), {4, 12}, 10 + step));
    gradients.push_back(Random(absl::StrCat("q.B/step", step), {9, 4}, 20 + step));
  }
  WriteTensors(Path("g"), gradients);
  TestTensor b = Random("q.B", {9, 4}, 3);
  WriteTensors(Path("weights"), {Random("q.A", {4, 12}, 2), b});
  const std::vector<std::string> pair = {"--preset=polora",    "--set=q.A:pair=q.B",
                                         "--set=q.B:pair=q.A", "--overwrite",
                                         "--weights",          Path("weights")};
  std::vector<std::string> arguments = pair;
  arguments.push_back("--backend=reference");
  absl::Status status = Apply("reference", arguments);
  ASSERT_TRUE(status.ok()) << status;
  status = Apply("cpu", pair);
  ASSERT_TRUE(status.ok()) << status;
  const auto wanted = Result("reference"), got = Result("cpu");
  for (const auto& [name, tensor] : wanted) {
    EXPECT_LE(RelativeError(got.at(name), tensor), 1e-3) << name;
  }
  EXPECT_EQ(wanted.count("weights/q.A"), 1u);
  EXPECT_EQ(wanted.count("state/q.B/factor_variance"), 1u);

  // B = 0, as adapters start: A stands still in the first step, and nothing becomes NaN.
  b.values.assign(b.values.size(), 0.0);
  WriteTensors(Path("weights"), {Random("q.A", {4, 12}, 2), b});
  status = Apply("zero", pair);
  ASSERT_TRUE(status.ok()) << status;
  const auto zero = Result("zero");
  EXPECT_EQ(zero.at("q.A/step1").values, std::vector<double>(4 * 12, 0.0));
  EXPECT_NE(zero.at("q.B/step1").values, std::vector<double>(9 * 4, 0.0));
  EXPECT_NE(zero.at("q.A/step3").values, std::vector<double>(4 * 12, 0.0));

  status = Apply("none", {"--preset=polora", "--set=q.A:pair=q.B", "--set=q.B:pair=q.A"});
  EXPECT_THAT(std::string(status.message()), HasSubstr("polora reads weights: give --weights"));
}

TEST_F(ApplyCommandTest, ReportsWhatItDid) {
  WriteTensors(Path("g"), MixedGradients(2));
  std::vector<std::string> arguments = kMixedRules;
  arguments.insert(arguments.end(), {"--json", "--explain"});
  ASSERT_TRUE(Apply("out", arguments).ok());
  const auto report = nlohmann::json::parse(output_);
  EXPECT_EQ(report["backend"], "cpu");
  EXPECT_EQ(report["totals"]["matrices"], 9);
  ASSERT_EQ(report["parameters"].size(), 7);
  std::map<std::string, nlohmann::json> by_name;
  for (const auto& p : report["parameters"]) by_name[p["name"]] = p;
  const auto& w = by_name["w"]["steps"][1];
  EXPECT_EQ(w["step"], 2);
  EXPECT_EQ(w["kind"], "refresh");
  EXPECT_GT(w["residual"].get<double>(), 0);
  EXPECT_GE(w["singular_values"]["min"].get<double>(), 0.3);
  EXPECT_LE(w["singular_values"]["max"].get<double>(), 1.2);
  EXPECT_TRUE(w["singular_values"]["exact"].get<bool>());
  // s = 1 of 20 x 30: the RMS of O is that of its 20 singular values over 30 columns.
  EXPECT_NEAR(w["update_rms"].get<double>(), 0.9 / std::sqrt(30.0), 0.05);
  EXPECT_NEAR(w["delta_max"].get<double>(),
              MaxAbs(Dense(1, 600, Result("out").at("w/step2").values)), 1e-12);
  EXPECT_EQ(by_name["bias"]["steps"][0]["kind"], "element_wise");
  EXPECT_TRUE(by_name["bias"]["steps"][0]["singular_values"].is_null());
  EXPECT_TRUE(by_name["bias"]["steps"][0]["residual"].is_null());
  EXPECT_EQ(by_name["down"]["steps"][0]["kind"], "row_wise");
  EXPECT_EQ(by_name["down"]["steps"][1]["kind"], "refresh");
  EXPECT_EQ(by_name["experts"]["matrices"], 3);
  EXPECT_THAT(by_name["qkv"]["explanation"].get<std::string>(), HasSubstr("8 x 16"));

  arguments = kMixedRules;
  arguments.insert(arguments.end(), {"--backend=reference", "--explain"});
  ASSERT_TRUE(Apply("out2", arguments).ok());
  for (const char* part :
       {"qkv (24 x 16): cmuon splits=8,8,8", "experts (3 of 10 x 14): muon",
        "down (12 x 32): periodic_rowwise_muon phase=1", "(t-1) mod 3 == 1", "sv median",
        "all: 7 parameters, 9 matrices", "largest residual", "reference (fp64"}) {
    EXPECT_THAT(output_, HasSubstr(part));
  }
}

TEST_F(ApplyCommandTest, RefusesWithTheReasonAndWritesNothing) {
  TestTensor bad = Random("w", {3, 4}, 1);
  WriteTensors(Path("good"), {bad});
  bad.values[5] = NAN;
  bad.values[11] = INFINITY;
  WriteTensors(Path("nonfinite"), {bad});
  WriteTensors(Path("large"), {{"w", "F64", {1, 2}, {1, 1e39}}});
  WriteTensors(Path("holes"), {Random("w/step1", {3, 4}, 1), Random("w/step3", {3, 4}, 2)});
  WriteTensors(Path("other"), {Random("w", {4, 3}, 1)});
  WriteTensors(Path("late"),
               {Random("w/step1", {3, 4}, 1), {"w/step2", "F32", {3, 4}, bad.values}});
  std::ofstream(Path("text")) << "this is no safetensors file";
  std::ofstream(Path("there")) << "mine";
  const struct {
    std::string grads, out;
    std::vector<std::string> more;
    absl::StatusCode code;
    const char* part;
  } cases[] = {
      {"good", "out", {"--preset=moun"}, absl::StatusCode::kInvalidArgument, "muon"},
      {"good", "out", {}, absl::StatusCode::kInvalidArgument, "w has no rule"},
      {"good",
       "out",
       {"--preset=muon", "--backend=gpu"},
       absl::StatusCode::kInvalidArgument,
       "--backend=gpu is neither cpu nor reference"},
      {"good",
       "out",
       {"--preset=muon", "--steps=0"},
       absl::StatusCode::kInvalidArgument,
       "--steps=0 is outside"},
      {"good",
       "out",
       {"--preset=muon", "--threads=-1"},
       absl::StatusCode::kInvalidArgument,
       "--threads=-1 is outside"},
      {"good",
       "good",
       {"--preset=muon", "--overwrite"},
       absl::StatusCode::kInvalidArgument,
       "is the input"},
      {"holes",
       "out",
       {"--preset=muon"},
       absl::StatusCode::kInvalidArgument,
       "w has step 3 but not step 2"},
      {"nonfinite",
       "out",
       {"--preset=muon"},
       absl::StatusCode::kInvalidArgument,
       "w: 2 of 12 elements are not finite, first at [1, 1]"},
      {"late",
       "out",
       {"--preset=muon"},
       absl::StatusCode::kInvalidArgument,
       "w/step2: 2 of 12 elements are not finite"},
      {"large", "out", {"--preset=muon"}, absl::StatusCode::kInvalidArgument, "not finite in fp32"},
      {"none", "out", {"--preset=muon"}, absl::StatusCode::kNotFound, "none"},
      {"text",
       "out",
       {"--preset=muon"},
       absl::StatusCode::kInvalidArgument,
       "Is it a safetensors file?"},
      {"good", "there", {"--preset=muon"}, absl::StatusCode::kAlreadyExists, "there exists"},
      {"good", "no/folder/out", {"--preset=muon"}, absl::StatusCode::kNotFound, "no/folder/out"},
      {"good",
       "out",
       {"--preset=muon", "--weights", Path("other")},
       absl::StatusCode::kInvalidArgument,
       "w is [4, 3], its gradient [3, 4]"},
      {"good",
       "out",
       {"--preset=muon", "--weights", Path("holes")},
       absl::StatusCode::kInvalidArgument,
       "no weights of w"},
      {"good",
       "out",
       {"--preset=muon", "--weights", Path("nonfinite")},
       absl::StatusCode::kInvalidArgument,
       "w: 2 of 12 elements are not finite"},
  };
  const auto files = [&] {
    return std::distance(std::filesystem::directory_iterator(folder_), {});
  };
  const auto before = files();
  for (const auto& c : cases) {
    const absl::Status status = Apply(c.out, c.more, c.grads);
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.part));
    EXPECT_EQ(output_, "");
    EXPECT_EQ(files(), before) << c.part;
  }
  EXPECT_EQ(FileBytes(Path("there")), "mine");
  EXPECT_TRUE(Apply("there", {"--preset=muon", "--overwrite"}, "good").ok());
  EXPECT_EQ(Result("there").count("w"), 1u);
  // What fp32 cannot hold, the reference can.
  EXPECT_TRUE(Apply("out", {"--preset=muon", "--backend=reference"}, "large").ok());
}

}  // namespace
}  // namespace stiefel
