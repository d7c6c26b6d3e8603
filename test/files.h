// Helpers of the tests that touch files: a directory that goes away, bytes in and out, and the message of an Error.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "layers/core/check.h"

/// A new directory that is removed at the end of the test; in memory where possible, because fsync of a disk is slow.
class TempDir {
 public:
  TempDir() {
    const bool in_memory = access("/dev/shm", W_OK | X_OK) == 0;
    const std::filesystem::path parent = in_memory ? "/dev/shm" : testing::TempDir();
    std::string pattern = (parent / "train_gpt_XXXXXX").string();
    CHECK(mkdtemp(pattern.data()), "mkdtemp('{}') failed", pattern);
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

/// The message of the Error that `body` throws, with every `hide` (a path, say) shown as "@"; "" when it throws none.
template <class Body>
std::string error_of(Body&& body, const std::filesystem::path& hide = {}) {
  std::string message;
  try {
    body();
  } catch (const Error& e) {
    message = e.what();
  }
  const std::string from = hide.string();
  if (from.empty()) return message;
  std::string shown;
  size_t begin = 0;
  for (size_t at; (at = message.find(from, begin)) != std::string::npos; begin = at + from.size()) {
    shown.append(message, begin, at - begin).push_back('@');
  }
  return shown.append(message, begin);
}
