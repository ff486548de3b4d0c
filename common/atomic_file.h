#ifndef STIEFEL_COMMON_ATOMIC_FILE_H_
#define STIEFEL_COMMON_ATOMIC_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace stiefel {

// What becomes of a file that already has the name.
enum class ExistingFile { kRefuse, kReplace };

// A file that is written under a temporary name beside its own (PATH.tmp-PID-NUMBER) and takes its
// own name only when it is whole and on the disk. Whoever opens the path sees the old contents or
// the new, never a part; a kill leaves at most the temporary behind.
class AtomicFile {
 public:
  // The file is there at once, so that a folder that cannot be written shows before the work and
  // not after it. ALREADY_EXISTS with kRefuse where the path exists; NOT_FOUND (no such folder),
  // PERMISSION_DENIED and the like, with the path; INVALID_ARGUMENT where the path is empty, or
  // something else than a file is there.
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(const std::string& path,
                                                            ExistingFile existing);
  // Removes the temporary unless it was published.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Thread-safe where the ranges do not overlap. RESOURCE_EXHAUSTED on a full disk, and the like.
  absl::Status WriteAt(int64_t position, const void* data, int64_t bytes);

  // Syncs, renames and syncs the folder; once, after all writes. ALREADY_EXISTS with kRefuse where
  // the path exists by now. After an error the path is as it was; only a failed sync of the folder
  // leaves open which of the two a crash of the machine would leave.
  absl::Status Publish();

 private:
  AtomicFile(std::string path, std::string temporary, int file, ExistingFile existing);

  const std::string path_, temporary_;
  const int file_;
  const ExistingFile existing_;
  bool published_ = false;
};

}  // namespace stiefel

#endif  // STIEFEL_COMMON_ATOMIC_FILE_H_
