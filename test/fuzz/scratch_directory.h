// Where fuzzers put files: in memory where there is such a place, which makes them ten times as fast.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>

inline std::string scratch_directory(const std::string& name) {
  const char* root = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
  return std::string(root) + "/train_gpt_fuzz_" + name + "." + std::to_string(getpid());
}
