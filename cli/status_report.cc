#include "cli/status_report.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/table.h"

namespace stiefel {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

constexpr char kNothing[] = "-";

std::string Hash(uint64_t hash) { return absl::StrFormat("%016x", hash); }

std::string ServerLines(const v1::ServerStatus& server) {
  std::string text =
      absl::StrCat("server ", server.address(), "  ", server.software_version(), "  ",
                   server.device(), "  threads ", server.threads(), "  up ",
                   Duration(server.uptime_seconds()), server.draining() ? "  DRAINING" : "", "\n");
  absl::StrAppend(&text, "  memory ", Bytes(server.resident_bytes()), " resident, ",
                  Bytes(server.declared_bytes()), " declared");
  if (server.memory_limit_bytes() > 0) {
    absl::StrAppend(&text, ", limit ", Bytes(server.memory_limit_bytes()));
  }
  absl::StrAppend(&text, "  load ", absl::StrFormat("%.0f%%", server.load() * 100), ", ",
                  server.engine_queue(), " matrices waiting\n");
  if (server.runs().empty()) absl::StrAppend(&text, "  idle: no run\n");
  return text;
}

std::string RunLines(const v1::RunStatus& run) {
  std::string text = absl::StrCat(
      "  run ", run.name(), "  server ", run.server_index(), "  ", run.update_mode(), ", staging ",
      run.staging(), "  epoch ", run.placement_epoch(), "\n  step ", run.consumed_step(),
      " decided, step ", run.open_step(), " attempt ", run.open_attempt(), " ", run.phase(), "  ",
      absl::StrFormat("%.2f", run.steps_per_second()), " steps/s\n  committed ",
      run.committed_steps(), ", skipped ", run.skipped_steps(), ", dropped attempts ",
      run.dropped_attempts(), "  gradient norm ", absl::StrFormat("%.4g", run.last_grad_norm()),
      "\n  pushed ", Bytes(run.bytes_pushed()), ", pulled ", Bytes(run.bytes_pulled()),
      "  chunks again ", run.chunks_duplicate(), ", stale ", run.chunks_stale(), "  computed ",
      Duration(run.compute_seconds()), "\n");
  if (!run.awaited().empty()) absl::StrAppend(&text, "  waiting for ", run.awaited(), "\n");
  if (!run.last_skip_reason().empty()) {
    absl::StrAppend(&text, "  last skip: ", run.last_skip_reason(), "\n");
  }
  if (!run.last_drop_reason().empty()) {
    absl::StrAppend(&text, "  last drop: ", run.last_drop_reason(), "\n");
  }
  if (run.has_state_hash()) absl::StrAppend(&text, "  state hash ", Hash(run.state_hash()), "\n");
  return text;
}

std::string RankTable(const v1::RunStatus& run) {
  Table table({"rank", "state", "applied", "begun", "pushed all", "lease left"});
  for (const v1::RankStatus& rank : run.ranks()) {
    table.AddRow({absl::StrCat(rank.rank()),
                  !rank.joined() ? "missing"
                  : rank.live()  ? "live"
                                 : "lost",
                  absl::StrCat(rank.applied_step()), absl::StrCat(rank.begun_step()),
                  rank.ended_push() ? "yes" : "no", Duration(rank.lease_seconds_left())});
  }
  return table.Text();
}

std::string MatrixTable(const v1::RunStatus& run) {
  std::vector<std::string> header = {"matrix",       "shape",    "rule",           "last kind",
                                     "last refresh", "residual", "row-wise |O|_2", "update RMS",
                                     "owner",        "commits",  "skips",          "computed"};
  if (run.has_state_hash()) header.push_back("state hash");
  Table table(header);
  std::string skips;
  for (const v1::MatrixStatus& matrix : run.matrices()) {
    if (matrix.owner() != run.server_index()) continue;
    const std::string name = matrix.shards() == 0
                                 ? matrix.name()
                                 : absl::StrCat(matrix.name(), " (shard ", matrix.shard() + 1, "/",
                                                matrix.shards(), ")");
    std::vector<std::string> cells = {
        name,
        absl::StrCat(matrix.rows(), "x", matrix.cols()),
        matrix.rule(),
        matrix.last_kind().empty() ? kNothing : matrix.last_kind(),
        matrix.last_refresh_step() == 0 ? kNothing : absl::StrCat(matrix.last_refresh_step()),
        matrix.has_residual() ? absl::StrFormat("%.3f", matrix.residual()) : kNothing,
        matrix.has_row_wise_spectral() ? absl::StrFormat("%.2f", matrix.row_wise_spectral())
                                       : kNothing,
        matrix.has_update_rms() ? absl::StrFormat("%.3g", matrix.update_rms()) : kNothing,
        absl::StrCat(matrix.owner()),
        absl::StrCat(matrix.commits()),
        absl::StrCat(matrix.skips()),
        Duration(matrix.compute_seconds())};
    if (run.has_state_hash()) {
      cells.push_back(matrix.has_state_hash() ? Hash(matrix.state_hash()) : kNothing);
    }
    table.AddRow(std::move(cells));
    if (!matrix.last_skip_reason().empty()) {
      absl::StrAppend(&skips, "  ", name, ": ", matrix.last_skip_reason(), "\n");
    }
  }
  return absl::StrCat(table.Text(), skips);
}

Json MessageJson(const Message& message);

// The value of a field, or of its element `index` where it is repeated.
Json FieldJson(const Message& message, const FieldDescriptor* field, int index) {
  const Reflection& reflection = *message.GetReflection();
  const bool repeated = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return repeated ? reflection.GetRepeatedInt32(message, field, index)
                      : reflection.GetInt32(message, field);
    case FieldDescriptor::CPPTYPE_INT64:
      return repeated ? reflection.GetRepeatedInt64(message, field, index)
                      : reflection.GetInt64(message, field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return Hash(repeated ? reflection.GetRepeatedUInt64(message, field, index)
                           : reflection.GetUInt64(message, field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return repeated ? reflection.GetRepeatedDouble(message, field, index)
                      : reflection.GetDouble(message, field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return repeated ? reflection.GetRepeatedBool(message, field, index)
                      : reflection.GetBool(message, field);
    case FieldDescriptor::CPPTYPE_STRING:
      return repeated ? reflection.GetRepeatedString(message, field, index)
                      : reflection.GetString(message, field);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return MessageJson(repeated ? reflection.GetRepeatedMessage(message, field, index)
                                  : reflection.GetMessage(message, field));
    default:  // types that status.proto does not use
      return nullptr;
  }
}

Json MessageJson(const Message& message) {
  Json object = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    if (field->is_repeated()) {
      Json list = Json::array();
      for (int j = 0; j < message.GetReflection()->FieldSize(message, field); ++j) {
        list.push_back(FieldJson(message, field, j));
      }
      object[field->name()] = std::move(list);
    } else if (!field->has_presence() || message.GetReflection()->HasField(message, field)) {
      object[field->name()] = FieldJson(message, field, 0);
    }
  }
  return object;
}

}  // namespace

std::string StatusText(const std::vector<v1::ServerStatus>& statuses) {
  std::string text;
  for (const v1::ServerStatus& server : statuses) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", ServerLines(server));
    for (const v1::RunStatus& run : server.runs()) {
      absl::StrAppend(&text, RunLines(run), "\n", RankTable(run), "\n", MatrixTable(run));
    }
  }
  return text;
}

Json StatusJson(const std::vector<v1::ServerStatus>& statuses) {
  Json servers = Json::array();
  for (const v1::ServerStatus& server : statuses) servers.push_back(MessageJson(server));
  return {{"servers", std::move(servers)}};
}

}  // namespace stiefel
