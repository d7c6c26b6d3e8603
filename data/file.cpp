#include "data/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

FileHandle::~FileHandle() {
  if (fd_ >= 0) ::close(fd_);
}

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a named pipe must not wait for a writer; it has no effect on a regular file.
  fd_ = FileHandle(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  CHECK(fd_, "cannot open '{}': {}{}", path_.string(), std::strerror(errno),
        errno == EMFILE ? "; raise the limit with `ulimit -n`, or join the shards" : "");
  struct stat info {};
  CHECK(fstat(fd_.fd(), &info) == 0, "cannot examine '{}': {}", path_.string(), std::strerror(errno));
  CHECK(!S_ISDIR(info.st_mode), "'{}' is a directory, not a file", path_.string());
  CHECK(S_ISREG(info.st_mode), "'{}' is not a regular file; write the data to one, they are read more than once",
        path_.string());
  size_bytes_ = info.st_size;
  modified_ns_ = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

void InputFile::read(int64_t offset, int64_t size_bytes, void* to) const {
  char* out = static_cast<char*>(to);
  int64_t done = 0;
  while (done < size_bytes) {
    const ssize_t n = pread(fd_.fd(), out + done, static_cast<size_t>(size_bytes - done), offset + done);
    if (n < 0 && errno == EINTR) continue;
    CHECK(n >= 0, "cannot read '{}' at byte {}: {}", path_.string(), offset + done, std::strerror(errno));
    CHECK(n > 0, "'{}' ends at byte {}, but bytes {} to {} were there when it was opened; it was changed meanwhile",
          path_.string(), offset + done, offset, offset + size_bytes);
    done += n;
  }
}

void InputFile::forget_cached() const {
  posix_fadvise(fd_.fd(), 0, 0, POSIX_FADV_DONTNEED);
}

MappedFile::MappedFile(const FileHandle& fd, int64_t size_bytes, const std::filesystem::path& path)
    : size_bytes_(size_bytes) {
  if (size_bytes == 0) return;
  void* data = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ, MAP_SHARED, fd.fd(), 0);
  CHECK(data != MAP_FAILED, "cannot map '{}' ({} bytes): {}", path.string(), size_bytes, std::strerror(errno));
  data_ = data;
}

MappedFile::~MappedFile() {
  if (data_) munmap(data_, static_cast<size_t>(size_bytes_));
}

std::string read_file(const std::filesystem::path& path, int64_t max_bytes) {
  const InputFile file(path);
  CHECK(file.size_bytes() <= max_bytes, "'{}' has {} bytes, more than the {} that such a file may have", path.string(),
        file.size_bytes(), max_bytes);
  std::string text(static_cast<size_t>(file.size_bytes()), '\0');
  file.read(0, file.size_bytes(), text.data());
  return text;
}
