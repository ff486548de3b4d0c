// A server process without its transport: backend, engine, and the one run that it may hold.
#ifndef STIEFEL_SERVER_OPTIMIZER_SERVER_H_
#define STIEFEL_SERVER_OPTIMIZER_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "server/engine.h"
#include "server/options.h"
#include "server/peer_transport.h"
#include "server/peer_workers.h"
#include "server/run_host.h"
#include "stiefel/v1/optimizer.pb.h"
#include "stiefel/v1/status.pb.h"

namespace stiefel {

// Thread-safe.
class OptimizerServer {
 public:
  // Fills in what the options leave to the machine. INVALID_ARGUMENT: options out of range, with
  // their values. The clock outlives the server, and so does `peers`, how it reaches other servers
  // of its run (null: matrices whose shards lie on several servers are refused, and it takes over
  // nothing that others hold).
  static absl::StatusOr<std::unique_ptr<OptimizerServer>> Create(ServerOptions options,
                                                                 const Clock* clock,
                                                                 PeerTransport* peers = nullptr);
  // REQUIRES: peers do not call it any more.
  ~OptimizerServer();

  // Without zeros that stand for defaults.
  const ServerOptions& options() const { return options_; }

  v1::ServerInfo Info() const;

  // The same request again is answered already_open. FAILED_PRECONDITION: another run is held (both
  // are named, with the seconds until it is released); UNAVAILABLE: draining; else RunHost::Open's.
  absl::StatusOr<v1::OpenRunResponse> OpenRun(const v1::OpenRunRequest& request);

  // The run, to call and to stream to. NOT_FOUND: it is not open here, or is over.
  absl::StatusOr<std::shared_ptr<RunHost>> FindRun(const std::string& name) const;
  absl::StatusOr<std::shared_ptr<RunHost>> FindRun(uint64_t run_uid) const;

  // As RunHost::CloseRun; the run that ended last may be closed again.
  absl::StatusOr<v1::CloseRunResponse> CloseRun(const v1::CloseRunRequest& request);

  // `done` once, with hashes when nothing is being absorbed, on any thread.
  void GetStatus(const v1::GetStatusRequest& request,
                 std::function<void(v1::ServerStatus)> done) const;
  v1::ServerStatus StatusNow() const;

  // About four times a second: deadlines of the run, its release, the load.
  void Tick();

  // Told to stop: asks the leader to take the run's shards elsewhere, and opens nothing more; steps
  // go on. False: nobody could do it.
  bool AskToLeave();
  // Whether that is still to come: not refused, and the leader is there.
  bool Leaving() const;
  // The run went elsewhere; and its ranks were told (true also without a run).
  bool Away() const;
  bool Left() const;

  // Told to stop: opens and begins nothing more.
  void Drain();
  // As RunHost::Drained; true without a run.
  bool Drained() const;
  // Ends all streams.
  void Disconnect(const absl::Status& status);

  // The address as it was bound, for status.
  void set_address(std::string address);

 private:
  OptimizerServer(ServerOptions options, const Clock* clock, PeerTransport* peers)
      : options_(std::move(options)),
        clock_(clock),
        peers_(peers),
        started_at_(clock->NowMicros()) {}
  std::shared_ptr<RunHost> LiveRun() const;
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotOpen(const std::string& asked) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  ServerOptions options_;
  const Clock* const clock_;
  PeerTransport* const peers_;
  const int64_t started_at_;
  std::unique_ptr<Trace> trace_;  // null: none is written
  std::shared_ptr<Backend> backend_;
  std::unique_ptr<PeerWorkers> workers_;
  std::unique_ptr<Engine> engine_;

  mutable Mutex mutex_;
  std::shared_ptr<RunHost> run_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ended_uid_ ABSL_GUARDED_BY(mutex_) = 0;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::string address_ ABSL_GUARDED_BY(mutex_);
  double load_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t load_at_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t load_busy_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace stiefel

#endif  // STIEFEL_SERVER_OPTIMIZER_SERVER_H_
