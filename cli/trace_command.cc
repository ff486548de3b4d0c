#include "cli/trace_command.h"

#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/atomic_file.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace stiefel {
namespace {

using nlohmann::json;

// An integer that sums of a few cannot overflow.
bool IsInteger(const json& value) {
  constexpr int64_t kLimit = int64_t{1} << 60;
  return value.is_number_integer() && value.get<int64_t>() < kLimit &&
         value.get<int64_t>() > -kLimit;
}

struct ParsedTrace {
  json events;
  std::string host;
  int64_t day_minus_clock = 0;
};

absl::StatusOr<ParsedTrace> Parse(const std::string& text, size_t number) {
  const auto refuse = [number](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("trace ", number, ": ", why));
  };
  json trace = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!trace.is_object()) return refuse("is not a JSON object");
  const json& other = trace["otherData"];
  if (!trace["traceEvents"].is_array() || !other.is_object() ||
      !other.value("host", json()).is_string() ||
      !IsInteger(other.value("time_of_day_minus_clock", json())))
    return refuse("has no events, host and clock as Stiefel writes them");
  for (const json& event : trace["traceEvents"]) {
    if (!event.is_object() || !IsInteger(event.value("pid", json())) ||
        (event.contains("ts") && !IsInteger(event["ts"])))
      return refuse(absl::StrCat("an event without pid and time in microseconds: ", event.dump()));
  }
  return ParsedTrace{std::move(trace["traceEvents"]), other["host"],
                     other["time_of_day_minus_clock"]};
}

}  // namespace

absl::StatusOr<std::string> MergeTraces(const std::vector<std::string>& traces) {
  json merged = {{"traceEvents", json::array()}, {"displayTimeUnit", "ms"}};
  std::string host;
  int64_t day_minus_clock = 0;
  std::set<int64_t> used;
  for (size_t i = 0; i < traces.size(); ++i) {
    STIEFEL_ASSIGN_OR_RETURN(ParsedTrace trace, Parse(traces[i], i + 1));
    if (i == 0) {
      host = trace.host;
      day_minus_clock = trace.day_minus_clock;
      merged["otherData"] = {{"host", host}, {"time_of_day_minus_clock", day_minus_clock}};
    }
    const int64_t shift = trace.host == host ? 0 : trace.day_minus_clock - day_minus_clock;
    std::map<int64_t, int64_t> pids;  // within one file two processes have two
    for (json& event : trace.events) {
      const auto [pid, fresh] = pids.emplace(event["pid"], event["pid"]);
      while (fresh && !used.insert(pid->second).second) ++pid->second;
      event["pid"] = pid->second;
      if (event.contains("ts")) event["ts"] = event["ts"].get<int64_t>() + shift;
      merged["traceEvents"].push_back(std::move(event));
    }
  }
  return merged.dump() + "\n";
}

namespace {

struct Flags {
  std::vector<std::string> inputs;
  std::string output;
};

absl::Status Merge(const Flags& flags) {
  std::vector<std::string> texts;
  for (const std::string& path : flags.inputs) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    if (!file.good()) return absl::NotFoundError(absl::StrCat("cannot read ", path));
    texts.push_back(text.str());
  }
  STIEFEL_ASSIGN_OR_RETURN(const std::string merged, MergeTraces(texts));
  STIEFEL_ASSIGN_OR_RETURN(const std::unique_ptr<AtomicFile> file,
                           AtomicFile::Create(flags.output, ExistingFile::kReplace));
  STIEFEL_RETURN_IF_ERROR(file->WriteAt(0, merged.data(), static_cast<int64_t>(merged.size())));
  return file->Publish();
}

}  // namespace

void AddTraceCommand(CLI::App* app, absl::Status* result) {
  CLI::App* trace = app->add_subcommand("trace", "Works on Chrome traces of servers and trainers");
  trace->require_subcommand(1);
  CLI::App* merge = trace->add_subcommand("merge", "Puts the traces of several processes together");
  auto flags = std::make_shared<Flags>();
  merge->add_option("traces", flags->inputs, "What --trace wrote, one file a process")->required();
  merge->add_option("-o,--out", flags->output, "Where to write; replaced if it exists")->required();
  merge->callback([flags, result] { *result = Merge(*flags); });
}

}  // namespace stiefel
