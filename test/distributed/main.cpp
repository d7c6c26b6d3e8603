// main() of the tests of many ranks: every rank runs every test; rank 0 prints, and a failure of any rank is printed by
// it and fails the program.
#include <gtest/gtest.h>

#include <cstdio>

#include "test/distributed/world.h"

namespace {

std::unique_ptr<Communicator> the_world;

}  // namespace

Communicator& test_world() {
  return *the_world;
}

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  the_world = make_world_communicator(&argc, &argv);
  if (the_world->rank() > 0) {
    // Failures only, so that the lines of rank 0 can be counted.
    class Failures : public testing::EmptyTestEventListener {
      void OnTestPartResult(const testing::TestPartResult& result) override {
        if (!result.failed()) return;
        std::printf("rank %d: %s:%d: %s\n", test_world().rank(), result.file_name(), result.line_number(),
                    result.summary());
      }
    };
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new Failures);
  }
  const int status = RUN_ALL_TESTS();
  const bool failed = the_world->max(status) != 0;
  the_world.reset();
  return failed ? 1 : 0;
}
