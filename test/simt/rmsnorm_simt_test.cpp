// The CUDA kernels of RMSNorm, run on the CPU, against the CPU layer.
#include "layers/rmsnorm.h"

#include <functional>

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr double kEps = 1e-5;
constexpr int64_t kFewRows = 200;  // what runs again and again: with more rows nothing else happens, only oftener
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12, 13};

struct Outputs {
  HostTensor y, rstd, dx, dw;
};

struct Inputs {
  HostTensor x, w, dy, dw;  ///< dw: what the weight gradient adds to

  Inputs(const RmsNormCase& c, DType dtype)
      : x(dtype, {c.rows, c.C}, "x"),
        w(dtype, {c.C}, "w"),
        dy(dtype, {c.rows, c.C}, "dy"),
        dw(DType::F32, {c.C}, "dw") {
    x.fill_normal(1, 2.0, 0.5), w.fill_normal(2, 0.5, 1.0), dy.fill_normal(3), dw.fill_normal(4);
  }

  Outputs on_cpu(NormKind kind) const {
    Device cpu = Device::cpu();
    Outputs out = {HostTensor(x.dtype(), x.shape()), HostTensor(DType::F32, {x.shape().rows()}),
                   HostTensor(x.dtype(), x.shape()), dw};
    rmsnorm_forward(cpu, out.y, out.rstd, x, w, kEps, kind);
    rmsnorm_backward(cpu, out.dx, out.dw, dy, x, out.rstd, w, kind);
    return out;
  }

  /// `in_place`: y is x's memory, dx is dy's. `offset`: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, NormKind kind, int64_t offset = 0, bool in_place = false) const {
    DeviceTensor x_(cuda, x, offset), w_(cuda, w, offset), dy_(cuda, dy, offset), dw_(cuda, dw, offset);
    DeviceTensor y_(cuda, x.dtype(), x.shape(), offset), dx_(cuda, x.dtype(), x.shape(), offset);
    DeviceTensor rstd_(cuda, DType::F32, {x.shape().rows()}, offset);
    DeviceTensor x_again(cuda, x, offset);
    rmsnorm_forward(cuda, in_place ? x_ : y_, rstd_, x_, w_, kEps, kind);
    rmsnorm_backward(cuda, in_place ? dy_ : dx_, dw_, dy_, x_again, rstd_, w_, kind);
    return {(in_place ? x_ : y_).to_host(), rstd_.to_host(), (in_place ? dy_ : dx_).to_host(), dw_.to_host()};
  }
};

std::string describe(const RmsNormCase& c, DType dtype, int64_t offset) {
  return fmt::format("{} ({}, {}) kind {} offset {}", name_of(dtype), c.rows, c.C, static_cast<int>(c.kind), offset);
}

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.y.bit_equal(b.y) && a.rstd.bit_equal(b.rstd) && a.dx.bit_equal(b.dx) && a.dw.bit_equal(b.dw);
}

/// Both sides compute in fp32 and round once, LateCast and OnePlus from values some fp32 roundings apart: now and then
/// these lie on two sides of a rounding boundary, and the results are neighbours in bf16 (1 ulp). Plain rounds xhat
/// first and then the product; an ulp of xhat is up to two of the product (2 ulp). An element differs with probability
/// (distance in fp32) / (ulp of bf16), about 2^-21 / 2^-8 per rounding: one in a hundred is generous, and a cast in the
/// wrong place changes one in three. `cancelled` bounds what fp32 leaves of a difference of equal numbers.
void expect_bf16_neighbours(const HostTensor& actual, const HostTensor& expected, int max_ulp, double cancelled,
                            const char* what) {
  int64_t num_different = 0;
  for (int64_t i = 0; i < actual.numel(); i++) {
    const double a = actual.get(i), e = expected.get(i);
    if (a == e) continue;
    num_different++;
    const double ulp = std::ldexp(1.0, std::ilogb(std::max(std::abs(a), std::abs(e))) - 7);
    ASSERT_LE(std::abs(a - e), max_ulp * ulp + cancelled) << what << "[" << i << "] = " << a << ", not " << e;
  }
  EXPECT_LE(num_different, 2 + actual.numel() / 100) << what;
}

void expect_equal(const Outputs& cuda, const Outputs& cpu, const Inputs& in, const RmsNormCase& c) {
  // Sums of n terms in two orders differ by about sqrt(n) roundings of their size, in each of a few steps.
  const double u = 0x1p-24 * 8 * std::sqrt(static_cast<double>(c.C));
  EXPECT_LE(distance(cuda.rstd, cpu.rstd), u * norm(cpu.rstd));
  EXPECT_LE(distance(cuda.dw, cpu.dw),
            0x1p-24 * 8 * std::sqrt(static_cast<double>(c.rows + c.C)) * (norm(cpu.dw) + norm(in.dw)));
  // dx = s g - x k is a difference: its rounding is that of s g, whose largest element bounds it from above.
  double largest = 0;
  for (int64_t i = 0; i < in.dy.numel(); i++) {
    const double one_plus = c.kind == NormKind::OnePlus ? 1 : 0;
    largest = std::max(largest, std::abs(in.dy.get(i) * (one_plus + in.w.get(i % c.C)) * cpu.rstd.get(i / c.C)));
  }
  if (in.x.dtype() == DType::F32) {
    EXPECT_LE(distance(cuda.y, cpu.y), u * norm(cpu.y));
    EXPECT_LE(distance(cuda.dx, cpu.dx), u * largest * std::sqrt(static_cast<double>(in.x.numel())));
  } else {
    double cancelled = 0;  // of y, where x is near its mean
    for (int64_t i = 0; c.kind == NormKind::LayerNorm && i < cpu.y.numel(); i++) {
      cancelled = std::max(cancelled, u * std::abs(cpu.y.get(i)));
    }
    expect_bf16_neighbours(cuda.y, cpu.y, c.kind == NormKind::Plain ? 2 : 1, cancelled, "y");
    if (c.C > 1) expect_bf16_neighbours(cuda.dx, cpu.dx, 1, u * largest, "dx");  // one column: dx is all rounding
  }
}

class RmsNormCuda : public testing::Test {
 protected:
  RmsNormCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(RmsNormCuda, kernels_equal_the_cpu_layer) {
  for (const RmsNormCase& c : kRmsNormCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t offset : {0, 1}) {
        if (offset > 0 && c.rows > kFewRows) continue;
        SCOPED_TRACE(describe(c, dtype, offset));
        const Inputs in(c, dtype);
        expect_equal(in.on_cuda(cuda, c.kind, offset), in.on_cpu(c.kind), in, c);
      }
    }
  }
}

TEST_F(RmsNormCuda, every_kind_works_on_either_width_and_team) {
  for (const NormKind kind : {NormKind::Plain, NormKind::LateCast, NormKind::OnePlus, NormKind::LayerNorm}) {
    for (const int64_t C : {40, 1096}) {
      for (const int64_t offset : {0, 1}) {
        const RmsNormCase c = {19, C, kind};
        SCOPED_TRACE(describe(c, DType::BF16, offset));
        const Inputs in(c, DType::BF16);
        expect_equal(in.on_cuda(cuda, kind, offset), in.on_cpu(kind), in, c);
      }
    }
  }
}

TEST_F(RmsNormCuda, bits_do_not_depend_on_the_schedule) {
  for (const RmsNormCase& c : kRmsNormCases) {
    if (c.rows > kFewRows) continue;
    const Inputs in(c, DType::BF16);
    const Outputs first = in.on_cuda(cuda, c.kind);
    for (const uint64_t schedule : kOtherSchedules) {
      simt_options().schedule = schedule;
      EXPECT_TRUE(bit_equal(in.on_cuda(cuda, c.kind), first))
          << describe(c, DType::BF16, 0) << " schedule " << schedule;
    }
    simt_options() = {};
  }
}

TEST_F(RmsNormCuda, outputs_may_be_the_memory_of_inputs) {
  for (const RmsNormCase& c : kRmsNormCases) {
    if (c.rows > kFewRows) continue;
    const Inputs in(c, DType::F32);
    const Outputs separate = in.on_cuda(cuda, c.kind);
    for (const uint64_t schedule : {kSimtAscending, kSimtDescending}) {
      simt_options().schedule = schedule;
      EXPECT_TRUE(bit_equal(in.on_cuda(cuda, c.kind, 0, true), separate)) << describe(c, DType::F32, 0);
    }
    simt_options() = {};
  }
}

/// sum, y, rstd of add_rmsnorm_forward, and dx of a backward with a residual. `in_place`: sum is a's memory, dx is the
/// residual's.
struct Fused {
  HostTensor sum, y, rstd, dx;
};

template <class T>
Fused fused(Device& device, const Inputs& in, NormKind kind, const std::function<T(const HostTensor&)>& on,
            bool in_place = false) {
  T a = on(in.x), b = on(in.dy), w = on(in.w), sum = on(in.x), y = on(in.x), dy = on(in.dy), dx = on(in.dy),
    dw = on(in.dw), rstd = on(HostTensor(DType::F32, {in.x.shape().rows()})), residual = on(in.x);
  T& s = in_place ? a : sum;
  T& d = in_place ? residual : dx;
  add_rmsnorm_forward(device, s, y, rstd, a, b, w, kEps, kind);
  rmsnorm_backward(device, d, dw, dy, s, rstd, w, kind, residual);
  const auto host = [](T& t) {
    if constexpr (std::is_same_v<T, HostTensor>) {
      return t;
    } else {
      return t.to_host();
    }
  };
  return {host(s), host(y), host(rstd), host(d)};
}

TEST_F(RmsNormCuda, residual_adds_in_the_same_pass) {
  Device cpu = Device::cpu();
  for (const RmsNormCase& c : kRmsNormCases) {
    if (c.rows > kFewRows) continue;
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(describe(c, dtype, offset));
        const Inputs in(c, dtype);
        const auto on_cuda = [&](bool in_place) {
          return fused<DeviceTensor>(
              cuda, in, c.kind, [&](const HostTensor& t) { return DeviceTensor(cuda, t, offset); }, in_place);
        };
        const Fused expected = fused<HostTensor>(cpu, in, c.kind, [](const HostTensor& t) { return t; });
        const Fused found = on_cuda(false), in_place = on_cuda(true);
        EXPECT_TRUE(found.sum.bit_equal(expected.sum));
        EXPECT_TRUE(found.sum.bit_equal(in_place.sum) && found.y.bit_equal(in_place.y) &&
                    found.dx.bit_equal(in_place.dx));
        // The forward has the bits of the two steps.
        DeviceTensor x(cuda, found.sum, offset), w(cuda, in.w, offset), y(cuda, dtype, in.x.shape(), offset),
            rstd(cuda, DType::F32, {c.rows}, offset);
        rmsnorm_forward(cuda, y, rstd, x, w, kEps, c.kind);
        EXPECT_TRUE(found.y.bit_equal(y.to_host()) && found.rstd.bit_equal(rstd.to_host()));
        const double u = dtype == DType::BF16 ? 0x1p-8 : 0x1p-24 * 8 * std::sqrt(static_cast<double>(c.C));
        const double scale = norm(expected.dx) + norm(in.dy) * 8;  // of what is subtracted
        EXPECT_LE(distance(found.dx, expected.dx), u * scale);
      }
    }
  }
}

// A mean of 1000 standard deviations, as in the test of the CPU layer: both round it, apart by a few ulp.
TEST_F(RmsNormCuda, layer_norm_keeps_its_digits_far_from_zero) {
  for (const int64_t C : {129, 1031}) {
    Inputs in({5, C, NormKind::LayerNorm}, DType::F32);
    for (int64_t i = 0; i < in.x.numel(); i++) in.x.set(i, 2000 + in.x.get(i));
    const Outputs found = in.on_cuda(cuda, NormKind::LayerNorm), expected = in.on_cpu(NormKind::LayerNorm);
    constexpr double kTolerance = 8 * 1000 * 0x1p-24;
    EXPECT_LE(distance(found.y, expected.y), kTolerance * norm(expected.y)) << C;
    EXPECT_LE(distance(found.dx, expected.dx), kTolerance * norm(expected.dx)) << C;
    EXPECT_LE(distance(found.dw, expected.dw), kTolerance * norm(expected.dw)) << C;
  }
}

TEST_F(RmsNormCuda, weight_gradient_accumulates) {
  const RmsNormCase c = {33, 100, NormKind::Plain};
  Inputs in(c, DType::BF16);
  const Outputs on_top = in.on_cuda(cuda, c.kind);
  HostTensor start = in.dw;
  in.dw.fill(0);
  const Outputs alone = in.on_cuda(cuda, c.kind);
  for (int64_t i = 0; i < c.C; i++) {  // one addition
    EXPECT_EQ(static_cast<float>(on_top.dw.get(i)),
              static_cast<float>(start.get(i)) + static_cast<float>(alone.dw.get(i)));
  }
}

TEST_F(RmsNormCuda, no_rows_are_no_work) {
  const RmsNormCase c = {0, 64, NormKind::Plain};
  const Inputs in(c, DType::F32);
  EXPECT_TRUE(in.on_cuda(cuda, c.kind).dw.bit_equal(in.dw));
}

TEST_F(RmsNormCuda, fp64_is_refused_by_name) {
  HostTensor x(DType::F64, {2, 8}, "x"), y(DType::F64, {2, 8}, "y"), rstd(DType::F64, {2}, "rstd"),
      w(DType::F64, {8}, "w");
  try {
    rmsnorm_forward(cuda, y, rstd, x, w, kEps, NormKind::Plain);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "rmsnorm: dtype F64 is not supported on the CUDA device, use F32 or BF16");
  }
}

TEST_F(RmsNormCuda, these_kernels_ran) {
  const RmsNormCase c = {5, 64, NormKind::Plain};
  Inputs(c, DType::F32).on_cuda(cuda, c.kind);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"rmsnorm_forward_kernel", "rmsnorm_backward_kernel", "rmsnorm_weight_gradient_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
