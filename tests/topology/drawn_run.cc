#include "tests/topology/drawn_run.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace stiefel::testing {
namespace {

class Drawer {
 public:
  Drawer(uint64_t seed, bool large) : random_(seed), large_(large) { run_.seed = seed; }

  DrawnRun Run() {
    run_.servers = Int(1, 3);
    if (Chance(30)) run_.mode = UpdateMode::kWeights;
    DrawMesh();
    if (Chance(40)) {
      run_.weighted_dim = run_.mesh[Int(0, run_.mesh.size() - 1)].name;
      for (int64_t c = 0; c < run_.SizeOf(run_.weighted_dim); ++c) {
        run_.dim_weights.push_back(std::ldexp(1.0, Int(-1, 2)));
      }
    }
    const int count = Int(3, large_ ? 9 : 5);
    for (int p = 0; p < count; ++p) AddParameter(p);
    return std::move(run_);
  }

 private:
  int64_t Int(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool Chance(int percent) { return Int(0, 99) < percent; }

  void DrawMesh() {
    std::vector<std::string> names = {"dp", "pp", "tp", "ep", "cp"};
    std::shuffle(names.begin(), names.end(), random_);
    const int dims = Int(1, 3);
    int64_t left = 12;
    for (int d = 0; d < dims; ++d) {
      const int64_t size = Int(d == 0 ? 2 : 1, std::min<int64_t>(left, dims == 1 ? 12 : 4));
      run_.mesh.push_back({names[d], size});
      left /= size;
    }
  }

  void AddParameter(int index) {
    ParameterSpec parameter;
    parameter.name = absl::StrCat("p", index);
    const int64_t most = large_ ? 40 : 14;
    const int64_t rows = Int(2, most), cols = Int(2, most);
    splits_.clear();
    switch (Int(0, 5)) {
      case 0:
        parameter.shape = {Int(1, 3 * most)};
        break;
      case 1:
        parameter.shape = {Int(1, 5), Int(2, 9), Int(2, 9)};
        parameter.stack_dims = 1;
        break;
      case 2:
        parameter.shape = {Int(2, 9), Int(2, 4), 2, Int(1, 2)};
        parameter.stack_dims = 0;
        break;
      case 3:
        splits_ = {Int(2, 8), Int(1, 4), Int(1, 4)};
        parameter.shape = {splits_[0] + splits_[1] + splits_[2]};
        if (Chance(70)) parameter.shape.push_back(cols);
        break;
      default:
        parameter.shape = {rows, cols};
        break;
    }
    parameter.rule = DrawRule(parameter.shape.size());
    parameter.group = 0;
    parameter.push_dtype = Chance(50) ? DType::kBf16 : DType::kFp32;
    if (Chance(25)) parameter.reduce = Reduce::kSum;
    ParameterSpread spread;
    for (const MeshDim& dim : run_.mesh) {
      spread.dims.push_back({dim.name, DrawSpread(parameter, dim, spread)});
    }
    std::shuffle(spread.dims.begin(), spread.dims.end(), random_);
    if (Chance(25)) spread.parts = Int(2, 3);
    // A mean over several ranks may round; a delta in bf16 would then differ by a unit of bf16.
    bool averages = false;
    for (const DimSpread& over : spread.dims) {
      averages = averages || over.spread.gradients == Gradients::kOwn;
    }
    if (averages || Chance(30)) parameter.pull_dtype = DType::kFp32;
    run_.parameters.push_back(std::move(parameter));
    run_.spreads.push_back(std::move(spread));
    run_.may_be_absent.push_back(Chance(35));
  }

  // Rules whose result is a smooth function of the gradient, or of its signs.
  Rule DrawRule(size_t dimensions) {
    const std::vector<std::string> elementwise = {"adamw", "lion", "sgd"};
    const std::vector<std::string> spectral = {"muon", "periodic_rowwise_muon", "normuon",
                                               "muon_moonlight"};
    const bool matrix = dimensions > 1 && Chance(70);
    Rule rule = *PresetRule(matrix ? !splits_.empty() ? "cmuon" : spectral[Int(0, 3)]
                                   : elementwise[Int(0, 2)]);
    std::vector<std::pair<std::string, std::string>> options = {{"lr", matrix ? "0.01" : "0.02"}};
    if (Chance(50)) options.emplace_back("weight_decay", "0.125");
    if (rule.family == RuleFamily::kSgd && Chance(50)) options.emplace_back("beta", "0.75");
    if (rule.preset == "cmuon") options.emplace_back("splits", absl::StrJoin(splits_, ","));
    for (const auto& [key, value] : options) {
      if (!SetOption(rule, key, value).ok()) std::abort();
    }
    return rule;
  }

  Cut DrawCut(int64_t length, int64_t parts, bool first) {
    Cut cut;
    if (Chance(30)) cut.mode = CutMode::kBalanced;
    if (first && Chance(20)) {
      int64_t left = length;
      for (int64_t k = 0; k + 1 < parts; ++k) {
        cut.sizes.push_back(Int(0, left));
        left -= cut.sizes.back();
      }
      cut.sizes.push_back(left);
    }
    return cut;
  }

  // Sizes are drawn for the whole axis, so only where nothing else can cut it.
  Spread DrawSpread(const ParameterSpec& parameter, const MeshDim& dim, const ParameterSpread& so) {
    const bool first = so.dims.empty() && run_.mesh.size() == 1;
    const size_t stack = static_cast<size_t>(parameter.stack_dims.value_or(0));
    Spread spread;
    const int kind = Int(0, 9);
    std::vector<int64_t> coordinates;
    for (int64_t c = 0; c < dim.size; ++c) coordinates.push_back(c);
    if (Chance(20)) {
      std::shuffle(coordinates.begin(), coordinates.end(), random_);
      coordinates.resize(Int(1, std::min<int64_t>(2, dim.size)));
    }
    const auto parts = static_cast<int64_t>(coordinates.size());
    if (kind <= 2) {
      Cut cut = DrawCut(parameter.shape[stack], parts, first);
      if (!splits_.empty() && Chance(70)) cut = {cut.mode, {}, splits_};
      spread = ShardRows(cut);
    } else if (kind == 3 && parameter.shape.size() > stack + 1) {
      spread = ShardCols(DrawCut(parameter.shape[stack + 1], parts, first));
    } else if (kind <= 5 && stack > 0) {
      spread = ShardExperts(DrawCut(parameter.shape[0], parts, first));
    } else {
      const Pull pull = Chance(40) ? Pull::kFirst : Pull::kEach;
      // The ranks of a sum must weigh the same.
      const bool partial = dim.name != run_.weighted_dim && Chance(35);
      spread = Replicate(partial      ? Gradients::kPartial
                         : Chance(50) ? Gradients::kEqual
                                      : Gradients::kOwn,
                         pull);
    }
    if (parts < dim.size || coordinates[0] != 0) spread = Stages(coordinates, spread);
    return spread;
  }

  std::mt19937_64 random_;
  const bool large_;
  std::vector<int64_t> splits_;  // of the parameter being drawn
  DrawnRun run_;
};

const char* const kStrategies[] = {
    "DDP, equal gradients",
    "DDP, own gradients",
    "ZeRO-2/FSDP, even rows",
    "ZeRO-2/FSDP, uneven",
    "HSDP",
    "one copy pulls",
    "TP columns",
    "TP rows of splits",
    "partial sums",
    "experts",
    "one stage",
    "tied stages",
    "cuts of one axis nest",
    "several strategies",
    "parts",
    "absent blocks",
    "weights",
    "a rank without blocks",
    "WEIGHTS mode",
};

}  // namespace

int32_t DrawnRun::ranks() const {
  int64_t ranks = 1;
  for (const MeshDim& dim : mesh) ranks *= dim.size;
  return static_cast<int32_t>(ranks);
}

int64_t DrawnRun::Coordinate(int32_t rank, const std::string& dim) const {
  int64_t rest = rank;
  for (size_t d = mesh.size(); d-- > 0; rest /= mesh[d].size) {
    if (mesh[d].name == dim) return rest % mesh[d].size;
  }
  std::abort();
}

int64_t DrawnRun::SizeOf(const std::string& dim) const {
  for (const MeshDim& d : mesh) {
    if (d.name == dim) return d.size;
  }
  std::abort();
}

double DrawnRun::WeightOf(int32_t rank) const {
  return weighted_dim.empty() ? 1 : dim_weights[Coordinate(rank, weighted_dim)];
}

std::string DrawnRun::Describe() const {
  std::string text = absl::StrCat("seed ", seed, ": ", servers, " servers, ",
                                  mode == UpdateMode::kWeights ? "WEIGHTS" : "DELTA", ", {");
  for (const MeshDim& dim : mesh) absl::StrAppend(&text, " ", dim.name, " ", dim.size);
  absl::StrAppend(&text, " }, weights over \"", weighted_dim, "\"");
  for (size_t p = 0; p < parameters.size(); ++p) {
    absl::StrAppend(&text, "\n  ", parameters[p].name, " [",
                    absl::StrJoin(parameters[p].shape, ", "), "] ",
                    DescribeRule(parameters[p].rule),
                    parameters[p].push_dtype == DType::kBf16 ? ", bf16" : ", fp32",
                    parameters[p].reduce == Reduce::kSum ? ", sum" : ", mean", ", parts ",
                    spreads[p].parts, ":");
    for (const DimSpread& over : spreads[p].dims) {
      const Spread& s = over.spread;
      absl::StrAppend(&text, " ", over.dim, "=", static_cast<int>(s.kind), "/",
                      static_cast<int>(s.gradients), "/", static_cast<int>(s.pull), "(",
                      absl::StrJoin(s.cut.sizes, ","), ";", absl::StrJoin(s.cut.splits, ","), ")");
      if (s.coordinates) absl::StrAppend(&text, "@", absl::StrJoin(*s.coordinates, ","));
    }
  }
  return text;
}

DrawnRun Draw(uint64_t seed, bool large) { return Drawer(seed, large).Run(); }

StrategyCounts::StrategyCounts() {
  for (const char* name : kStrategies) counts_[name] = 0;
}

void StrategyCounts::Add(const DrawnRun& run) {
  std::set<std::string> seen;
  if (run.mode == UpdateMode::kWeights) seen.insert("WEIGHTS mode");
  if (!run.weighted_dim.empty()) seen.insert("weights");
  for (size_t p = 0; p < run.parameters.size(); ++p) {
    const ParameterSpec& parameter = run.parameters[p];
    int64_t equal = 1, own = 1, rows = 1, cuts = 0, kinds = 0;
    for (const DimSpread& over : run.spreads[p].dims) {
      const Spread& spread = over.spread;
      const int64_t size = run.SizeOf(over.dim);
      const int64_t count = spread.coordinates ? spread.coordinates->size() : size;
      if (count < size) seen.insert("one stage");
      if (count == 1) continue;
      ++kinds;
      if (spread.kind == Spread::Kind::kShardRows) {
        const int64_t length = parameter.shape[parameter.stack_dims.value_or(0)];
        seen.insert(length % count == 0 ? "ZeRO-2/FSDP, even rows" : "ZeRO-2/FSDP, uneven");
        if (!spread.cut.splits.empty()) seen.insert("TP rows of splits");
        rows *= count;
        ++cuts;
      } else if (spread.kind == Spread::Kind::kShardCols) {
        seen.insert("TP columns");
      } else if (spread.kind == Spread::Kind::kShardExperts) {
        seen.insert("experts");
      } else {
        if (spread.pull == Pull::kFirst) seen.insert("one copy pulls");
        if (spread.gradients == Gradients::kEqual) equal *= count;
        if (spread.gradients == Gradients::kOwn) own *= count;
        if (spread.gradients == Gradients::kPartial) {
          seen.insert(count < size ? "tied stages" : "partial sums");
        }
      }
    }
    if (equal > 1) seen.insert(rows > 1 ? "HSDP" : "DDP, equal gradients");
    if (own > 1) seen.insert("DDP, own gradients");
    if (cuts > 1) seen.insert("cuts of one axis nest");
    if (kinds > 1) seen.insert("several strategies");
    if (run.spreads[p].parts > 1) seen.insert("parts");
    if (run.may_be_absent[p]) seen.insert("absent blocks");
  }
  for (int32_t rank = 0; rank < run.ranks(); ++rank) {
    const auto blocks = BlocksOfRank(run.mesh, run.parameters, run.spreads, rank);
    if (blocks.ok() && (blocks->push.empty() || blocks->pull.empty())) {
      seen.insert("a rank without blocks");
    }
  }
  for (const std::string& name : seen) ++counts_.at(name);
}

}  // namespace stiefel::testing
