#include "layers/rmsnorm.h"

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

struct Problem {
  HostTensor x, w, dy, y, rstd, dx, dw;

  Problem(const RmsNormCase& c, DType dtype)
      : x(DType::F64, {c.rows, c.C}, "x"),
        w(DType::F64, {c.C}, "w"),
        dy(DType::F64, {c.rows, c.C}, "dy"),
        y(dtype, {c.rows, c.C}, "y"),
        rstd(dtype == DType::F64 ? DType::F64 : DType::F32, {c.rows}, "rstd"),
        dx(dtype, {c.rows, c.C}, "dx"),
        dw(rstd.dtype(), {c.C}, "dw") {
    x = x.fill_normal(1, 2.0, 0.5).to(dtype);
    w = w.fill_normal(2, 0.5, 1.0).to(dtype);
    dy = dy.fill_normal(3).to(dtype);
  }
  void forward(NormKind kind) {
    Device device = Device::cpu();
    rmsnorm_forward(device, y, rstd, x, w, 1e-5, kind);
  }
  void backward(NormKind kind) {
    Device device = Device::cpu();
    rmsnorm_backward(device, dx, dw, dy, x, rstd, w, kind);
  }
};

TEST(RmsNorm, gradients_equal_central_differences) {
  constexpr int64_t kMaxElements = 30000;  // every difference evaluates the whole tensor
  for (const RmsNormCase& c : kRmsNormCases) {
    if (c.rows * c.C > kMaxElements) continue;
    Problem p(c, DType::F64);
    p.forward(c.kind);
    p.backward(c.kind);
    const auto loss = [&] {
      p.forward(c.kind);
      return dot(p.dy, p.y);
    };
    expect_gradient(p.x, p.dx, loss, "dx");
    expect_gradient(p.w, p.dw, loss, "dw");
  }
}

TEST(RmsNorm, fp32_and_bf16_are_within_rounding_of_fp64) {
  for (const RmsNormCase& c : kRmsNormCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      Problem low(c, dtype), exact(c, DType::F64);
      exact.x = low.x.to(DType::F64), exact.w = low.w.to(DType::F64), exact.dy = low.dy.to(DType::F64);
      for (Problem* p : {&low, &exact}) p->forward(c.kind), p->backward(c.kind);
      // Every element is rounded at most four times; sums grow an error by at most sqrt(C) roundings of fp32.
      const double tolerance =
          dtype == DType::BF16 ? 4 * 0x1p-9 : 4 * 0x1p-24 * std::sqrt(static_cast<double>(c.C + c.rows));
      EXPECT_LE(relative_l2(low.y.to(DType::F64), exact.y), tolerance) << c.rows << "x" << c.C;
      if (c.C > 1) {  // with one column dx is a difference of equal numbers: all rounding
        EXPECT_LE(relative_l2(low.dx.to(DType::F64), exact.dx), tolerance) << c.rows << "x" << c.C;
      }
      EXPECT_LE(relative_l2(low.dw.to(DType::F64), exact.dw), tolerance) << c.rows << "x" << c.C;
    }
  }
}

// sum = a + b, y = norm(sum): both go on, as in a block, and a gets the gradients of both.
TEST(RmsNorm, gradients_through_the_sum_before_equal_central_differences) {
  Device device = Device::cpu();
  for (const NormKind kind : {NormKind::Plain, NormKind::OnePlus, NormKind::LayerNorm}) {
    const Shape shape = {7, 33};
    HostTensor a(DType::F64, shape, "a"), b(DType::F64, shape, "b"), w(DType::F64, {33}, "w"),
        y(DType::F64, shape, "y"), sum(DType::F64, shape, "sum"), rstd(DType::F64, {7}, "rstd"),
        dy(DType::F64, shape, "dy"), dsum(DType::F64, shape, "dsum"), da(DType::F64, shape, "da"),
        dw(DType::F64, {33}, "dw");
    a.fill_normal(1, 2.0), b.fill_normal(2), w.fill_normal(3, 0.5, 1.0), dy.fill_normal(4), dsum.fill_normal(5);
    const auto loss = [&] {
      add_rmsnorm_forward(device, sum, y, rstd, a, b, w, 1e-5, kind);
      return dot(dy, y) + dot(dsum, sum);
    };
    loss();
    rmsnorm_backward(device, da, dw, dy, sum, rstd, w, kind, dsum);
    expect_gradient(a, da, loss, "da");
    expect_gradient(w, dw, loss, "dw");
  }
}

TEST(RmsNorm, a_sum_before_has_the_bits_of_two_steps_and_may_be_in_place) {
  Device device = Device::cpu();
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const RmsNormCase& c : kRmsNormCases) {
      Problem p(c, dtype);
      HostTensor sum(dtype, p.x.shape(), "sum"), y(dtype, p.x.shape(), "y");
      add_rmsnorm_forward(device, sum, y, p.rstd, p.x, p.dy, p.w, 1e-5, c.kind);
      HostTensor expected = p.x.to(DType::F32);
      for (int64_t i = 0; i < expected.numel(); i++) {
        expected.set(i, static_cast<float>(p.x.get(i)) + static_cast<float>(p.dy.get(i)));
      }
      EXPECT_TRUE(sum.bit_equal(expected.to(dtype)));
      rmsnorm_forward(device, p.y, p.rstd, sum, p.w, 1e-5, c.kind);
      EXPECT_TRUE(y.bit_equal(p.y));
      add_rmsnorm_forward(device, p.x, y, p.rstd, p.x, p.dy, p.w, 1e-5, c.kind);
      EXPECT_TRUE(p.x.bit_equal(sum) && y.bit_equal(p.y));
      // The residual of a backward: dx + residual, in place of either.
      HostTensor residual = p.y, dx(dtype, p.x.shape(), "dx");
      p.backward(c.kind);
      rmsnorm_backward(device, dx, p.dw, p.dy, p.x, p.rstd, p.w, c.kind, residual);
      const double rounding = dtype == DType::BF16 ? 0x1p-7 : 0x1p-22;
      for (int64_t i = 0; i < dx.numel(); i++) {
        ASSERT_NEAR(dx.get(i), p.dx.get(i) + residual.get(i),
                    rounding * (std::abs(p.dx.get(i)) + std::abs(residual.get(i))) + 1e-30);
      }
      rmsnorm_backward(device, residual, p.dw, p.dy, p.x, p.rstd, p.w, c.kind, residual);
      EXPECT_TRUE(residual.bit_equal(dx));
      rmsnorm_backward(device, p.dy, p.dw, p.dy, p.x, p.rstd, p.w, c.kind, p.y);
      EXPECT_TRUE(p.dy.bit_equal(dx));
    }
  }
}

TEST(RmsNorm, eps_keeps_rows_of_zeros_zero_and_small_rows_small) {
  Device device = Device::cpu();
  HostTensor x(DType::F64, {2, 4}, "x"), w(DType::F64, {4}, "w"), y(DType::F64, {2, 4}, "y"),
      rstd(DType::F64, {2}, "rstd");
  w.fill(1);
  for (int64_t i = 4; i < 8; i++) x.set(i, i % 2 ? 1e-3 : -1e-3);  // a mean square of 1e-6, a tenth of eps
  rmsnorm_forward(device, y, rstd, x, w, 1e-5, NormKind::Plain);
  EXPECT_DOUBLE_EQ(rstd.get(0), 1 / std::sqrt(1e-5));
  EXPECT_DOUBLE_EQ(rstd.get(1), 1 / std::sqrt(1.1e-5));
  for (int64_t i = 0; i < 8; i++) EXPECT_DOUBLE_EQ(y.get(i), x.get(i) * rstd.get(i / 4));
}

// torch 2.15.0, fp64: layer_norm(x, (3,), w, None, 1e-5) and the gradients of (dy * y).sum().
TEST(RmsNorm, layer_norm_equals_torch) {
  Problem p({2, 3, NormKind::LayerNorm}, DType::F64);
  const double x[] = {1.0, -2.0, 0.5, 103.0, 104.0, 100.25}, w[] = {1.5, 0.5, -2.0},
               dy[] = {1.0, 2.0, -1.0, 0.5, -3.0, 4.0};
  for (int i = 0; i < 6; i++) p.x.set(i, x[i]), p.dy.set(i, dy[i]);
  for (int i = 0; i < 3; i++) p.w.set(i, w[i]);
  p.forward(NormKind::LayerNorm), p.backward(NormKind::LayerNorm);
  const double y[] = {1.3334974620633755, -0.6984986706046251, -1.0159980663340005,
                      0.5518666501547786, 0.49930792156861187, 2.7330538864808367},
               dx[] = {-0.21507898697094263, -0.04301800963519731, 0.25809699660614016,
                       1.56151991015642,     -1.1451043004730934,  -0.4164156096833551},
               dw[] = {1.0729538580938425, -5.789842211830168, -5.974106806128679};
  for (int i = 0; i < 6; i++) {
    EXPECT_NEAR(p.y.get(i), y[i], 1e-12) << i;
    EXPECT_NEAR(p.dx.get(i), dx[i], 1e-12) << i;
  }
  for (int i = 0; i < 3; i++) EXPECT_NEAR(p.dw.get(i), dw[i], 1e-12) << i;
}

// A mean of 1000 standard deviations: E[x^2] - mean^2 in fp32 would be all rounding.
TEST(RmsNorm, layer_norm_keeps_its_digits_far_from_zero) {
  const RmsNormCase c{9, 1031, NormKind::LayerNorm};
  Problem low(c, DType::F32), exact(c, DType::F64);
  for (int64_t i = 0; i < low.x.numel(); i++) low.x.set(i, 2000 + low.x.get(i));
  exact.x = low.x.to(DType::F64), exact.w = low.w.to(DType::F64), exact.dy = low.dy.to(DType::F64);
  for (Problem* p : {&low, &exact}) p->forward(c.kind), p->backward(c.kind);
  // x - mean: the roundings of the mean, whose sum has no order of its own in builds without vectors.
  constexpr double kTolerance = 32 * 1000 * 0x1p-24;
  EXPECT_LE(relative_l2(low.y.to(DType::F64), exact.y), kTolerance);
  EXPECT_LE(relative_l2(low.dx.to(DType::F64), exact.dx), kTolerance);
  EXPECT_LE(relative_l2(low.dw.to(DType::F64), exact.dw), kTolerance);
}

TEST(RmsNorm, weight_gradient_accumulates_and_dx_may_alias_dy) {
  const RmsNormCase c{33, 100, NormKind::Plain};
  Problem once(c, DType::F32), twice(c, DType::F32);
  once.forward(c.kind), twice.forward(c.kind);
  once.backward(c.kind);
  twice.backward(c.kind), twice.backward(c.kind);
  for (int64_t i = 0; i < c.C; i++) EXPECT_FLOAT_EQ(twice.dw.get(i), 2 * once.dw.get(i));
  Device device = Device::cpu();
  rmsnorm_backward(device, twice.dy, twice.dw, twice.dy, twice.x, twice.rstd, twice.w, c.kind);
  for (int64_t i = 0; i < once.dx.numel(); i++) ASSERT_EQ(twice.dy.get(i), once.dx.get(i));
}

TEST(RmsNorm, threads_change_no_bit) {
  for (const RmsNormCase& c : kRmsNormCases) {
    Problem one(c, DType::F32);
    with_threads(1, [&] { one.forward(c.kind), one.backward(c.kind); });
    for (const int threads : {2, 3}) {
      Problem many(c, DType::F32);
      with_threads(threads, [&] { many.forward(c.kind), many.backward(c.kind); });
      EXPECT_TRUE(many.y.bit_equal(one.y) && many.rstd.bit_equal(one.rstd)) << c.rows << "x" << c.C << " " << threads;
      EXPECT_TRUE(many.dx.bit_equal(one.dx) && many.dw.bit_equal(one.dw)) << c.rows << "x" << c.C << " " << threads;
    }
  }
}

TEST(RmsNorm, contract_violations_are_named) {
  Device device = Device::cpu();
  HostTensor x(DType::F32, {2, 8}, "x"), y(DType::F32, {2, 8}, "y"), rstd(DType::F32, {2}, "rstd"),
      w(DType::F32, {7}, "w");
  try {
    rmsnorm_forward(device, y, rstd, x, w, 1e-5, NormKind::Plain);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "rmsnorm_forward: w ('w') is F32 (7), expected F32 (8)");
  }
}

}  // namespace
