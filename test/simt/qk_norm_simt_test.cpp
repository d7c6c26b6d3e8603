// The CUDA kernels of the norm of q and k, run on the CPU, against the CPU layer.
#include "layers/qk_norm.h"

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr double kEps = 1e-5;
constexpr int64_t kFewElements = 13000;  // of what runs again and again: with more nothing else happens, only oftener
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12};

struct Outputs {
  HostTensor y, rstd, dqkv, dq_weight, dk_weight;
};

struct Inputs {
  QkNormCase c;
  HostTensor qkv, dy, q_weight, k_weight, dq_weight, dk_weight;  ///< d*_weight: what the gradients add to
  HostTensor cos, sin;

  Inputs(const QkNormCase& which, DType dtype)
      : c(which),
        qkv(dtype, {c.T, c.shape.num_heads + 2 * c.shape.num_kv_heads, c.shape.head_dim}, "qkv"),
        dy(dtype, qkv.shape(), "dy"),
        q_weight(dtype, {c.shape.q_width()}, "q_weight"),
        k_weight(dtype, {c.shape.k_width()}, "k_weight"),
        dq_weight(DType::F32, q_weight.shape(), "dq_weight"),
        dk_weight(DType::F32, k_weight.shape(), "dk_weight"),
        cos(DType::F32, {c.T, c.half}, "cos"),
        sin(DType::F32, {c.T, c.half}, "sin") {
    qkv.fill_normal(1, 2.0, 0.5), q_weight.fill_normal(2, 0.5, 1.0), k_weight.fill_normal(3, 0.5, 1.0);
    dy.fill_normal(4), dq_weight.fill_normal(5), dk_weight.fill_normal(6);
    const HostTensor angles = HostTensor(DType::F32, cos.shape()).fill_normal(7, 3.0);
    for (int64_t i = 0; i < angles.numel(); i++)
      cos.set(i, std::cos(angles.get(i))), sin.set(i, std::sin(angles.get(i)));
  }

  Shape rstd_shape() const { return {c.T, c.shape.num_norms()}; }

  Rotation rotation(const Tensor& cos_, const Tensor& sin_) const {
    if (c.half == 0) return {};
    return {cos_, sin_, c.interleaved};
  }

  /// In fp32, from the same numbers.
  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    const HostTensor x = qkv.to(DType::F32), d = dy.to(DType::F32), qw = q_weight.to(DType::F32),
                     kw = k_weight.to(DType::F32);
    Outputs out = {HostTensor(DType::F32, qkv.shape()), HostTensor(DType::F32, rstd_shape()),
                   HostTensor(DType::F32, qkv.shape()), dq_weight, dk_weight};
    HostTensor cos_ = cos, sin_ = sin;
    const Rotation angles = rotation(cos_, sin_);
    qk_norm_forward(cpu, out.y, out.rstd, x, qw, kw, c.shape, kEps, c.kind, angles);
    qk_norm_backward(cpu, out.dqkv, out.dq_weight, out.dk_weight, d, x, out.rstd, qw, kw, c.shape, c.kind, angles);
    return out;
  }

  /// `in_place`: dqkv is qkv's memory. `offset`, `table_offset`: elements between a tensor, or cos and sin, and an
  /// aligned address.
  Outputs on_cuda(Device& cuda, int64_t offset = 0, int64_t table_offset = 0, bool in_place = false) const {
    DeviceTensor x_(cuda, qkv, offset), dy_(cuda, dy, offset), qw_(cuda, q_weight, offset), kw_(cuda, k_weight, offset),
        dqw_(cuda, dq_weight, offset), dkw_(cuda, dk_weight, offset), cos_(cuda, cos, table_offset),
        sin_(cuda, sin, table_offset);
    DeviceTensor y_(cuda, qkv.dtype(), qkv.shape(), offset), dx_(cuda, qkv.dtype(), qkv.shape(), offset),
        rstd_(cuda, DType::F32, rstd_shape(), offset);
    DeviceTensor& dx = in_place ? x_ : dx_;
    const Rotation angles = rotation(cos_, sin_);
    qk_norm_forward(cuda, y_, rstd_, x_, qw_, kw_, c.shape, kEps, c.kind, angles);
    qk_norm_backward(cuda, dx, dqw_, dkw_, dy_, x_, rstd_, qw_, kw_, c.shape, c.kind, angles);
    return {y_.to_host(), rstd_.to_host(), dx.to_host(), dqw_.to_host(), dkw_.to_host()};
  }
};

std::string describe(const QkNormCase& c, DType dtype, int64_t offset = 0) {
  const QkNormShape& s = c.shape;
  return fmt::format("{} T {} heads {} + 2 {} of {} {} kind {} half {} {} offset {}", name_of(dtype), c.T, s.num_heads,
                     s.num_kv_heads, s.head_dim, s.per_head ? "each" : "full", static_cast<int>(c.kind), c.half,
                     c.interleaved ? "interleaved" : "half-split", offset);
}

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.y.bit_equal(b.y) && a.rstd.bit_equal(b.rstd) && a.dqkv.bit_equal(b.dqkv) &&
         a.dq_weight.bit_equal(b.dq_weight) && a.dk_weight.bit_equal(b.dk_weight);
}

void expect_equal(const Outputs& cuda, const Outputs& cpu, const Inputs& in) {
  const QkNormShape& s = in.c.shape;
  // Sums of n terms in two orders differ by about sqrt(n) roundings of their size, in each of a few steps.
  const double u = kRoundF32 * 8 * std::sqrt(static_cast<double>(std::max(s.q_width(), s.k_width())));
  EXPECT_LE(relative_l2(cuda.rstd, cpu.rstd), u);
  const int64_t terms = in.c.T * (s.per_head ? s.num_heads : 1);
  const double dw = kRoundF32 * 8 * std::sqrt(static_cast<double>(terms + s.q_width()));
  EXPECT_LE(distance(cuda.dq_weight, cpu.dq_weight), dw * (norm(cpu.dq_weight) + norm(in.dq_weight)));
  EXPECT_LE(distance(cuda.dk_weight, cpu.dk_weight), dw * (norm(cpu.dk_weight) + norm(in.dk_weight)));
  // Plain rounds xhat to bf16 before the weight: half an ulp, 2^-8 of a number at most. What is rotated was rounded,
  // and the two numbers of a pair share their errors.
  const bool is_bf16 = in.qkv.dtype() == DType::BF16;
  const double roundings = (is_bf16 && in.c.kind == NormKind::Plain) + (is_bf16 && in.c.half > 0);
  const double y_error = u + 0x1p-8 * roundings;
  expect_elements_near(cuda.y, cpu.y, y_error, in.c.half > 0 ? y_error * largest_of(cpu.y) : 0, "y");
  EXPECT_LE(relative_l2(cuda.y, cpu.y), u + (is_bf16 ? 0x1p-9 * (1 + roundings) : 0));
  // dx = s g - x k is a difference: its rounding is that of s g, which these bound from above.
  const double weight = 1 + std::max(largest_of(in.q_weight), largest_of(in.k_weight));
  expect_elements_near(cuda.dqkv, cpu.dqkv, 0, 2 * u * largest_of(in.dy) * weight * largest_of(cpu.rstd), "dqkv");
  for (int64_t i = 0; i < in.qkv.numel(); i++) {
    if (i % s.token_width() < s.v_begin()) continue;
    ASSERT_EQ(cuda.y.get(i), in.qkv.get(i)) << "v at " << i;
    ASSERT_EQ(cuda.dqkv.get(i), in.dy.get(i)) << "dv at " << i;
  }
}

class QkNormCuda : public testing::Test {
 protected:
  QkNormCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(QkNormCuda, kernels_equal_the_cpu_layer) {
  for (const QkNormCase& c : kQkNormCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t offset : {0, 1}) {
        if (offset > 0 && c.T > 1000) continue;
        SCOPED_TRACE(describe(c, dtype, offset));
        const Inputs in(c, dtype);
        expect_equal(in.on_cuda(cuda, offset, 0), in.on_cpu(), in);
        if (offset > 0 && c.half > 0) expect_equal(in.on_cuda(cuda, 0, offset), in.on_cpu(), in);
      }
    }
  }
}

TEST_F(QkNormCuda, every_kind_works_on_either_width_and_team) {
  for (const NormKind kind : {NormKind::Plain, NormKind::LateCast, NormKind::OnePlus}) {
    for (const QkNormShape& shape : {QkNormShape{9, 2, 40, true}, {9, 2, 136, false}}) {
      for (const int64_t offset : {0, 1}) {
        const QkNormCase c = {5, shape, kind};
        SCOPED_TRACE(describe(c, DType::BF16, offset));
        const Inputs in(c, DType::BF16);
        expect_equal(in.on_cuda(cuda, offset), in.on_cpu(), in);
      }
    }
  }
}

TEST_F(QkNormCuda, bits_do_not_depend_on_the_schedule) {
  for (const QkNormCase& c : kQkNormCases) {
    if (c.T * c.shape.token_width() > kFewElements) continue;
    const Inputs in(c, DType::BF16);
    const Outputs first = in.on_cuda(cuda);
    for (const uint64_t schedule : kOtherSchedules) {
      simt_options().schedule = schedule;
      EXPECT_TRUE(bit_equal(in.on_cuda(cuda), first)) << describe(c, DType::BF16) << " schedule " << schedule;
    }
    simt_options() = {};
  }
}

TEST_F(QkNormCuda, dqkv_may_be_the_memory_of_qkv) {
  for (const QkNormCase& c : kQkNormCases) {
    if (c.T * c.shape.token_width() > kFewElements) continue;
    const Inputs in(c, DType::F32);
    const Outputs separate = in.on_cuda(cuda);
    for (const uint64_t schedule : {kSimtAscending, kSimtDescending}) {
      simt_options().schedule = schedule;
      EXPECT_TRUE(bit_equal(in.on_cuda(cuda, 0, 0, true), separate)) << describe(c, DType::F32);
    }
    simt_options() = {};
  }
}

TEST_F(QkNormCuda, weight_gradients_accumulate) {
  const QkNormCase c = {33, {6, 3, 24, true}, NormKind::LateCast};
  Inputs in(c, DType::BF16);
  const Outputs on_top = in.on_cuda(cuda);
  const HostTensor start_q = in.dq_weight, start_k = in.dk_weight;
  in.dq_weight.fill(0), in.dk_weight.fill(0);
  const Outputs alone = in.on_cuda(cuda);
  const auto expect_sum = [](const HostTensor& sum, const HostTensor& start, const HostTensor& added) {
    for (int64_t i = 0; i < sum.numel(); i++) {  // one addition
      EXPECT_EQ(static_cast<float>(sum.get(i)), static_cast<float>(start.get(i)) + static_cast<float>(added.get(i)));
    }
  };
  expect_sum(on_top.dq_weight, start_q, alone.dq_weight);
  expect_sum(on_top.dk_weight, start_k, alone.dk_weight);
}

TEST_F(QkNormCuda, no_tokens_are_no_work) {
  const Inputs in({0, {2, 1, 8, true}, NormKind::Plain}, DType::F32);
  const Outputs out = in.on_cuda(cuda);
  EXPECT_TRUE(out.dq_weight.bit_equal(in.dq_weight) && out.dk_weight.bit_equal(in.dk_weight));
}

TEST_F(QkNormCuda, fp64_is_refused_by_name) {
  HostTensor qkv(DType::F64, {2, 4, 8}, "qkv"), y(DType::F64, {2, 4, 8}, "y"), rstd(DType::F64, {2, 3}, "rstd"),
      w(DType::F64, {8}, "w");
  EXPECT_EQ(error_of([&] {
              qk_norm_forward(cuda, y, rstd, qkv, w, w, {2, 1, 8, true}, kEps, NormKind::Plain);
            }),
            "qk_norm: dtype F64 is not supported on the CUDA device, use F32 or BF16");
}

TEST_F(QkNormCuda, these_kernels_ran) {
  Inputs({5, {2, 1, 8, true}, NormKind::Plain}, DType::F32).on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"qk_norm_forward_kernel", "qk_norm_backward_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
