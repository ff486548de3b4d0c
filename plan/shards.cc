#include "plan/shards.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace stiefel {

absl::Status ValidateCuts(int64_t rows, int64_t cols, const std::vector<int64_t>& at) {
  const int64_t length = LongSide(rows, cols);
  int64_t last = 0;
  for (const int64_t cut : at) {
    if (cut <= last || cut >= length) {
      return absl::InvalidArgumentError(
          absl::StrCat("a cut at ", cut, " after ", last, " of a ", rows, " x ", cols,
                       " matrix: cuts ascend strictly within (0, ", length, "), its long side"));
    }
    last = cut;
  }
  return absl::OkStatus();
}

std::vector<Rect> ShardRects(int64_t rows, int64_t cols, const std::vector<int64_t>& at) {
  std::vector<Rect> shards;
  int64_t begin = 0;
  const auto add = [&](int64_t end) {
    shards.push_back(CutsRows(rows, cols) ? Rect{begin, end, 0, cols} : Rect{0, rows, begin, end});
    begin = end;
  };
  for (const int64_t cut : at) add(cut);
  add(LongSide(rows, cols));
  return shards;
}

std::vector<int64_t> EvenCuts(int64_t rows, int64_t cols, int64_t shards) {
  const int64_t length = LongSide(rows, cols);
  const int64_t parts = std::min(shards, length);
  std::vector<int64_t> at;
  int64_t end = 0;
  for (int64_t part = 0; part + 1 < parts; ++part) {
    end += length / parts + (part < length % parts ? 1 : 0);
    at.push_back(end);
  }
  return at;
}

std::vector<ShardPart> CutAtShards(const Rect& block, const std::vector<Rect>& shards) {
  const auto first = std::partition_point(shards.begin(), shards.end(), [&block](const Rect& s) {
    return s.row_end <= block.row_begin || s.col_end <= block.col_begin;
  });
  std::vector<ShardPart> parts;
  for (auto shard = first; shard != shards.end(); ++shard) {
    const Rect common = Intersect(block, *shard);
    if (common.empty()) break;
    parts.push_back({static_cast<int32_t>(shard - shards.begin()),
                     {common.row_begin - shard->row_begin, common.row_end - shard->row_begin,
                      common.col_begin - shard->col_begin, common.col_end - shard->col_begin}});
  }
  return parts;
}

absl::Status ValidateSharding(const Rule& rule, int64_t rows, int64_t cols) {
  const auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("a ", rows, " x ", cols, " matrix under ",
                                                   DescribeRule(rule),
                                                   " cannot be cut into shards: ", why));
  };
  if (rule.family == RuleFamily::kPolora) return refuse("polora factors are stepped together");
  if (rule.family != RuleFamily::kSpectral) return absl::OkStatus();
  if (!rule.splits.empty() || rule.num_heads > 1)
    return refuse("splits are orthogonalised on their own; register them as matrices");
  if (!rule.tiles.empty() || rule.off_refresh == OffRefresh::kTiled)
    return refuse("tiles are orthogonalised on their own");
  if (rule.select_fraction < 1 || rule.damping != 1)
    return refuse("rows are selected, and damped, by their order in the whole matrix");
  if (rule.gain != 1) return refuse("shaping needs the leading directions of the whole matrix");
  if (rule.row_variance_beta2) return refuse("row variance rescales by norms of the whole matrix");
  if (rule.row_spectral_max > 0)
    return refuse("row_spectral_max needs the spectral norm of the whole matrix");
  if (rule.compute != ComputeType::kAuto && rule.compute != ComputeType::kFp32)
    return refuse("sums over shards are taken in fp32; leave compute auto or fp32");
  if (rule.normalise == Normalise::kAol && rows == cols)
    return refuse("normalise=aol of a square matrix weighs rows, and shards are ranges of rows");
  return absl::OkStatus();
}

}  // namespace stiefel
