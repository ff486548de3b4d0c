#include "common/trace.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "common/atomic_file.h"
#include "common/clock.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace stiefel {
namespace {

using nlohmann::json;

// A flush that took t keeps the next one away for so many t, and at least for so long.
constexpr int64_t kFlushShare = 20;
constexpr int64_t kMinFlushMicros = 500000;

// Rows of one track, one above the other; the rows of the next track are numbered from there.
constexpr int kRowsOfTrack = 1000;

json Metadata(const char* what, int thread, const char* key, json value) {
  return {
      {"ph", "M"}, {"name", what}, {"pid", getpid()}, {"tid", thread}, {"args", {{key, value}}}};
}

json Event(const TraceSpan& span, int thread) {
  json args = {{"step", span.step}};
  if (span.bytes != 0) args["bytes"] = span.bytes;
  if (!span.detail.empty()) args["detail"] = span.detail;
  return {{"ph", "X"},
          {"name", span.name},
          {"cat", span.track},
          {"ts", span.begin},
          {"dur", span.end - span.begin},
          {"pid", getpid()},
          {"tid", thread},
          {"args", std::move(args)}};
}

// Gives each span the first row of its track that is free, and names the rows.
json Events(std::vector<TraceSpan> spans, const std::string& process) {
  std::stable_sort(spans.begin(), spans.end(),
                   [](const TraceSpan& a, const TraceSpan& b) { return a.begin < b.begin; });
  json events = json::array();
  events.push_back(Metadata("process_name", 0, "name", process));
  std::map<std::string, std::vector<int64_t>> ends;  // by track and row: when it is free again
  std::map<std::string, int> first;                  // row of each track, as they appear
  for (const TraceSpan& span : spans) {
    std::vector<int64_t>& rows = ends[span.track];
    const auto free =
        std::find_if(rows.begin(), rows.end(), [&](int64_t end) { return end <= span.begin; });
    const int row = static_cast<int>(free - rows.begin());
    const int thread =
        first.emplace(span.track, kRowsOfTrack * static_cast<int>(first.size())).first->second +
        row;
    if (free == rows.end()) {
      rows.push_back(0);
      events.push_back(
          Metadata("thread_name", thread, "name", span.track + " " + std::to_string(row)));
      events.push_back(Metadata("thread_sort_index", thread, "sort_index", thread));
    }
    rows[row] = span.end;
    events.push_back(Event(span, thread));
  }
  return events;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

// What brings the clocks of two machines together, as well as their times of day agree.
int64_t TimeOfDayMinusClock() {
  const int64_t day = std::chrono::duration_cast<std::chrono::microseconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count();
  return day - RealClock().NowMicros();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trace>> Trace::Create(const std::string& path,
                                                     const std::string& process) {
  std::unique_ptr<Trace> trace(new Trace(path, process));
  STIEFEL_RETURN_IF_ERROR(trace->Flush());
  return trace;
}

Trace::~Trace() {
  bool unwritten;
  {
    MutexLock lock(&mutex_);
    unwritten = unwritten_;
  }
  if (unwritten) Flush().IgnoreError();
}

void Trace::set_process(std::string process) {
  MutexLock lock(&mutex_);
  process_ = std::move(process);
}

void Trace::Add(TraceSpan span) {
  MutexLock lock(&mutex_);
  spans_.push_back(std::move(span));
  unwritten_ = true;
  if (spans_.size() <= kMaxSpans) return;
  spans_.pop_front();
  ++left_out_;
}

void Trace::EndStep() {
  MutexLock lock(&mutex_);
  due_ = true;
}

absl::Status Trace::FlushIfDue() {
  const int64_t begin = RealClock().NowMicros();
  {
    MutexLock lock(&mutex_);
    if (!due_ || begin < not_before_) return absl::OkStatus();
  }
  const absl::Status status = Flush();
  const int64_t end = RealClock().NowMicros();
  MutexLock lock(&mutex_);
  not_before_ = end + std::max(kMinFlushMicros, kFlushShare * (end - begin));
  return status;
}

absl::Status Trace::Flush() {
  MutexLock writing(&writing_);
  std::vector<TraceSpan> spans;
  std::string process;
  int64_t left_out;
  {
    MutexLock lock(&mutex_);
    process = process_;
    spans.assign(spans_.begin(), spans_.end());
    left_out = left_out_;
    due_ = unwritten_ = false;
  }
  const json trace = {{"traceEvents", Events(std::move(spans), process)},
                      {"displayTimeUnit", "ms"},
                      {"otherData",
                       {{"host", HostName()},
                        {"clock", "CLOCK_MONOTONIC, microseconds"},
                        {"time_of_day_minus_clock", TimeOfDayMinusClock()},
                        {"spans_left_out", left_out}}}};
  // Names are the user's: what is not UTF-8 in them is replaced.
  const std::string text = trace.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> file,
                           AtomicFile::Create(path_, ExistingFile::kReplace));
  STIEFEL_RETURN_IF_ERROR(file->WriteAt(0, text.data(), static_cast<int64_t>(text.size())));
  return file->Publish();
}

// ---------------------------------------------------------------- transfers

void TransferSpans::Begin(int64_t block, const std::string& name, int64_t step, int64_t now) {
  const auto [found, fresh] = open_.try_emplace(block);
  if (!fresh && found->second.step == step) return;
  found->second = {name, now, step, 0};
}

void TransferSpans::Enter(int64_t stream, int64_t block, int64_t bytes, bool last) {
  const auto found = open_.find(block);
  if (found == open_.end()) return;
  found->second.bytes += bytes;
  if (last) entered_[stream].push_back(block);
}

void TransferSpans::Leave(int64_t stream, int64_t now) {
  const auto found = entered_.find(stream);
  if (found == entered_.end()) return;
  for (const int64_t block : found->second) Take(block, 0, true, now);
  entered_.erase(found);
}

void TransferSpans::Take(int64_t block, int64_t bytes, bool last, int64_t now) {
  const auto found = open_.find(block);
  if (found == open_.end()) return;
  Open& open = found->second;
  open.bytes += bytes;
  if (!last) return;
  trace_->Add({track_, open.name, open.begin, now, open.step, open.bytes, ""});
  open_.erase(found);
}

void TransferSpans::Clear() {
  open_.clear();
  entered_.clear();
}

}  // namespace stiefel
