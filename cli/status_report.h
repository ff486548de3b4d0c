#ifndef STIEFEL_CLI_STATUS_REPORT_H_
#define STIEFEL_CLI_STATUS_REPORT_H_

#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "stiefel/v1/status.pb.h"

namespace stiefel {

// Tables for people: each server, its run, who is awaited, the trainers, and the matrices that the
// server owns.
std::string StatusText(const std::vector<v1::ServerStatus>& statuses);

// {"servers": [...]}: every field of ServerStatus under its name in status.proto. Numbers are
// numbers, fixed64 values (identities and hashes) 16 hexadecimal digits; optional fields that are
// unset are absent.
nlohmann::ordered_json StatusJson(const std::vector<v1::ServerStatus>& statuses);

}  // namespace stiefel

#endif  // STIEFEL_CLI_STATUS_REPORT_H_
