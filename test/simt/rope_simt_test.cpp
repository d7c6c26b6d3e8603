// The CUDA kernels of RoPE, run on the CPU, against the CPU layer.
#include "layers/rope.h"

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr double kFactor = 1.2;
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12};

struct Outputs {
  HostTensor cos, sin, y, dx;
};

struct Inputs {
  RopeCase c;
  HostTensor x, dy, positions, inv_freq;

  Inputs(const RopeCase& which, DType dtype)
      : c(which),
        x(dtype, {c.T, c.H, c.HD}, "x"),
        dy(dtype, {c.T, c.H, c.HD}, "dy"),
        positions(DType::I32, {c.T}, "positions"),
        inv_freq(DType::F32, {c.half}, "inv_freq") {
    x.fill_normal(1), dy.fill_normal(2);
    for (int64_t t = 0; t < c.T; t++) positions.set(t, static_cast<double>(t % 7 * 18713));
    for (int64_t m = 0; m < c.half; m++) {
      inv_freq.set(m, std::pow(1e4, -static_cast<double>(m) / static_cast<double>(c.half)));
    }
  }

  /// In fp32, from the same numbers.
  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    const Shape table = {c.T, c.half};
    Outputs out = {HostTensor(DType::F32, table), HostTensor(DType::F32, table), x.to(DType::F32), dy.to(DType::F32)};
    rope_table(cpu, out.cos, out.sin, positions, inv_freq, kFactor);
    rope_forward(cpu, out.y, out.cos, out.sin, c.num_heads, c.interleaved);
    rope_backward(cpu, out.dx, out.cos, out.sin, c.num_heads, c.interleaved);
    return out;
  }

  /// Elements between a tensor and an aligned address: `offset` of x and dx, `table_offset` of the tables.
  Outputs on_cuda(Device& cuda, int64_t offset = 0, int64_t table_offset = 0) const {
    DeviceTensor y_(cuda, x, offset), dx_(cuda, dy, offset), positions_(cuda, positions), inv_freq_(cuda, inv_freq),
        cos_(cuda, DType::F32, {c.T, c.half}, table_offset), sin_(cuda, DType::F32, {c.T, c.half}, table_offset);
    rope_table(cuda, cos_, sin_, positions_, inv_freq_, kFactor);
    rope_forward(cuda, y_, cos_, sin_, c.num_heads, c.interleaved);
    rope_backward(cuda, dx_, cos_, sin_, c.num_heads, c.interleaved);
    return {cos_.to_host(), sin_.to_host(), y_.to_host(), dx_.to_host()};
  }
};

std::string describe(const RopeCase& c, DType dtype) {
  return fmt::format("{} ({}, {}, {}) heads {} half {} {}", name_of(dtype), c.T, c.H, c.HD, c.num_heads, c.half,
                     c.interleaved ? "interleaved" : "half-split");
}

/// cosf and sinf are good to 2 ulp at most on either side, ulps of numbers below 1, and the product with the factor
/// rounds. A rotated element is two products and a sum of tables that differ so much.
void expect_equal(const Outputs& cuda, const Outputs& cpu, const Inputs& in) {
  const double table = kFactor * 6 * kRoundF32;
  expect_elements_near(cuda.cos, cpu.cos, 0, table, "cos");
  expect_elements_near(cuda.sin, cpu.sin, 0, table, "sin");
  expect_elements_near(cuda.y, cpu.y, 0, largest_of(in.x) * 2 * (table + 3 * kRoundF32), "y");
  expect_elements_near(cuda.dx, cpu.dx, 0, largest_of(in.dy) * 2 * (table + 3 * kRoundF32), "dx");
}

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.cos.bit_equal(b.cos) && a.sin.bit_equal(b.sin) && a.y.bit_equal(b.y) && a.dx.bit_equal(b.dx);
}

class RopeCuda : public testing::Test {
 protected:
  RopeCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(RopeCuda, kernels_equal_the_cpu_layer) {
  for (const RopeCase& c : kRopeCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      SCOPED_TRACE(describe(c, dtype));
      const Inputs in(c, dtype);
      expect_equal(in.on_cuda(cuda), in.on_cpu(), in);
    }
  }
}

TEST_F(RopeCuda, neither_schedule_nor_alignment_changes_a_bit) {
  for (const RopeCase& c : kRopeCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Inputs in(c, dtype);
      const Outputs first = in.on_cuda(cuda);
      EXPECT_TRUE(bit_equal(in.on_cuda(cuda, 1, 0), first)) << describe(c, dtype);
      EXPECT_TRUE(bit_equal(in.on_cuda(cuda, 0, 1), first)) << describe(c, dtype);
      for (const uint64_t schedule : kOtherSchedules) {
        simt_options().schedule = schedule;
        EXPECT_TRUE(bit_equal(in.on_cuda(cuda), first)) << describe(c, dtype) << " schedule " << schedule;
      }
      simt_options() = {};
    }
  }
}

TEST_F(RopeCuda, what_does_not_turn_keeps_its_bits) {
  for (const RopeCase& c : kRopeCases) {
    const Inputs in(c, DType::BF16);
    const Outputs out = in.on_cuda(cuda);
    for (int64_t i = 0; i < in.x.numel(); i++) {
      if (i / c.HD % c.H < c.num_heads && i % c.HD < 2 * c.half) continue;
      ASSERT_EQ(out.y.get(i), in.x.get(i)) << describe(c, DType::BF16) << " [" << i << "]";
    }
  }
}

TEST_F(RopeCuda, angles_are_rounded_to_fp32) {  // at position 100003 the exact angle has the cosine 0.42548
  HostTensor positions(DType::I32, {1}), inv_freq(DType::F32, {1});
  positions.set(0, 100003), inv_freq.set(0, 0.7);
  DeviceTensor positions_(cuda, positions), inv_freq_(cuda, inv_freq), cos_(cuda, DType::F32, {1, 1}),
      sin_(cuda, DType::F32, {1, 1});
  rope_table(cuda, cos_, sin_, positions_, inv_freq_, 1.0);
  EXPECT_NEAR(cos_.to_host().get(0), 0.4229887127876282, 2 * kRoundF32);
  EXPECT_NEAR(sin_.to_host().get(0), 0.9061349630355835, 2 * kRoundF32);
}

TEST_F(RopeCuda, no_tokens_are_no_work) {
  EXPECT_EQ(Inputs({0, 2, 16, 2, 8, false}, DType::BF16).on_cuda(cuda).y.numel(), 0);
  const Inputs in({2, 2, 16, 2, 0, false}, DType::BF16);
  EXPECT_TRUE(in.on_cuda(cuda).y.bit_equal(in.x));
}

TEST_F(RopeCuda, other_dtypes_are_refused_by_name) {
  HostTensor x(DType::F64, {2, 1, 8}, "x"), table(DType::F64, {2, 4}, "table"), positions(DType::I32, {2}),
      inv_freq(DType::F32, {4});
  EXPECT_EQ(error_of([&] { rope_forward(cuda, x, table, table, 1, false); }),
            "rope: dtype F64 is not supported on the CUDA device, use F32 or BF16");
  EXPECT_EQ(error_of([&] { rope_table(cuda, table, table, positions, inv_freq, 1); }),
            "rope_table: dtype F64 is not supported on the CUDA device, use F32");
}

TEST_F(RopeCuda, these_kernels_ran) {
  Inputs(kRopeCases[0], DType::F32).on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"rope_table_kernel", "rope_rotate_kernel"}) EXPECT_TRUE(kernels.contains(name)) << name;
}

}  // namespace
