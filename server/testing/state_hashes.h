#ifndef STIEFEL_SERVER_TESTING_STATE_HASHES_H_
#define STIEFEL_SERVER_TESTING_STATE_HASHES_H_

#include <cstdint>
#include <future>
#include <map>

#include "server/optimizer_server.h"

namespace stiefel::testing {

// Adds the hashes of the state that a server has committed, by matrix index.
inline void AddStateHashes(OptimizerServer* server, std::map<int32_t, uint64_t>* hashes) {
  v1::GetStatusRequest request;
  request.set_state_hash(true);
  std::promise<v1::ServerStatus> answer;
  server->GetStatus(request, [&answer](v1::ServerStatus s) { answer.set_value(s); });
  const v1::ServerStatus status = answer.get_future().get();
  for (const v1::RunStatus& run : status.runs()) {
    for (const v1::MatrixStatus& matrix : run.matrices()) {
      if (matrix.has_state_hash()) (*hashes)[matrix.index()] = matrix.state_hash();
    }
  }
}

}  // namespace stiefel::testing

#endif  // STIEFEL_SERVER_TESTING_STATE_HASHES_H_
