// dtype, tensor, arena, rng, parallel: what every other part rests on.
#include <omp.h>

#include <cmath>
#include <limits>
#include <set>

#include "layers/core/arena.h"
#include "layers/core/parallel.h"
#include "layers/core/rng.h"
#include "test/testing.h"

namespace {

TEST(Bf16, rounds_to_nearest_even_and_keeps_nan_and_infinity) {
  EXPECT_EQ(static_cast<float>(bf16(1.0f)), 1.0f);
  EXPECT_EQ(static_cast<float>(bf16(1.0f + 0x1p-8f)), 1.0f);               // a tie goes to the even mantissa
  EXPECT_EQ(static_cast<float>(bf16(1.0f + 0x3p-8f)), 1.0f + 0x2p-7f);     // and here that is up
  EXPECT_EQ(static_cast<float>(bf16(1.0f + 0x1.02p-8f)), 1.0f + 0x1p-7f);  // above the tie
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isinf(static_cast<float>(bf16(std::numeric_limits<float>::infinity()))));
  EXPECT_TRUE(std::isinf(static_cast<float>(bf16(std::numeric_limits<float>::max()))));
}

TEST(Tensor, views_check_shape_and_dtype) {
  HostTensor t(DType::F32, {4, 3}, "weights");
  const Tensor v = t;
  EXPECT_EQ(v.rows(1, 2).shape, (Shape{2, 3}));
  EXPECT_EQ(v.rows(1, 2).as<float>(), v.as<float>() + 3);
  EXPECT_EQ(v.reshaped({2, 6}).shape.str(), "(2, 6)");
  EXPECT_EQ(error_of([&] { v.reshaped({5, 3}); }), "tensor 'weights' (4, 3) cannot be viewed as (5, 3)");
  EXPECT_EQ(error_of([&] { v.as<double>(); }), "tensor 'weights' (4, 3) is F32, expected F64");
  EXPECT_EQ(error_of([&] { v.rows(3, 2); }), "rows [3, 5) of tensor 'weights' (4, 3)");
}

TEST(Arena, measuring_and_placing_agree_and_overflow_is_named) {
  Device device = Device::cpu();
  const auto build = [](Arena& arena) {
    std::vector<Tensor> tensors = {arena.place(DType::F32, {10, 3}, "a")};
    const size_t mark = arena.mark();
    tensors.push_back(arena.place(DType::F64, {100}, "b"));
    arena.rewind(mark);
    tensors.push_back(arena.place(DType::F32, {7}, "c"));
    return tensors;
  };
  Arena measure;
  build(measure);
  EXPECT_EQ(measure.peak_bytes(), 256u + 1024u);
  Arena arena(device, measure.peak_bytes());
  const auto tensors = build(arena);
  EXPECT_EQ(tensors[1].data, tensors[2].data);
  EXPECT_EQ(static_cast<char*>(tensors[1].data) - static_cast<char*>(tensors[0].data), 256);
  for (int64_t i = 0; i < 30; i++) EXPECT_EQ(tensors[0].as<float>()[i], 0.0f);
  arena.begin_section("extra");
  EXPECT_EQ(error_of([&] { arena.place(DType::F32, {1000}, "d"); }),
            "the arena is full: 'd' F32 (1000) of section 'extra' needs 4096 bytes, 512 of 1280 are used (the plan and "
            "the run differ)");
}

// Known answers of Philox4x32-10 (Random123's kat_vectors): counter and key all zero, and all one.
TEST(Rng, philox_gives_the_published_values) {
  EXPECT_EQ(Philox(0, 0).words(0), (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(Philox(~uint64_t{0}, ~uint64_t{0}).words(~uint64_t{0}),
            (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(Rng, normal_has_mean_zero_and_variance_one) {
  const Philox rng(1, 2);
  double sum = 0, squares = 0;
  constexpr int kN = 200000;
  for (uint64_t i = 0; i < kN; i++) sum += rng.normal(i), squares += rng.normal(i) * rng.normal(i);
  EXPECT_NEAR(sum / kN, 0.0, 4 / std::sqrt(kN));
  EXPECT_NEAR(squares / kN, 1.0, 4 * std::sqrt(2.0 / kN));
}

TEST(Parallel, every_item_is_visited_once_for_any_number_of_threads) {
  const int threads = omp_get_max_threads();
  for (const int n : {1, 2, 5}) {
    omp_set_num_threads(n);
    for (const int64_t items : {0, 1, 7, 100}) {
      std::vector<int> visits(static_cast<size_t>(items), 0);
      parallel_for(items, 3, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) visits[static_cast<size_t>(i)]++;
      });
      for (const int v : visits) EXPECT_EQ(v, 1);
    }
  }
  omp_set_num_threads(threads);
}

}  // namespace
