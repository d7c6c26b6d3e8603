// The CUDA kernels of elementwise sums, conversions and reductions, run on the CPU, against the CPU layer.
#include "layers/reduce.h"

#include <cmath>

#include "test/layer_cases.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr uint64_t kSchedules[] = {kSimtAscending, kSimtDescending, 11, 12};

HostTensor random(DType dtype, int64_t n, const char* name) {
  return HostTensor(dtype, {n}, name).fill_normal(1, 3.0, 1.0);
}

std::string describe(DType dtype, int64_t n, int64_t offset) {
  return fmt::format("{} ({}) offset {}", name_of(dtype), n, offset);
}

class ReduceCuda : public testing::Test {
 protected:
  ReduceCuda() { simt_options() = {}; }

  /// Calls op(dtype, n, offset): every size, aligned and not.
  template <class Op>
  void for_each_case(Op op) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t n : kFlatSizes) {
        for (const int64_t offset : {0, 1}) {
          SCOPED_TRACE(describe(dtype, n, offset));
          op(dtype, n, offset);
        }
      }
    }
  }

  double sum_of_squares(const HostTensor& x, int64_t offset = 0, double start = 0) {
    HostTensor sum(DType::F64, {1}, "sum");
    sum.set(0, start);
    DeviceTensor sum_(cuda, sum), x_(cuda, x, offset);
    add_sum_of_squares(cuda, sum_, x_);
    return sum_.to_host().get(0);
  }

  Device cpu = Device::cpu();
  Device cuda = Device::cuda(0);
};

// One addition in fp32, rounded once: nothing is left to differ.
TEST_F(ReduceCuda, residual_add_has_the_bits_of_the_cpu_layer) {
  for_each_case([&](DType dtype, int64_t n, int64_t offset) {
    const HostTensor a = random(dtype, n, "a"), b = random(dtype, n, "b");
    HostTensor expected(DType::F32, {n}, "expected");
    residual_add(cpu, expected, a.to(DType::F32), b.to(DType::F32));
    DeviceTensor a_(cuda, a, offset), b_(cuda, b, offset), y_(cuda, dtype, {n}, offset);
    residual_add(cuda, y_, a_, b_);
    EXPECT_TRUE(y_.to_host().bit_equal(expected.to(dtype)));
    residual_add(cuda, a_, a_, b_);
    EXPECT_TRUE(a_.to_host().bit_equal(expected.to(dtype))) << "over a";
    DeviceTensor a_again(cuda, a, offset);
    residual_add(cuda, b_, a_again, b_);
    EXPECT_TRUE(b_.to_host().bit_equal(expected.to(dtype))) << "over b";
  });
}

// The order of additions is the CPU's too.
TEST_F(ReduceCuda, add_parts_has_the_bits_of_the_cpu_layer) {
  for_each_case([&](DType dtype, int64_t n, int64_t offset) {
    for (const int num_parts : {1, 2, 7}) {
      if (n > 10000 && num_parts > 2) continue;
      for (const DType of_sum : {DType::F32, DType::BF16}) {
        const HostTensor parts = random(dtype, n * num_parts, "parts");
        HostTensor sum = random(of_sum, n, "sum");
        DeviceTensor sum_(cuda, sum, offset), parts_(cuda, parts, offset);
        add_parts(cuda, sum_, parts_, num_parts);
        add_parts(cpu, sum, parts, num_parts);
        EXPECT_TRUE(sum_.to_host().bit_equal(sum)) << num_parts << " " << name_of(of_sum);
      }
    }
  });
}

TEST_F(ReduceCuda, add_parts_of_statistics_has_the_bits_of_the_cpu_layer) {
  for (const int64_t n : kFlatSizes) {
    if (n > 10000) continue;
    for (const int num_parts : {1, 2, 7}) {
      const HostTensor parts = random(DType::F64, n * num_parts, "parts");
      HostTensor sum = random(DType::F64, n, "sum");
      DeviceTensor sum_(cuda, sum), parts_(cuda, parts);
      add_parts(cuda, sum_, parts_, num_parts);
      add_parts(cpu, sum, parts, num_parts);
      EXPECT_TRUE(sum_.to_host().bit_equal(sum)) << n << " " << num_parts;
    }
  }
}

TEST_F(ReduceCuda, convert_has_the_bits_of_the_cpu_layer) {
  for_each_case([&](DType from, int64_t n, int64_t offset) {
    for (const DType to : {DType::F32, DType::BF16}) {
      const HostTensor x = random(from, n, "x");
      HostTensor expected(to, {n}, "expected");
      convert(cpu, expected, x);
      DeviceTensor x_(cuda, x, offset), y_(cuda, to, {n}, offset);
      convert(cuda, y_, x_);
      EXPECT_TRUE(y_.to_host().bit_equal(expected)) << name_of(to);
    }
  });
}

TEST_F(ReduceCuda, convert_rounds_ties_to_even_and_keeps_infinities_and_nans) {
  const float values[] = {1 + 0x1p-8f, 1 + 0x3p-8f, -1 - 0x1p-8f - 0x1p-20f, 3.4e38f, 1e-40f, -0.0f, INFINITY, NAN};
  const float rounded[] = {1, 1 + 0x1p-6f, -1 - 0x1p-7f, INFINITY, 0x1p-133f, -0.0f, INFINITY, NAN};
  HostTensor x(DType::F32, {8}, "x");
  for (int64_t i = 0; i < 8; i++) x.set(i, values[i]);
  DeviceTensor x_(cuda, x), y_(cuda, DType::BF16, {8}), back_(cuda, DType::F32, {8});
  convert(cuda, y_, x_);
  convert(cuda, back_, y_);
  const HostTensor y = y_.to_host(), back = back_.to_host();
  for (int64_t i = 0; i < 8; i++) {
    if (std::isnan(rounded[i])) {
      EXPECT_TRUE(std::isnan(y.get(i)) && std::isnan(back.get(i)));
    } else {
      EXPECT_EQ(y.get(i), rounded[i]) << i;
      EXPECT_EQ(std::signbit(y.get(i)), std::signbit(rounded[i])) << i;
      EXPECT_EQ(back.get(i), rounded[i]) << i;
    }
  }
}

TEST_F(ReduceCuda, sum_of_squares_is_exact_to_fp64_rounding) {
  const auto expect_sum = [&](DType dtype, int64_t n, int64_t offset) {
    const HostTensor x = random(dtype, n, "x");
    long double exact = 0;
    for (int64_t i = 0; i < n; i++) exact += static_cast<long double>(x.get(i)) * x.get(i);
    const double expected = static_cast<double>(exact);
    // Positive addends, exact squares: at most eps times the longest chain, 64 of a thread and 8 of partial sums,
    // twice 10 within a block, and 1 on top of `sum`.
    EXPECT_NEAR(sum_of_squares(x, offset, 0.25 * expected), 1.25 * expected, 100 * 0x1p-53 * 1.25 * expected);
  };
  for_each_case(expect_sum);
  expect_sum(DType::F32, 600011, 0);    // more blocks than the second kernel has threads
  expect_sum(DType::BF16, 2500003, 0);  // more than there are partial sums
}

TEST_F(ReduceCuda, sum_of_squares_of_large_and_small_fp32_neither_overflows_nor_vanishes) {
  for (const double value : {1e30, 1e-30}) {
    HostTensor x(DType::F32, {1000}, "x");
    x.fill(value);
    EXPECT_NEAR(sum_of_squares(x) / (1000 * value * value), 1.0, 1e-6);
  }
}

TEST_F(ReduceCuda, bits_do_not_depend_on_the_schedule) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const int64_t n : {300, 5000, 65544}) {
      const HostTensor x = random(dtype, n, "x"), parts = random(dtype, 4 * n, "parts"),
                       sum = random(DType::F32, n, "s");
      HostTensor first_y(dtype, {n}), first_sum(DType::F32, {n}), first_converted(DType::BF16, {n});
      double first_squares = 0;
      for (const uint64_t schedule : kSchedules) {
        simt_options().schedule = schedule;
        DeviceTensor x_(cuda, x), parts_(cuda, parts), sum_(cuda, sum), y_(cuda, dtype, {n}),
            to_(cuda, DType::BF16, {n});
        residual_add(cuda, y_, x_, x_);
        add_parts(cuda, sum_, parts_, 4);
        convert(cuda, to_, x_);
        const double squares = sum_of_squares(x);
        if (schedule == kSchedules[0]) {
          first_y = y_.to_host(), first_sum = sum_.to_host(), first_converted = to_.to_host(), first_squares = squares;
        }
        EXPECT_TRUE(y_.to_host().bit_equal(first_y)) << n << " " << schedule;
        EXPECT_TRUE(sum_.to_host().bit_equal(first_sum)) << n << " " << schedule;
        EXPECT_TRUE(to_.to_host().bit_equal(first_converted)) << n << " " << schedule;
        EXPECT_EQ(squares, first_squares) << n << " " << schedule;
      }
    }
  }
}

TEST_F(ReduceCuda, fp64_is_refused_by_name) {
  HostTensor x(DType::F64, {8}, "x"), sum(DType::F64, {1}, "sum"), y(DType::F32, {8}, "y");
  const std::string what = ": dtype F64 is not supported on the CUDA device, use F32 or BF16";
  EXPECT_EQ(error_of([&] { residual_add(cuda, x, x, x); }), "residual_add" + what);
  EXPECT_EQ(error_of([&] { add_sum_of_squares(cuda, sum, x); }), "add_sum_of_squares" + what);
  EXPECT_EQ(error_of([&] { convert(cuda, y, x); }), "convert" + what);
}

TEST_F(ReduceCuda, these_kernels_ran) {
  DeviceTensor x(cuda, random(DType::F32, 64, "x")), y(cuda, DType::F32, {64});
  residual_add(cuda, y, x, x);
  add_parts(cuda, y, x, 1);
  DeviceTensor z(cuda, HostTensor(DType::F64, {1}));
  add_parts(cuda, z, z, 1);
  convert(cuda, y, x);
  sum_of_squares(random(DType::F32, 64, "x"));
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"residual_add_kernel", "add_parts_kernel", "add_double_parts_kernel", "convert_kernel",
                           "sum_of_squares_kernel", "add_partials_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
