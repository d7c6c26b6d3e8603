#include "data/file_system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "layers/core/check.h"

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_operation(const char* operation, const fs::path& path, int error, int64_t size_bytes = -1) {
  std::string numbers, remedy;
  if (size_bytes >= 0) numbers = fmt::format(" ({} bytes; {} free on its disk)", size_bytes, free_bytes(path));
  if (error == ENOSPC || error == EDQUOT) remedy = "; free space, or choose a directory on another disk";
  if (error == EFBIG) remedy = "; raise the file size limit (ulimit -f), or choose a directory on another disk";
  if (error == EACCES || error == EPERM || error == EROFS) remedy = "; choose a directory that this user may write";
  fail("cannot {} '{}'{}: {}{}", operation, path.string(), numbers, std::strerror(error), remedy);
}

/// Repeats a system call that a signal interrupted.
template <class Call>
auto retry(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

FileHandle open_file(const fs::path& path, int flags) {
  return FileHandle(retry([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); }));
}

}  // namespace

FileHandle FileSystem::create(const fs::path& path) const {
  if (const int error = fault("create", path)) fail_operation("create", path, error);
  FileHandle file = open_file(path, O_WRONLY | O_CREAT | O_TRUNC);
  if (!file) fail_operation("create", path, errno);
  return file;
}

FileHandle FileSystem::open(const fs::path& path) const {
  FileHandle file = open_file(path, O_WRONLY);
  if (!file) fail_operation("open for writing", path, errno);
  return file;
}

void FileSystem::allocate(const FileHandle& file, const fs::path& path, int64_t size_bytes) const {
  if (const int error = fault("allocate", path)) fail_operation("allocate", path, error, size_bytes);
  if (size_bytes == 0) return;
  // Asked first, because a file system may fill itself before it says that there is not enough.
  const int64_t available = free_bytes(path);
  if (available >= 0 && available < size_bytes) fail_operation("allocate", path, ENOSPC, size_bytes);
  if (retry([&] { return ::fallocate(file.fd(), 0, 0, size_bytes); }) == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS) fail_operation("allocate", path, errno, size_bytes);
  // A file system that cannot reserve blocks (NFS): at least the length.
  if (retry([&] { return ::ftruncate(file.fd(), size_bytes); }) != 0) {
    fail_operation("allocate", path, errno, size_bytes);
  }
}

void FileSystem::write(const FileHandle& file, const fs::path& path, int64_t offset, std::string_view bytes) const {
  if (const int error = fault("write", path)) {
    fail_operation("write", path, error, static_cast<int64_t>(bytes.size()));
  }
  while (!bytes.empty()) {
    const ssize_t written = retry([&] { return ::pwrite(file.fd(), bytes.data(), bytes.size(), offset); });
    if (written <= 0) {
      fail_operation("write", path, written < 0 ? errno : ENOSPC, static_cast<int64_t>(bytes.size()));
    }
    bytes.remove_prefix(static_cast<size_t>(written));
    offset += written;
  }
}

void FileSystem::sync(const FileHandle& file, const fs::path& path) const {
  if (const int error = fault("sync", path)) fail_operation("sync", path, error);
  if (retry([&] { return ::fsync(file.fd()); }) == 0) return;
  struct stat status;
  const int error = errno;
  const bool is_directory = ::fstat(file.fd(), &status) == 0 && S_ISDIR(status.st_mode);
  if (error == EINVAL && is_directory) return;  // some network file systems keep directories in order by themselves
  fail_operation("sync", path, error);
}

void FileSystem::close(FileHandle& file, const fs::path& path) const {
  if (const int error = fault("close", path)) fail_operation("close", path, error);
  // Linux has closed the descriptor even where close() says EINTR; delayed write errors (NFS) are reported here.
  if (::close(file.release()) != 0 && errno != EINTR) fail_operation("close", path, errno);
}

void FileSystem::write_file(const fs::path& path, std::string_view bytes) const {
  FileHandle file = create(path);
  write(file, path, 0, bytes);
  sync(file, path);
  close(file, path);
}

void FileSystem::sync_path(const fs::path& path) const {
  FileHandle file = open_file(path, O_RDONLY);
  if (!file) fail_operation("open", path, errno);
  sync(file, path);
}

void FileSystem::create_directories(const fs::path& path) const {
  if (const int error = fault("mkdir", path)) fail_operation("make the directory", path, error);
  std::error_code error;
  fs::create_directories(path, error);
  if (error) fail_operation("make the directory", path, error.value());
}

void FileSystem::check_writable(const fs::path& directory) const {
  create_directories(directory);
  const fs::path probe = directory / ".write_test";
  write_file(probe, "");
  remove_all(probe);
}

void FileSystem::rename(const fs::path& from, const fs::path& to) const {
  if (const int error = fault("rename", to)) fail_operation("rename to", to, error);
  if (::rename(from.c_str(), to.c_str()) != 0) fail_operation("rename to", to, errno);
}

void FileSystem::remove_all(const fs::path& path) const {
  std::error_code error;
  if (fs::is_directory(fs::symlink_status(path, error))) {
    std::vector<fs::path> entries;  // removing while iterating is unspecified
    for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
      entries.push_back(it->path());
    }
    if (error) fail_operation("list", path, error.value());
    for (const fs::path& entry : entries) remove_all(entry);
  }
  if (const int injected = fault("remove", path)) fail_operation("remove", path, injected);
  fs::remove(path, error);
  if (error) fail_operation("remove", path, error.value());
}

int64_t free_bytes(const fs::path& path) {
  struct statvfs status;
  if (::statvfs(path.c_str(), &status) != 0 && ::statvfs(fs::absolute(path).parent_path().c_str(), &status) != 0) {
    return -1;
  }
  if (status.f_blocks == 0) return -1;
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}
