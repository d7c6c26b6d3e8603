// The narrow seam to the operating system: every change to the disk that a save makes passes through FileSystem, so
// that a test can fail any single operation, or die in it. Errors name the path, the bytes, the free bytes and errno.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "data/file.h"

class FileSystem {
 public:
  /// Asked before each operation ("create", "allocate", "write", "sync", "close", "mkdir", "rename", "remove"): 0 lets
  /// it happen, an errno makes it fail with that. Also how one hears that work goes on.
  using Fault = std::function<int(const char* operation, const std::filesystem::path& path)>;

  FileSystem() = default;
  explicit FileSystem(Fault fault) : fault_(std::move(fault)) {}

  /// An empty file, open for writing only: several hosts may write parts of one page of it, and an NFS client that may
  /// read would fill up the page with what it knows, and write that back. An old file is emptied.
  FileHandle create(const std::filesystem::path& path) const;
  /// An existing file, open for writing only.
  FileHandle open(const std::filesystem::path& path) const;
  /// Makes the file `size_bytes` long with its blocks reserved, so that a full disk is seen now and not half-way.
  void allocate(const FileHandle& file, const std::filesystem::path& path, int64_t size_bytes) const;
  /// All of `bytes` at `offset`. Thread-safe.
  void write(const FileHandle& file, const std::filesystem::path& path, int64_t offset, std::string_view bytes) const;
  void sync(const FileHandle& file, const std::filesystem::path& path) const;
  void close(FileHandle& file, const std::filesystem::path& path) const;

  /// create, write, sync, close.
  void write_file(const std::filesystem::path& path, std::string_view bytes) const;
  /// fsync of a file or directory by name.
  void sync_path(const std::filesystem::path& path) const;
  /// With its parents; one that exists is fine.
  void create_directories(const std::filesystem::path& path) const;
  /// Makes the directory and proves, with a file that goes away again, that it can be written.
  void check_writable(const std::filesystem::path& directory) const;
  /// Atomic within a file system; `to` must not exist, or be an empty directory.
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) const;
  /// A file, or a directory with all that is in it; symbolic links are not followed. None is fine.
  void remove_all(const std::filesystem::path& path) const;

 private:
  int fault(const char* operation, const std::filesystem::path& path) const {
    return fault_ ? fault_(operation, path) : 0;
  }

  Fault fault_;
};

/// Bytes that this user can still write on the disk that holds `path`; -1 when unknown.
int64_t free_bytes(const std::filesystem::path& path);
