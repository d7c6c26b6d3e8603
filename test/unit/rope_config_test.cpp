// make_rope_table against inverse frequencies that transformers 5.24 (ROPE_INIT_FUNCTIONS, fp32) computes.
// Tolerance: the order of fp32 operations is transformers', so that only the power function of the two C libraries
// differs, by 1 ulp; a division after it makes that 2 ulp = 2 * 2^-23 at most.
#include <gtest/gtest.h>

#include <cmath>

#include "llama/config.h"
#include "test/hf_configs.h"

namespace {

struct Expected {
  size_t m;
  float inv_freq;
};

void expect_table(const RopeTable& table, size_t size, double attention_factor, const std::vector<Expected>& expected) {
  ASSERT_EQ(table.inv_freq.size(), size);
  EXPECT_NEAR(table.attention_factor, attention_factor, 1e-15 * attention_factor);
  for (const Expected& e : expected) {
    EXPECT_NEAR(table.inv_freq[e.m], e.inv_freq, 2 * 0x1p-23f * e.inv_freq) << "m = " << e.m;
  }
}

RopeConfig rope_of(const PublishedModel& model) {
  return parse_model_config(nlohmann::json::parse(model.v4), model.name).ropes.at(0);
}

RopeConfig base(const std::string& type, double theta, int64_t rotary_dim, int64_t P) {
  RopeConfig rope;
  rope.type = type;
  rope.theta = theta;
  rope.rotary_dim = rotary_dim;
  rope.max_position_embeddings = P;
  return rope;
}

}  // namespace

TEST(RopeTable, default_is_theta_to_the_minus_2m_over_r) {
  expect_table(make_rope_table(base("default", 1e4, 128, 4096), 10), 64, 1,
               {{0, 1}, {1, 0.865964353f}, {31, 0.0115478197f}, {63, 0.000115478193f}});
  expect_table(make_rope_table(base("default", 5e6, 128, 4096), 10), 64, 1,
               {{0, 1}, {1, 0.785830021f}, {31, 0.000569097116f}, {63, 2.54507967e-07f}});
}

TEST(RopeTable, linear_divides_by_the_factor) {
  RopeConfig rope = base("linear", 1e4, 128, 4096);
  rope.factor = 4;
  expect_table(make_rope_table(rope, 10), 64, 1,
               {{0, 0.25f}, {1, 0.216491088f}, {31, 0.00288695493f}, {63, 2.88695483e-05f}});
}

TEST(RopeTable, dynamic_grows_theta_with_the_longest_document_beyond_P) {
  RopeConfig rope = base("dynamic", 1e4, 128, 2048);
  rope.factor = 2;
  EXPECT_TRUE(rope.depends_on_length());
  const std::vector<Expected> plain = {{0, 1}, {1, 0.865964353f}, {31, 0.0115478197f}, {63, 0.000115478193f}};
  expect_table(make_rope_table(rope, 1), 64, 1, plain);
  expect_table(make_rope_table(rope, 2048), 64, 1, plain);
  expect_table(make_rope_table(rope, 5000), 64, 1,
               {{0, 1}, {1, 0.847517073f}, {31, 0.00592382951f}, {63, 2.9740866e-05f}});
}

TEST(RopeTable, llama3_keeps_short_waves_divides_long_ones_and_blends_between) {
  expect_table(make_rope_table(rope_of(kLlama31_8B), 10), 64, 1,
               {{0, 1},
                {28, 0.00321144611f},
                {29, 0.00216657063f},
                {30, 0.00137189368f},
                {32, 0.000524846022f},
                {34, 0.000178507791f},
                {35, 9.55621217e-05f},
                {63, 3.06892588e-07f}});
  expect_table(make_rope_table(rope_of(kLlama32_1B), 10), 32, 1,
               {{14, 0.00321144611f},
                {15, 0.00129054801f},
                {16, 0.000429556705f},
                {17, 9.70828623e-05f},
                {18, 1.94616387e-05f},
                {31, 9.41830649e-08f}});
}

TEST(RopeTable, yarn_interpolates_slow_dimensions_only) {
  expect_table(make_rope_table(rope_of(kQwen25_7B), 10), 64, 1.138629436111989,
               {{0, 1},
                {20, 0.0133352149f},
                {24, 0.00537532149f},
                {30, 0.00106436096f},
                {35, 0.000246258394f},
                {45, 1.51074091e-05f},
                {63, 3.10234441e-07f}});
}

TEST(RopeTable, yarn_without_truncation_ramps_between_fractional_dimensions) {
  RopeConfig rope = base("yarn", 150000, 64, 131072);
  rope.factor = 32;
  rope.original_max_position_embeddings = 4096;
  rope.truncate = false;
  expect_table(make_rope_table(rope, 10), 32, 1.3465735902799727,
               {{0, 1}, {8, 0.0508132726f}, {10, 0.0193349998f}, {16, 0.000456483918f}, {31, 3.0235114e-07f}});
}

TEST(RopeTable, yarn_takes_its_factor_from_the_lengths_when_null) {
  RopeConfig rope = base("yarn", 1e4, 64, 32768);
  rope.original_max_position_embeddings = 4096;
  expect_table(make_rope_table(rope, 10), 32, 1.2079441541679836,
               {{0, 1}, {10, 0.0562341288f}, {16, 0.00596153876f}, {23, 0.000166690181f}, {31, 1.66690188e-05f}});
}

TEST(RopeTable, yarn_temperature_follows_attention_factor_then_both_mscales_then_the_factor) {
  RopeConfig rope = base("yarn", 1e4, 64, 163840);
  rope.factor = 40;
  rope.original_max_position_embeddings = 4096;
  rope.mscale = rope.mscale_all_dim = 1;
  expect_table(make_rope_table(rope, 10), 32, 1,
               {{10, 0.0562341288f}, {16, 0.00550000044f}, {23, 3.3338034e-05f}, {31, 3.33380353e-06f}});
  rope.mscale = 0.707, rope.mscale_all_dim = 0.5;
  EXPECT_NEAR(make_rope_table(rope, 10).attention_factor, 1.064468903941252, 1e-15);
  rope.mscale_all_dim = 0;  // counts as not given
  EXPECT_NEAR(make_rope_table(rope, 10).attention_factor, 0.1 * std::log(40.0) + 1, 1e-15);
  rope.attention_factor = 0.9;
  EXPECT_EQ(make_rope_table(rope, 10).attention_factor, 0.9);
}

TEST(RopeTable, longrope_switches_lists_when_a_document_is_longer_than_O) {
  const RopeConfig rope = rope_of(kPhi3_mini_128k);
  EXPECT_TRUE(rope.depends_on_length());
  expect_table(make_rope_table(rope, 4096), 48, 1.1902380714238083,
               {{0, 1}, {3, 0.562341332f}, {4, 0.429776728f}, {20, 0.0153888222f}, {47, 6.24498716e-05f}});
  expect_table(make_rope_table(rope, 4097), 48, 1.1902380714238083,
               {{0, 0.92592591f}, {3, 0.145307839f}, {4, 0.0959005877f}, {20, 0.000933464034f}, {47, 1.85050783e-06f}});
}

TEST(RopeTable, longrope_does_not_scale_when_the_lengths_are_equal) {
  RopeConfig rope = rope_of(kPhi3_mini_128k);
  rope.max_position_embeddings = rope.original_max_position_embeddings;
  EXPECT_EQ(make_rope_table(rope, 10).attention_factor, 1);
}

TEST(RopeTable, frequencies_that_fp32_cannot_hold_are_an_error) {
  EXPECT_THROW(make_rope_table(base("default", 1e300, 128, 4096), 1), Error);
  RopeConfig rope = base("linear", 1e4, 128, 4096);
  rope.factor = 1e-300;
  EXPECT_THROW(make_rope_table(rope, 1), Error);
  EXPECT_THROW(make_rope_table(base("mrope", 1e4, 128, 4096), 1), Error);
}
