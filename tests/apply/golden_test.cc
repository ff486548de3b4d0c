// Every golden sequence (docs/mathematics.md, section 7) through the program, files in and files
// out.
#include "tests/vectors/golden.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>

#include "absl/strings/str_cat.h"
#include "cli/tensor_files.h"
#include "kernels/reference/dense.h"

namespace stiefel {
namespace {

struct Finished {
  int code = -1;
  std::string output;  // of both streams
};

// Runs the program. REQUIRES: arguments without quotes.
Finished Ctl(const std::string& arguments) {
  Finished finished;
  std::FILE* pipe = popen(absl::StrCat("cli/stiefelctl ", arguments, " 2>&1").c_str(), "r");
  if (pipe == nullptr) return finished;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    finished.output.append(buffer, n);
  }
  const int status = pclose(pipe);
  if (WIFEXITED(status)) finished.code = WEXITSTATUS(status);
  return finished;
}

// How a user asks for the rule of a golden case.
std::string RuleArguments(const std::string& name) {
  static const std::map<std::string, std::string> special = {
      {"periodic_rowwise_muon_phase1", "--preset periodic_rowwise_muon --set phase=1"},
      {"himuon_tile4", "--preset himuon --set tile=4"},
      {"samuon_lite_g5", "--preset samuon_lite --set gain=5"}};
  const auto found = special.find(name);
  return found != special.end() ? found->second : absl::StrCat("--preset ", name);
}

// The quarters of the golden gradients are exact in every dtype.
std::vector<TestTensor> Gradients(const GoldenCase& golden, const std::string& dtype) {
  std::vector<TestTensor> tensors;
  for (size_t s = 0; s < golden.deltas.size(); ++s) {
    const Dense g = GoldenGradient(static_cast<int64_t>(s), golden.rows, golden.cols);
    tensors.push_back({absl::StrCat("layer.0/w/step", s + 1), dtype, {g.rows, g.cols}, g.values});
  }
  return tensors;
}

TEST(ApplyGolden, EveryCaseOnBothBackends) {
  const std::string folder = TestFolder();
  const std::string grads = folder + "/grads", out = folder + "/out";
  const char* dtypes[] = {"F64", "F32", "F16", "BF16"};
  int runs = 0;
  double worst_reference = 0, worst_cpu = 0;
  for (const GoldenCase& golden : GoldenCases()) {
    for (const std::string backend : {"reference", "cpu"}) {
      WriteTensors(grads, Gradients(golden, dtypes[runs % 4]));
      ++runs;
      const Finished finished =
          Ctl(absl::StrCat("apply ", RuleArguments(golden.name), " --grads ", grads, " --out ", out,
                           " --overwrite --threads 2 --backend ", backend));
      ASSERT_EQ(finished.code, 0) << golden.name << "\n" << finished.output;
      const auto written = ReadTensors(out);
      for (size_t s = 0; s < golden.deltas.size(); ++s) {
        const auto delta = written.find(absl::StrCat("layer.0/w/step", s + 1));
        ASSERT_NE(delta, written.end()) << golden.name;
        EXPECT_EQ(delta->second.dtype, backend == "cpu" ? "F32" : "F64");
        ASSERT_EQ(delta->second.shape, (std::vector<int64_t>{golden.rows, golden.cols}));
        const Dense got(golden.rows, golden.cols, delta->second.values);
        const double error = MaxAbs(Combine(1, got, -1, golden.deltas[s]));
        const double largest = MaxAbs(golden.deltas[s]);
        double& worst = backend == "cpu" ? worst_cpu : worst_reference;
        worst = std::max(worst, backend == "cpu" ? error / largest : error);
        EXPECT_LE(error, backend == "cpu" ? 2e-5 * largest : 1e-12)
            << golden.name << " " << golden.rows << " x " << golden.cols << " step " << s + 1
            << " on " << backend;
      }
    }
  }
  std::cout << runs << " runs; reference: " << worst_reference << " absolute; cpu: " << worst_cpu
            << " of the largest delta\n";
  EXPECT_EQ(runs, 2 * 26);
}

TEST(ApplyProgram, AnErrorIsExitCodeOneAndLeavesNoFile) {
  const std::string folder = TestFolder();
  WriteTensors(folder + "/grads",
               {{"w/step1", "F32", {1, 2}, {1, 2}}, {"w/step3", "F32", {1, 2}, {1, 2}}});
  const Finished finished =
      Ctl(absl::StrCat("apply --preset muon --grads ", folder, "/grads --out ", folder, "/out"));
  EXPECT_EQ(finished.code, 1);
  EXPECT_NE(finished.output.find("w has step 3 but not step 2"), std::string::npos)
      << finished.output;
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
}

}  // namespace
}  // namespace stiefel
