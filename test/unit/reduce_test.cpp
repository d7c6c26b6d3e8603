#include "layers/reduce.h"

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

HostTensor random(DType dtype, int64_t n, uint64_t seed) {
  HostTensor x(DType::F64, {n}, "x");
  return x.fill_normal(seed, 3.0, 1.0).to(dtype);
}

double sum_of_squares(Device& device, ConstTensor x) {
  HostTensor sum(DType::F64, {1}, "sum");
  add_sum_of_squares(device, sum, x);
  return sum.get(0);
}

TEST(Reduce, residual_add_adds_every_element) {
  Device device = Device::cpu();
  for (const int64_t n : kFlatSizes) {
    const HostTensor a = random(DType::F32, n, 1), b = random(DType::F32, n, 2);
    HostTensor y(DType::F32, {n}, "y");
    residual_add(device, y, a, b);
    for (int64_t i = 0; i < n; i++) {
      ASSERT_EQ(y.get(i), static_cast<float>(a.get(i)) + static_cast<float>(b.get(i)));
    }
  }
}

// The gradient of y = a + b is dy for both a and b: the op is linear, so that a step of any size is exact.
TEST(Reduce, residual_add_has_slope_one_in_both_inputs) {
  Device device = Device::cpu();
  HostTensor a = random(DType::F64, 20, 1), b = random(DType::F64, 20, 2), y(DType::F64, {20}, "y");
  const HostTensor dy = random(DType::F64, 20, 3);
  const auto loss = [&] {
    residual_add(device, y, a, b);
    return dot(dy, y);
  };
  expect_gradient(a, dy, loss, "a");
  expect_gradient(b, dy, loss, "b");
}

TEST(Reduce, residual_add_may_write_over_either_input) {
  Device device = Device::cpu();
  for (const DType dtype : {DType::F32, DType::F64}) {
    HostTensor a = random(dtype, 5000, 1), b = random(dtype, 5000, 2), y(dtype, {5000}, "y");
    residual_add(device, y, a, b);
    HostTensor over_a = a, over_b = b;
    residual_add(device, over_a, over_a, b);
    residual_add(device, over_b, a, over_b);
    EXPECT_TRUE(over_a.bit_equal(y));
    EXPECT_TRUE(over_b.bit_equal(y));
  }
}

TEST(Reduce, sum_of_squares_is_exact_to_fp64_rounding) {
  Device device = Device::cpu();
  for (const DType dtype : {DType::F32, DType::F64}) {
    for (const int64_t n : kFlatSizes) {
      const HostTensor x = random(dtype, n, 1);
      long double exact = 0;
      for (int64_t i = 0; i < n; i++) exact += static_cast<long double>(x.get(i)) * x.get(i);
      const double expected = static_cast<double>(exact);
      // Positive addends: the error is at most eps times the longest chain, a lane or the pieces.
      EXPECT_NEAR(sum_of_squares(device, x), expected, 300 * 0x1p-53 * expected) << n;
    }
  }
}

TEST(Reduce, sum_of_squares_of_large_and_small_fp32_neither_overflows_nor_vanishes) {
  Device device = Device::cpu();
  HostTensor x(DType::F32, {1000}, "x");
  x.fill(1e30);
  EXPECT_NEAR(sum_of_squares(device, x) / (1000 * 1e30 * 1e30), 1.0, 1e-6);
  x.fill(1e-30);
  EXPECT_NEAR(sum_of_squares(device, x) / (1000 * 1e-30 * 1e-30), 1.0, 1e-6);
  x.set(777, std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(std::isnan(sum_of_squares(device, x)));
}

TEST(Reduce, sums_of_squares_accumulate) {
  Device device = Device::cpu();
  HostTensor sum(DType::F64, {1}, "sum"), x(DType::F32, {2}, "x"), y(DType::F64, {1}, "y");
  x.set(0, 3), x.set(1, -4), y.set(0, 12);
  sum.set(0, 0.5);
  add_sum_of_squares(device, sum, x);
  EXPECT_EQ(sum.get(0), 25.5);
  add_sum_of_squares(device, sum, y);
  EXPECT_EQ(sum.get(0), 169.5);
}

TEST(Reduce, bf16_is_added_in_fp32_and_rounded_once) {
  Device device = Device::cpu();
  for (const int64_t n : {1, 300, 5000}) {
    for (const DType of_sum : {DType::F32, DType::BF16}) {
      for (const DType of_parts : {DType::F32, DType::BF16}) {
        HostTensor parts(of_parts, {3 * n}, "parts"), sum(of_sum, {n}, "sum");
        parts.fill_normal(1), sum.fill_normal(2);
        HostTensor same = sum.to(DType::F32);
        const HostTensor wide = parts.to(DType::F32);
        add_parts(device, sum, parts, 3);
        add_parts(device, same, wide, 3);
        EXPECT_TRUE(sum.bit_equal(same.to(of_sum))) << n << name_of(of_sum) << name_of(of_parts);
      }
    }
  }
}

TEST(Reduce, squares_of_bf16_are_added_in_fp64) {
  Device device = Device::cpu();
  HostTensor x(DType::BF16, {5000}, "x"), sum(DType::F64, {1}, "sum"), same(DType::F64, {1}, "same");
  x.fill_normal(1);
  add_sum_of_squares(device, sum, x);
  add_sum_of_squares(device, same, x.to(DType::F32));
  EXPECT_EQ(sum.get(0), same.get(0));
}

TEST(Reduce, conversions_round_to_nearest_even) {
  Device device = Device::cpu();
  for (const DType from : {DType::F32, DType::F64, DType::BF16}) {
    for (const DType to : {DType::F32, DType::F64, DType::BF16}) {
      for (const int64_t n : kFlatSizes) {
        const HostTensor x = random(from, n, 1);
        HostTensor y(to, {n}, "y");
        convert(device, y, x);
        EXPECT_TRUE(y.bit_equal(x.to(to))) << name_of(from) << " to " << name_of(to) << " " << n;
      }
    }
  }
  const float ties[][2] = {{1 + 0x1p-8f, 1}, {1 + 0x3p-8f, 1 + 0x1p-6f}, {-1 - 0x1p-8f - 0x1p-20f, -1 - 0x1p-7f}};
  for (const auto& [value, rounded] : ties) {
    HostTensor x(DType::F32, {1}, "x"), y(DType::BF16, {1}, "y");
    x.set(0, value);
    convert(device, y, x);
    EXPECT_EQ(y.get(0), rounded);
  }
}

TEST(Reduce, threads_change_no_bit) {
  Device device = Device::cpu();
  for (const int64_t n : kFlatSizes) {
    const HostTensor a = random(DType::F32, n, 1), b = random(DType::F32, n, 2);
    HostTensor one(DType::F32, {n}, "y");
    double one_sum = 0;
    with_threads(1, [&] { residual_add(device, one, a, b), one_sum = sum_of_squares(device, a); });
    for (const int threads : {2, 3}) {
      HostTensor many(DType::F32, {n}, "y");
      double sum = 0;
      with_threads(threads, [&] { residual_add(device, many, a, b), sum = sum_of_squares(device, a); });
      EXPECT_TRUE(many.bit_equal(one)) << n << " " << threads;
      EXPECT_EQ(sum, one_sum) << n << " " << threads;
    }
  }
}

TEST(Reduce, contract_violations_are_named) {
  Device device = Device::cpu();
  HostTensor a(DType::F32, {4}, "a"), b(DType::F32, {2, 2}, "b"), half(DType::F16, {4}, "half");
  EXPECT_EQ(error_of([&] { residual_add(device, a, a, b); }), "residual_add: b ('b') is F32 (2, 2), expected F32 (4)");
  EXPECT_EQ(error_of([&] { sum_of_squares(device, half); }),
            "add_sum_of_squares: dtype F16 is not supported on the CPU device, use F32");
  EXPECT_EQ(error_of([&] { add_sum_of_squares(device, a, b); }),
            "add_sum_of_squares: sum ('a') is F32 (4), expected F64 (1)");
  HostTensor parts(DType::F64, {8}, "parts");
  EXPECT_EQ(error_of([&] { add_parts(device, a, parts, 2); }), "add_parts: parts of F64 for a sum of F32");
  EXPECT_EQ(error_of([&] { convert(device, a, b); }), "convert: to ('a') is F32 (4), expected F32 (2, 2)");
  EXPECT_EQ(error_of([&] { convert(device, a, half); }),
            "convert: dtype F16 is not supported on the CPU device, use F32");
}

}  // namespace
