#include "client/replan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/errors.h"
#include "common/status.h"
#include "plan/cost.h"

namespace stiefel {
namespace {

// Shards that move together, with what they cost.
struct Item {
  std::vector<int32_t> shards;
  std::vector<MatrixBytes> bytes;  // by member
  int64_t moved_bytes = 0;
  double refresh = 0;  // units, as the next
  double off = 0;
  int64_t period = 1;
  int64_t phase = 0;

  double CostAt(int64_t step) const { return step % period == phase ? refresh : off; }
};

class Mover {
 public:
  explicit Mover(const MoveRequest& request)
      : request_(request), plan_{request.owners, 0, 0, false} {}

  absl::StatusOr<MovePlan> Run() {
    STIEFEL_RETURN_IF_ERROR(Prepare());
    STIEFEL_RETURN_IF_ERROR(Mover(*this).Drain(/*bounded=*/false).status());
    STIEFEL_ASSIGN_OR_RETURN(const bool drained, Drain(/*bounded=*/true));
    plan_.complete = drained && Fill();
    return plan_;
  }

 private:
  absl::Status Prepare() {
    if (std::all_of(request_.servers.begin(), request_.servers.end(),
                    [](const MoveServer& server) { return server.drain; })) {
      return absl::InvalidArgumentError(
          absl::StrCat("all ", request_.servers.size(),
                       " servers of the run are to be drained: none is left to take its shards"));
    }
    const auto count = static_cast<int32_t>(request_.shards.size());
    if (request_.owners.size() != request_.shards.size())
      return absl::InvalidArgumentError(
          absl::StrCat(request_.owners.size(), " owners of ", count, " shards"));
    for (int32_t i = 0; i < count; ++i) {
      const int32_t owner = request_.owners[i];
      const int32_t with = request_.shards[i].with;
      if (owner < 0 || owner >= static_cast<int32_t>(request_.servers.size()))
        return IndexOutOfRange("owner", owner, request_.servers.size());
      if (with >= count) return IndexOutOfRange("pair of a shard", with, count);
      if (with >= 0 && with < i) continue;  // came with its pair
      Item item;
      item.period = request_.shards[i].shard.rule.period;
      item.phase = request_.shards[i].phase;
      STIEFEL_RETURN_IF_ERROR(AddMember(i, &item));
      if (with >= 0) STIEFEL_RETURN_IF_ERROR(AddMember(with, &item));
      items_.push_back(std::move(item));
    }
    cycle_ = 1;
    for (const Item& item : items_)
      cycle_ = std::min(kMaxCycleSteps, std::lcm(cycle_, std::max<int64_t>(item.period, 1)));
    tallies_.assign(request_.servers.size(), MemoryTally(request_.memory));
    loads_.assign(request_.servers.size(), std::vector<double>(cycle_, 0));
    for (int32_t i = 0; i < static_cast<int32_t>(items_.size()); ++i) Add(i, OwnerOf(i), 1);
    return absl::OkStatus();
  }

  absl::Status AddMember(int32_t index, Item* item) {
    const MoveShard& shard = request_.shards[index];
    STIEFEL_ASSIGN_OR_RETURN(MatrixBytes bytes,
                             BytesOfMatrix(shard.shard, shard.pushed_elements, request_.memory));
    item->moved_bytes = SaturatingAdd(item->moved_bytes, bytes.state);
    item->moved_bytes = SaturatingAdd(item->moved_bytes, bytes.weights / 2);  // half is staged
    item->refresh += StepCost(shard.shard, StepKind::kRefresh).Units();
    item->off += StepCost(shard.shard, StepKind::kOffRefresh).Units();
    item->shards.push_back(index);
    item->bytes.push_back(bytes);
    return absl::OkStatus();
  }

  int32_t OwnerOf(int32_t item) const { return plan_.owners[items_[item].shards[0]]; }

  void Add(int32_t item, int32_t server, double sign) {
    for (const MatrixBytes& bytes : items_[item].bytes) {
      if (sign > 0) {
        tallies_[server].Add(bytes);
      } else {
        tallies_[server].Remove(bytes);
      }
    }
    for (int64_t step = 0; step < cycle_; ++step)
      loads_[server][step] += sign * items_[item].CostAt(step);
  }

  void Shift(int32_t item, int32_t to) {
    Add(item, OwnerOf(item), -1);
    Add(item, to, 1);
    for (const int32_t shard : items_[item].shards) plan_.owners[shard] = to;
    plan_.shards_moved += static_cast<int64_t>(items_[item].shards.size());
    plan_.bytes_moved = SaturatingAdd(plan_.bytes_moved, items_[item].moved_bytes);
  }

  bool MayMove(int32_t item) const {
    return plan_.shards_moved == 0 ||
           items_[item].moved_bytes <= request_.max_bytes - plan_.bytes_moved;
  }

  bool Fits(int32_t item, int32_t server) const {
    MemoryTally tally = tallies_[server];
    for (const MatrixBytes& bytes : items_[item].bytes) tally.Add(bytes);
    return tally.Total() <= request_.servers[server].memory_bytes;
  }

  // Of the whole cycle.
  double Time(int32_t server) const {
    return std::accumulate(loads_[server].begin(), loads_[server].end(), 0.0) /
           request_.servers[server].speed;
  }

  // Where the item fits and is done soonest, summed over the cycle; -1: nowhere.
  int32_t Soonest(int32_t item) const {
    int32_t best = -1;
    double best_time = 0;
    for (int32_t server = 0; server < static_cast<int32_t>(request_.servers.size()); ++server) {
      if (request_.servers[server].drain) continue;
      double time = Time(server);
      for (int64_t step = 0; step < cycle_; ++step)
        time += items_[item].CostAt(step) / request_.servers[server].speed;
      if ((best < 0 || time < best_time) && Fits(item, server)) {
        best = server;
        best_time = time;
      }
    }
    return best;
  }

  absl::Status NoRoom(int32_t item) const {
    int64_t needed = 0;
    for (const MatrixBytes& bytes : items_[item].bytes)
      needed = SaturatingAdd(needed, SaturatingAdd(bytes.Resident(), bytes.workspace));
    std::string free;
    for (size_t s = 0; s < request_.servers.size() && free.size() < 1024; ++s) {
      if (request_.servers[s].drain) continue;
      absl::StrAppend(&free, free.empty() ? "" : ", ", request_.servers[s].address, " ",
                      request_.servers[s].memory_bytes - tallies_[s].Total());
    }
    const MoveShard& first = request_.shards[items_[item].shards[0]];
    return absl::ResourceExhaustedError(absl::StrCat(
        "no server that stays has room for \"", first.shard.name, "\" (", first.shard.rows, " x ",
        first.shard.cols, ", ", needed, " bytes); free bytes: ", free,
        ". Add a server first, or give one more memory"));
  }

  // True: drained servers own nothing any more.
  absl::StatusOr<bool> Drain(bool bounded) {
    std::vector<int32_t> leaving;
    for (int32_t item = 0; item < static_cast<int32_t>(items_.size()); ++item) {
      if (request_.servers[OwnerOf(item)].drain) leaving.push_back(item);
    }
    std::stable_sort(leaving.begin(), leaving.end(), [this](int32_t a, int32_t b) {
      return items_[a].refresh > items_[b].refresh;
    });
    bool all = true;
    for (const int32_t item : leaving) {
      if (bounded && !MayMove(item)) {
        all = false;
        continue;
      }
      const int32_t to = Soonest(item);
      if (to < 0) return NoRoom(item);
      Shift(item, to);
    }
    return all;
  }

  // How much shorter the slower of the two is, over the cycle, with the item on `to`.
  double Gain(int32_t item, int32_t from, int32_t to) const {
    const double from_speed = request_.servers[from].speed;
    const double to_speed = request_.servers[to].speed;
    double gain = 0;
    for (int64_t step = 0; step < cycle_; ++step) {
      const double cost = items_[item].CostAt(step);
      gain +=
          std::max(loads_[from][step] / from_speed, loads_[to][step] / to_speed) -
          std::max((loads_[from][step] - cost) / from_speed, (loads_[to][step] + cost) / to_speed);
    }
    return gain;
  }

  // The move to an added server that gains most; from the slowest server that has any. {-1, -1}:
  // none gains.
  std::pair<int32_t, int32_t> BestFill() const {
    std::vector<int32_t> givers;
    for (int32_t s = 0; s < static_cast<int32_t>(request_.servers.size()); ++s) {
      if (!request_.servers[s].drain && !request_.servers[s].fill) givers.push_back(s);
    }
    std::stable_sort(givers.begin(), givers.end(),
                     [this](int32_t a, int32_t b) { return Time(a) > Time(b); });
    for (const int32_t from : givers) {
      const double least = Time(from) * 1e-3;  // a move has its price too
      double best_gain = 0;
      std::pair<int32_t, int32_t> best(-1, -1);
      for (int32_t item = 0; item < static_cast<int32_t>(items_.size()); ++item) {
        if (OwnerOf(item) != from) continue;
        for (int32_t to = 0; to < static_cast<int32_t>(request_.servers.size()); ++to) {
          if (!request_.servers[to].fill || request_.servers[to].drain) continue;
          const double gain = Gain(item, from, to);
          if (gain <= std::max(best_gain, least) || !Fits(item, to)) continue;
          best_gain = gain;
          best = {item, to};
        }
      }
      if (best.first >= 0) return best;
    }
    return {-1, -1};
  }

  // True: the added servers take no more.
  bool Fill() {
    for (;;) {
      const auto [item, to] = BestFill();
      if (item < 0) return true;
      if (!MayMove(item)) return false;
      Shift(item, to);
    }
  }

  const MoveRequest& request_;
  std::vector<Item> items_;
  int64_t cycle_ = 1;
  std::vector<MemoryTally> tallies_;        // by server
  std::vector<std::vector<double>> loads_;  // by server and step of the cycle, units
  MovePlan plan_;
};

}  // namespace

absl::StatusOr<MovePlan> PlanMove(const MoveRequest& request) { return Mover(request).Run(); }

}  // namespace stiefel
