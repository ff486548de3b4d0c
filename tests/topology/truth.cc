#include "tests/topology/truth.h"

#include <algorithm>
#include <cmath>

namespace stiefel::testing {
namespace {

uint64_t Mix(std::initializer_list<uint64_t> values) {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const uint64_t value : values) {
    hash = (hash ^ value) * 0xbf58476d1ce4e5b9;
    hash ^= hash >> 29;
    hash *= 0x94d049bb133111eb;
    hash ^= hash >> 32;
  }
  return hash;
}

// Whether entry i of n is in part k of p.
bool InPart(const Cut& cut, int64_t i, int64_t n, int64_t k, int64_t p) {
  if (!cut.sizes.empty()) {
    int64_t owner = 0;
    while (i >= cut.sizes[owner]) i -= cut.sizes[owner++];
    return owner == k;
  }
  if (cut.mode == CutMode::kBalanced) return i >= k * n / p && i < (k + 1) * n / p;
  return i / ((n + p - 1) / p) == k;
}

// Keeps of the entries of an axis those of part k, cut in units of `unit`; every split by itself.
std::vector<int64_t> Keep(const std::vector<int64_t>& entries, const Cut& cut, int64_t unit,
                          int64_t k, int64_t p) {
  std::vector<std::vector<int64_t>> segments;
  int64_t begin = 0;
  for (const int64_t split : cut.splits) {
    auto& segment = segments.emplace_back();
    for (const int64_t entry : entries) {
      if (entry >= begin && entry < begin + split) segment.push_back(entry);
    }
    begin += split;
  }
  if (cut.splits.empty()) segments.push_back(entries);
  std::vector<int64_t> kept;
  for (const std::vector<int64_t>& segment : segments) {
    const auto n = static_cast<int64_t>(segment.size()) / unit;
    for (int64_t i = 0; i < n * unit; ++i) {
      if (InPart(cut, i / unit, n, k, p)) kept.push_back(segment[i]);
    }
  }
  return kept;
}

std::vector<int64_t> Count(int64_t n) {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < n; ++i) numbers.push_back(i);
  return numbers;
}

}  // namespace

Truth::Truth(const DrawnRun& run) : run_(run), roles_(run.ranks()) {
  contributions_.resize(run.parameters.size());
  for (size_t p = 0; p < run.parameters.size(); ++p) {
    Contributions& all = contributions_[p];
    for (const DimSpread& over : run.spreads[p].dims) {
      const Spread& spread = over.spread;
      if (spread.kind != Spread::Kind::kReplicate) continue;
      const int64_t count = spread.coordinates ? spread.coordinates->size() : run.SizeOf(over.dim);
      if (spread.gradients == Gradients::kOwn) all.owns *= count;
      if (spread.gradients == Gradients::kPartial) all.summands *= count;
    }
    all.weights.assign(all.owns, 0);
  }
  for (int32_t rank = run.ranks() - 1; rank >= 0; --rank) {
    for (size_t p = 0; p < run.parameters.size(); ++p) {
      roles_[rank].push_back(MakeRole(rank, p));
      const Role& role = roles_[rank].back();
      // Where ranks with one gradient of their own differ in weight, all that average an element
      // have the weight of one of them: which one does not matter to the mean.
      if (!role.elements.empty()) contributions_[p].weights[role.own] = run.WeightOf(rank);
    }
  }
}

int64_t Truth::Matrices(size_t parameter) const {
  const ParameterSpec& spec = run_.parameters[parameter];
  return spec.stack_dims.value_or(0) > 0 ? spec.shape[0] : 1;
}

Role Truth::MakeRole(int32_t rank, size_t parameter) const {
  const ParameterSpec& spec = run_.parameters[parameter];
  const int64_t matrices = Matrices(parameter), rows = spec.rows() / matrices, cols = spec.cols();
  const bool vector = spec.shape.size() == 1;
  std::vector<int64_t> held_matrices = Count(matrices), held_rows = Count(rows);
  std::vector<int64_t> held_cols = Count(cols);
  Role role;
  for (const DimSpread& over : run_.spreads[parameter].dims) {
    const Spread& spread = over.spread;
    const std::vector<int64_t> holders = spread.coordinates.value_or(Count(run_.SizeOf(over.dim)));
    const auto found = std::find(holders.begin(), holders.end(), run_.Coordinate(rank, over.dim));
    if (found == holders.end()) return Role();
    const int64_t k = found - holders.begin();
    const auto count = static_cast<int64_t>(holders.size());
    switch (spread.kind) {
      case Spread::Kind::kShardRows: {
        std::vector<int64_t>& axis = vector ? held_cols : held_rows;
        axis = Keep(axis, spread.cut, 1, k, count);
        break;
      }
      case Spread::Kind::kShardCols: {
        const size_t inputs = static_cast<size_t>(spec.stack_dims.value_or(0)) + 1;
        held_cols = Keep(held_cols, spread.cut, cols / spec.shape[inputs], k, count);
        break;
      }
      case Spread::Kind::kShardExperts:
        held_matrices = Keep(held_matrices, spread.cut, 1, k, count);
        break;
      case Spread::Kind::kReplicate:
        if (spread.gradients == Gradients::kOwn) role.own = role.own * count + k;
        if (spread.gradients == Gradients::kPartial) role.summand = role.summand * count + k;
        break;
    }
  }
  for (const int64_t matrix : held_matrices) {
    for (const int64_t row : held_rows) {
      for (const int64_t col : held_cols) {
        role.elements.push_back((matrix * rows + row) * cols + col);
      }
    }
  }
  return role;
}

float Truth::InitialWeight(size_t parameter, int64_t element) const {
  const uint64_t hash = Mix({run_.seed, parameter, static_cast<uint64_t>(element), 1});
  return static_cast<float>(static_cast<int64_t>(hash % 2000001) - 1000000) / 1e6f;
}

float Truth::Gradient(size_t parameter, const Role& role, int32_t part, int64_t step,
                      int64_t element) const {
  const auto e = static_cast<uint64_t>(element);
  const uint64_t hash =
      Mix({run_.seed, parameter, e, 2, static_cast<uint64_t>(step), static_cast<uint64_t>(role.own),
           static_cast<uint64_t>(role.summand), static_cast<uint64_t>(part)});
  const Contributions& all = contributions_[parameter];
  const bool alone = all.owns * all.summands * run_.spreads[parameter].parts == 1;
  const bool fine = alone && run_.parameters[parameter].push_dtype == DType::kFp32;
  const float size = fine ? 1 + static_cast<float>(hash % (1 << 23)) / (1 << 23)
                          : 1 + static_cast<float>(hash % 32) / 32;
  return Mix({run_.seed, parameter, e, 3}) % 2 == 0 ? size : -size;
}

bool Truth::Absent(size_t parameter, const Role& role, int32_t part, int64_t step,
                   int64_t matrix) const {
  if (!run_.may_be_absent[parameter]) return false;
  return Mix({run_.seed, parameter, static_cast<uint64_t>(matrix), 4, static_cast<uint64_t>(step),
              static_cast<uint64_t>(role.own), static_cast<uint64_t>(role.summand),
              static_cast<uint64_t>(part)}) %
             3 ==
         0;
}

std::optional<Reduced> Truth::Reduce(size_t parameter, int64_t step, int64_t matrix) const {
  const ParameterSpec& spec = run_.parameters[parameter];
  const Contributions& all = contributions_[parameter];
  const int64_t size = spec.rows() / Matrices(parameter) * spec.cols();
  std::vector<double> sum(size, 0.0);
  double weights = 0;
  std::vector<double> present;  // weights of those who are averaged
  for (int64_t own = 0; own < all.owns; ++own) {
    const double weight = spec.reduce == Reduce::kSum ? 1 : all.weights[own];
    bool any = false;
    for (int64_t summand = 0; summand < all.summands; ++summand) {
      const Role role = {{}, own, summand};
      for (int32_t part = 0; part < run_.spreads[parameter].parts; ++part) {
        if (Absent(parameter, role, part, step, matrix)) continue;
        any = true;
        for (int64_t i = 0; i < size; ++i) {
          sum[i] += weight * Gradient(parameter, role, part, step, matrix * size + i);
        }
      }
    }
    if (any) present.push_back(weight);
  }
  if (present.empty()) return std::nullopt;
  for (const double weight : present) weights += weight;
  const double divisor = spec.reduce == Reduce::kSum ? 1 : weights;
  Reduced reduced;
  for (const double weight : present) {
    const double share = weight / divisor * 4096;
    reduced.exact = reduced.exact && share == std::floor(share);
  }
  for (const double value : sum) reduced.gradient.push_back(static_cast<float>(value / divisor));
  return reduced;
}

}  // namespace stiefel::testing
