// The test of the SIMT runtime: each detector fires on a kernel that is wrong, and none on kernels that are right.
#include "test/simt/faults.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>

#include "layers/core/check.h"
#include "test/simt/simt.h"

namespace {

const char* expected_of(const Fault& fault) {
  switch (simt_build()) {
    case SimtBuild::Plain:
      return fault.plain;
    case SimtBuild::Asan:
      return fault.asan;
    case SimtBuild::Check:
      return fault.check;
  }
  return nullptr;
}

/// In a process of its own, which a fault may end.
[[noreturn]] void run_and_exit(void (*run)()) {
  try {
    run();
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    _exit(1);
  }
  _exit(0);
}

TEST(SimtFaults, every_fault_is_found_by_the_builds_that_can_see_it) {
  for (const Fault& fault : faults()) {
    SCOPED_TRACE(fault.name);
    if (const char* expected = expected_of(fault)) {
      EXPECT_EXIT(run_and_exit(fault.run), testing::ExitedWithCode(1), expected);
    }
  }
}

TEST(SimtFaults, no_fault_is_invisible_to_all_builds) {
  for (const Fault& fault : faults()) EXPECT_TRUE(fault.plain || fault.asan || fault.check) << fault.name;
}

TEST(SimtFaults, legal_idioms_are_left_in_peace_in_every_schedule) {
  for (const Idiom& idiom : idioms()) {
    for (const uint64_t schedule : {kSimtAscending, kSimtDescending, uint64_t{7}, uint64_t{8}, uint64_t{9}}) {
      simt_options().schedule = schedule;
      try {
        idiom.run();
      } catch (const Error& e) {
        ADD_FAILURE() << idiom.name << ", schedule " << schedule << ": " << e.what();
      }
    }
  }
}

TEST(SimtFaults, the_runtime_survives_a_fault_in_its_process) {
  simt_options().schedule = kSimtAscending;
  for (const Fault& fault : faults()) {
    if (std::string(fault.name) == "read_one_past_the_end" || std::string(fault.name) == "barrier_against_warp") {
      EXPECT_THROW(fault.run(), Error) << fault.name;
    }
  }
  EXPECT_NO_THROW(idioms()[0].run());
}

}  // namespace
