#include "common/atomic_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace stiefel {
namespace {

absl::Status Errno(const std::string& path, const char* what) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path));
}

absl::Status Exists(const std::string& path) {
  return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status SyncFolder(const std::string& path) {
  const std::string folder = FolderOf(path);
  const int file = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return Errno(folder, "open");
  // EINVAL: a file system that has nothing to sync there.
  const bool synced = fsync(file) == 0 || errno == EINVAL;
  const absl::Status status = synced ? absl::OkStatus() : Errno(folder, "sync");
  close(file);
  return status;
}

absl::Status Rename(const std::string& from, const std::string& to, ExistingFile existing) {
  if (existing == ExistingFile::kRefuse) {
    if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) {
      return absl::OkStatus();
    }
    if (errno == EEXIST) return Exists(to);
    // A file system without that flag: the check and the rename are two operations there.
    if (errno != EINVAL && errno != ENOSYS) return Errno(to, "rename to");
    if (access(to.c_str(), F_OK) == 0) return Exists(to);
  }
  if (rename(from.c_str(), to.c_str()) != 0) return Errno(to, "rename to");
  return absl::OkStatus();
}

}  // namespace

AtomicFile::AtomicFile(std::string path, std::string temporary, int file, ExistingFile existing)
    : path_(std::move(path)), temporary_(std::move(temporary)), file_(file), existing_(existing) {}

absl::StatusOr<std::unique_ptr<AtomicFile>> AtomicFile::Create(const std::string& path,
                                                               ExistingFile existing) {
  static std::atomic<int64_t> number{0};
  if (path.empty()) return absl::InvalidArgumentError("the path of the file to write is empty");
  struct stat info;
  const bool exists = stat(path.c_str(), &info) == 0;
  if (exists && existing == ExistingFile::kRefuse) return Exists(path);
  // Replacing would put a file where a device or a folder was.
  if (exists && !S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " exists and is not a regular file"));
  }
  const std::string temporary = absl::StrCat(path, ".tmp-", getpid(), "-", number++);
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file < 0) return Errno(temporary, "create");
  return std::unique_ptr<AtomicFile>(new AtomicFile(path, temporary, file, existing));
}

AtomicFile::~AtomicFile() {
  close(file_);
  if (!published_) unlink(temporary_.c_str());
}

absl::Status AtomicFile::WriteAt(int64_t position, const void* data, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t put =
        pwrite(file_, static_cast<const char*>(data) + done, bytes - done, position + done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return Errno(temporary_, "write to");
    done += put;
  }
  return absl::OkStatus();
}

absl::Status AtomicFile::Publish() {
  if (fsync(file_) != 0) return Errno(temporary_, "sync");
  STIEFEL_RETURN_IF_ERROR(Rename(temporary_, path_, existing_));
  published_ = true;
  return SyncFolder(path_);
}

}  // namespace stiefel
