// What a process did when, as a file in the Chrome trace event format: chrome://tracing and
// Perfetto (ui.perfetto.dev) open it.
#ifndef STIEFEL_COMMON_TRACE_H_
#define STIEFEL_COMMON_TRACE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"

namespace stiefel {

// Something that took from `begin` to `end`, in microseconds of RealClock(), which all processes of
// a machine share.
struct TraceSpan {
  std::string track;  // "push", "compute", "collective", "pull", "decision", "step"
  std::string name;   // the matrix, most often
  int64_t begin = 0;
  int64_t end = 0;
  int64_t step = 0;
  int64_t bytes = 0;   // 0: not said
  std::string detail;  // "refresh", "row-wise", ...; empty: none
};

// Spans of one track that overlap are shown on as many rows as they need. Thread-safe.
class Trace {
 public:
  // The newest spans are kept, so many; the file says how many older ones were left out.
  static constexpr size_t kMaxSpans = size_t{1} << 16;

  // Writes an empty trace at once, so that a path that cannot be written shows before the work.
  // Errors: those of AtomicFile::Create; a file of that name is replaced.
  static absl::StatusOr<std::unique_ptr<Trace>> Create(const std::string& path,
                                                       const std::string& process);
  // Writes what is not written yet.
  ~Trace();

  // How viewers call the process.
  void set_process(std::string process);

  // Cheap: no file is touched.
  void Add(TraceSpan span);
  // A step has ended: the next FlushIfDue writes.
  void EndStep();
  // Replaces the file, after a step's end and not more often than leaves the calling thread 95 % of
  // its time. Call it now and then, from a thread that may wait for the disk.
  absl::Status FlushIfDue();
  // Replaces the file with all spans.
  absl::Status Flush();

 private:
  Trace(std::string path, std::string process)
      : path_(std::move(path)), process_(std::move(process)) {}

  const std::string path_;

  Mutex writing_;  // one flush at a time; before mutex_
  Mutex mutex_;
  std::string process_ ABSL_GUARDED_BY(mutex_);
  std::deque<TraceSpan> spans_ ABSL_GUARDED_BY(mutex_);
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
  bool due_ ABSL_GUARDED_BY(mutex_) = false;
  bool unwritten_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t not_before_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The transfers of blocks, each in pieces that may travel on several streams: a span lasts from the
// first piece's begin to the last one's end. Keys are chosen by the caller. Thread-compatible.
class TransferSpans {
 public:
  // `track` of all spans. The trace outlives this.
  TransferSpans(Trace* trace, std::string track) : trace_(trace), track_(std::move(track)) {}

  // `bytes` of the block come into `stream`; the first call for a block names it.
  void Begin(int64_t block, const std::string& name, int64_t step, int64_t now);
  void Enter(int64_t stream, int64_t block, int64_t bytes, bool last);
  // All that entered the stream has left it: blocks whose last piece was among it are complete.
  void Leave(int64_t stream, int64_t now);
  // Adds `bytes` to a block that is not on a stream; `last`: it is complete.
  void Take(int64_t block, int64_t bytes, bool last, int64_t now);
  // The stream broke, or the attempt ended.
  void Forget(int64_t stream) { entered_.erase(stream); }
  void Clear();

 private:
  struct Open {
    std::string name;
    int64_t begin = 0;
    int64_t step = 0;
    int64_t bytes = 0;
  };
  Trace* const trace_;
  const std::string track_;
  std::map<int64_t, Open> open_;
  std::map<int64_t, std::vector<int64_t>> entered_;  // by stream: blocks whose last piece is on it
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_TRACE_H_
