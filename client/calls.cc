#include "client/calls.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace stiefel {
namespace {

struct Slot {
  bool in_flight = false;
  bool done = false;
  int failures = 0;
  int64_t retry_at = 0;
  absl::Status last;
  std::string response;
};

struct State {
  Mutex mutex;
  CondVar changed;
  std::vector<Slot> slots ABSL_GUARDED_BY(mutex);
};

}  // namespace

int64_t BackoffMicros(int failures) {
  return std::min<int64_t>(2000000, int64_t{50000} << std::min(failures, 10));
}

absl::Status AtServer(const std::string& address, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat("server ", address, ": ", status.message()));
}

absl::StatusOr<std::vector<std::string>> CallAll(
    const Servers& servers, const std::string& method,
    const std::function<std::string(int, int64_t)>& request,
    const std::function<bool(const absl::Status&)>& retry, int64_t deadline, int64_t grace) {
  const int count = static_cast<int>(servers.connections.size());
  const auto state = std::make_shared<State>();
  std::optional<absl::Status> final_status;
  MutexLock lock(&state->mutex);
  state->slots.resize(count);
  for (;;) {
    const int64_t now = RealClock().NowMicros();
    int64_t wake = deadline;
    bool in_flight = false;
    bool all_done = true;
    for (int s = 0; s < count; ++s) {
      Slot& slot = state->slots[s];
      in_flight = in_flight || slot.in_flight;
      if (slot.done || slot.in_flight) {
        all_done = all_done && slot.done;
        continue;
      }
      all_done = false;
      const bool failed = slot.failures > 0;
      if (!final_status && failed && (!retry(slot.last) || slot.retry_at >= deadline)) {
        final_status = AtServer(servers.addresses[s], slot.last);
      }
      if (final_status) continue;
      if (failed && now < slot.retry_at) {
        wake = std::min(wake, slot.retry_at);
        continue;
      }
      const int64_t left = std::max<int64_t>(deadline - now, 1000);
      slot.in_flight = in_flight = true;
      servers.connections[s]->Call(
          method, request(s, left), left + grace,
          [state, s](const absl::Status& status, const std::string& response) {
            MutexLock done_lock(&state->mutex);
            Slot& answered = state->slots[s];
            answered.in_flight = false;
            answered.done = status.ok();
            answered.last = OwnCopy(status);
            answered.response = response;
            answered.retry_at = RealClock().NowMicros() + BackoffMicros(answered.failures++);
            state->changed.NotifyAll();
          });
    }
    if (all_done) break;
    if (final_status) {
      if (!in_flight) return *final_status;
      for (const auto& connection : servers.connections) connection->CancelCalls();
    }
    // Calls under way end by their own deadline.
    if (in_flight && (final_status || now >= deadline)) {
      state->changed.Wait(&state->mutex);
    } else {
      state->changed.WaitUntilMicros(&state->mutex, wake);
    }
  }
  std::vector<std::string> responses;
  for (Slot& slot : state->slots) responses.push_back(std::move(slot.response));
  return responses;
}

std::vector<absl::StatusOr<std::string>> CallEach(const Servers& servers, const std::string& method,
                                                  const std::string& request,
                                                  int64_t timeout_micros) {
  const size_t count = servers.connections.size();
  const auto state = std::make_shared<State>();
  MutexLock lock(&state->mutex);
  state->slots.resize(count);
  for (size_t s = 0; s < count; ++s) {
    servers.connections[s]->Call(
        method, request, timeout_micros,
        [state, s](const absl::Status& status, const std::string& response) {
          MutexLock done_lock(&state->mutex);
          state->slots[s].done = true;
          state->slots[s].last = OwnCopy(status);
          state->slots[s].response = response;
          state->changed.NotifyAll();
        });
  }
  std::vector<absl::StatusOr<std::string>> answers;
  for (size_t s = 0; s < count; ++s) {
    Slot& slot = state->slots[s];
    while (!slot.done) state->changed.Wait(&state->mutex);
    if (slot.last.ok()) {
      answers.emplace_back(std::move(slot.response));
    } else {
      answers.emplace_back(AtServer(servers.addresses[s], slot.last));
    }
  }
  return answers;
}

}  // namespace stiefel
