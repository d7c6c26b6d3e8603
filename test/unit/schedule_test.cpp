#include "llama/schedule.h"

#include <gtest/gtest.h>

#include "layers/core/check.h"

namespace {

RunConfig::Schedule schedule(const char* name, int64_t warmup_steps, double min_lr_ratio = 0.1,
                             double decay_ratio = 0.2) {
  return {name, warmup_steps, min_lr_ratio, decay_ratio};
}

constexpr double kBase = 3e-4;
const char* const kAll[] = {"constant", "linear", "cosine", "wsd"};

TEST(Schedule, warmup_climbs_from_its_first_share_to_exactly_base) {
  for (const char* name : kAll) {
    const auto s = schedule(name, 10);
    EXPECT_DOUBLE_EQ(lr_at(s, kBase, 0, 100), kBase / 10) << name;
    EXPECT_DOUBLE_EQ(lr_at(s, kBase, 4, 100), kBase / 2) << name;
    EXPECT_EQ(lr_at(s, kBase, 9, 100), kBase) << name;
    EXPECT_EQ(lr_at(s, kBase, 10, 100), kBase) << name;
  }
}

TEST(Schedule, without_warmup_the_first_step_has_exactly_base) {
  for (const char* name : kAll) EXPECT_EQ(lr_at(schedule(name, 0), kBase, 0, 100), kBase) << name;
}

TEST(Schedule, the_last_step_has_exactly_the_minimum) {
  for (const char* name : {"linear", "cosine", "wsd"}) {
    for (const double ratio : {0.0, 0.1, 0.3, 0.7, 1.0}) {
      for (const int64_t steps : {2, 3, 10, 1000, 12345}) {
        for (const int64_t warmup : {int64_t{0}, int64_t{1}, steps / 3, steps / 2}) {
          EXPECT_EQ(lr_at(schedule(name, warmup, ratio), kBase, steps - 1, steps), kBase * ratio)
              << name << " " << ratio << " " << steps << " " << warmup;
        }
      }
    }
  }
  EXPECT_EQ(lr_at(schedule("constant", 3), kBase, 99, 100), kBase);
}

TEST(Schedule, linear_and_cosine_pass_through_their_middle) {
  // 101 steps without warm-up: step 50 is half way, (1 + 0.1) / 2 of base; step 25 a quarter: cosine (1 + cos 45) / 2.
  EXPECT_DOUBLE_EQ(lr_at(schedule("linear", 0), 1.0, 50, 101), 0.55);
  EXPECT_DOUBLE_EQ(lr_at(schedule("cosine", 0), 1.0, 50, 101), 0.55);
  EXPECT_DOUBLE_EQ(lr_at(schedule("linear", 0), 1.0, 25, 101), 0.1 + 0.9 * 0.75);
  EXPECT_DOUBLE_EQ(lr_at(schedule("cosine", 0), 1.0, 25, 101), 0.1 + 0.9 * (1 + std::sqrt(0.5)) / 2);
  // With 20 steps of warm-up the fall spans steps 20 .. 120.
  EXPECT_DOUBLE_EQ(lr_at(schedule("linear", 20), 1.0, 70, 121), 0.55);
  EXPECT_DOUBLE_EQ(lr_at(schedule("cosine", 20), 1.0, 70, 121), 0.55);
}

TEST(Schedule, wsd_is_flat_and_then_falls_over_its_last_share) {
  const auto s = schedule("wsd", 5, 0.0, 0.1);  // 10 of 100 steps fall
  EXPECT_EQ(lr_at(s, 1.0, 50, 100), 1.0);
  EXPECT_EQ(lr_at(s, 1.0, 89, 100), 1.0);
  EXPECT_DOUBLE_EQ(lr_at(s, 1.0, 90, 100), 0.9);
  EXPECT_DOUBLE_EQ(lr_at(s, 1.0, 94, 100), 0.5);
  EXPECT_EQ(lr_at(s, 1.0, 99, 100), 0.0);
  // 0.25 of 10 steps rounds to 3; a share below half a step still is the last step.
  EXPECT_EQ(lr_at(schedule("wsd", 0, 0.1, 0.25), 1.0, 6, 10), 1.0);
  EXPECT_LT(lr_at(schedule("wsd", 0, 0.1, 0.25), 1.0, 7, 10), 1.0);
  EXPECT_EQ(lr_at(schedule("wsd", 0, 0.1, 0.01), 1.0, 8, 10), 1.0);
  EXPECT_EQ(lr_at(schedule("wsd", 0, 0.1, 0.01), 1.0, 9, 10), 0.1);
}

TEST(Schedule, where_the_fall_has_one_step_it_has_the_end_and_a_single_step_has_base) {
  for (const char* name : {"linear", "cosine", "wsd"}) {
    EXPECT_EQ(lr_at(schedule(name, 9), 1.0, 8, 10), 1.0) << name;
    EXPECT_EQ(lr_at(schedule(name, 9, 0.1, 0.1), 1.0, 9, 10), 0.1) << name;
    EXPECT_EQ(lr_at(schedule(name, 0), 1.0, 0, 1), 1.0) << name;
  }
}

TEST(Schedule, never_climbs_after_the_warmup) {
  for (const char* name : kAll) {
    for (int64_t step = 8; step < 50; step++) {
      EXPECT_LE(lr_at(schedule(name, 7), 1.0, step, 50), lr_at(schedule(name, 7), 1.0, step - 1, 50)) << name << step;
      EXPECT_GE(lr_at(schedule(name, 7), 1.0, step, 50), 0.1);
    }
  }
}

TEST(Schedule, what_does_not_fit_is_refused) {
  EXPECT_THROW(validate_schedule(schedule("cosine", 10), 10), Error);
  EXPECT_NO_THROW(validate_schedule(schedule("cosine", 9), 10));
  EXPECT_THROW(validate_schedule(schedule("wsd", 9), 10), Error);
  EXPECT_NO_THROW(validate_schedule(schedule("wsd", 8), 10));
  EXPECT_THROW(validate_schedule(schedule("wsd", 0, 0.1, 1.0), 10), Error) << "it falls from the first step on";
  EXPECT_NO_THROW(validate_schedule(schedule("wsd", 1, 0.1, 0.9), 10));
  EXPECT_NO_THROW(validate_schedule(schedule("wsd", 0), 1));
  EXPECT_THROW(lr_at(schedule("cosine", 0), 1.0, 10, 10), Error);
  EXPECT_THROW(lr_at(schedule("cosine", 0), 1.0, -1, 10), Error);
}

}  // namespace
