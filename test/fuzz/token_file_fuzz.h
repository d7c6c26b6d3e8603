// What the fuzzers of binary formats share: files in memory, and reading all that an accepted file promises.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "data/token_file.h"
#include "test/fuzz/scratch_directory.h"

/// A file without a disk; path() can be opened like any other.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    if (fd_ < 0 || write(fd_, data, size) != static_cast<ssize_t>(size)) std::abort();
  }
  MemoryFile(const MemoryFile&) = delete;
  ~MemoryFile() { close(fd_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

/// Indexes and reads `path`: an Error, or every document with as many tokens as the index says.
inline void read_token_file(const TokenPath& path) {
  static const std::string directory = scratch_directory("tokens");
  try {
    IndexCache cache(directory);
    TokenFile file(path, int64_t{1} << 31, cache, {});
    TokenScratch scratch;
    int64_t num_tokens = 0;
    for (int64_t d = 0; d < file.num_documents(); d++) {
      std::vector<int32_t> tokens(static_cast<size_t>(file.num_tokens(d))), labels(tokens);
      file.read(d, 0, file.num_tokens(d), tokens.data(), labels.data(), scratch);
      num_tokens += file.num_tokens(d);
    }
    if (num_tokens != file.stats().num_tokens) std::abort();
  } catch (const Error&) {
  }
  std::filesystem::remove_all(directory);
}
