// Kernels with a known fault, and legal kernels that look suspicious (faults.cu), for the test of the SIMT runtime.
#pragma once

#include <vector>

/// A kernel that is wrong. `run` throws Error when the fault shows: by a report of the runtime, or as "wrong result".
struct Fault {
  const char* name;
  void (*run)();
  // What each build must say (a regular expression); null: this build cannot see it.
  const char* plain;
  const char* asan;
  const char* check;
};
const std::vector<Fault>& faults();

/// A kernel that is right; `run` throws Error when it is not left in peace or gives a wrong result.
struct Idiom {
  const char* name;
  void (*run)();
};
const std::vector<Idiom>& idioms();
