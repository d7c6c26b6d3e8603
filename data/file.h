// Files as they are read: by position, exactly the bytes asked for or an Error. Data files are never mapped, so that a
// file that shrinks during the run is an error with a name and not a SIGBUS; our own indexes are.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "layers/core/check.h"
#include "layers/core/log.h"

static_assert(std::endian::native == std::endian::little, "every binary format here is little-endian");

/// Called while data are prepared: done, total (in bytes or documents), and what is being done to which file.
using DataProgress = std::function<void(int64_t done, int64_t total, Progress::Unit unit, const std::string& label)>;

/// Owns a file descriptor.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int fd) : fd_(fd) {}
  FileHandle(FileHandle&& other) noexcept : fd_(other.release()) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileHandle();

  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// A regular file, open for reading.
class InputFile {
 public:
  explicit InputFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }
  int64_t modified_ns() const { return modified_ns_; }  ///< since the epoch

  /// Bytes [offset, offset + size) into `to`. Thread-safe.
  void read(int64_t offset, int64_t size_bytes, void* to) const;
  /// Pages of it that this host keeps in memory are dropped.
  void forget_cached() const;

 private:
  std::filesystem::path path_;
  FileHandle fd_;
  int64_t size_bytes_ = 0;
  int64_t modified_ns_ = 0;
};

/// A small file as a string; an Error when it is longer than `max_bytes`.
std::string read_file(const std::filesystem::path& path, int64_t max_bytes = int64_t{100} << 20);

/// A whole file in memory on demand. Only for files that nobody changes in place.
class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(const FileHandle& fd, int64_t size_bytes, const std::filesystem::path& path);
  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~MappedFile();

  const char* data() const { return static_cast<const char*>(data_); }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

/// `count` elements of type T from byte `offset` of a file, one after another through a small buffer.
template <class T>
class ArrayReader {
 public:
  ArrayReader(const InputFile& file, int64_t offset, int64_t count) : file_(file), offset_(offset), left_(count) {}

  T next() {
    if (at_ == buffer_.size()) fill();
    return buffer_[at_++];
  }

 private:
  static constexpr int64_t kBufferElements = 1 << 16;

  void fill() {
    const int64_t n = std::min(left_, kBufferElements);
    CHECK(n > 0, "{}: read past the end of an array", file_.path().string());
    buffer_.resize(static_cast<size_t>(n));
    file_.read(offset_, n * static_cast<int64_t>(sizeof(T)), buffer_.data());
    offset_ += n * static_cast<int64_t>(sizeof(T));
    left_ -= n;
    at_ = 0;
  }

  const InputFile& file_;
  int64_t offset_, left_;
  std::vector<T> buffer_;
  size_t at_ = 0;
};
