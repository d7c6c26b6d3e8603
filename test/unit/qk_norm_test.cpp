#include "layers/qk_norm.h"

#include <utility>

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

constexpr double kEps = 1e-5;

struct Problem {
  QkNormShape shape;
  int64_t T;
  NormKind kind;
  bool interleaved;
  HostTensor qkv, q_weight, k_weight, dy, y, rstd, dqkv, dq_weight, dk_weight, cos, sin;

  Shape qkv_shape() const { return {T, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim}; }

  Problem(const QkNormCase& c, DType dtype)
      : shape(c.shape),
        T(c.T),
        kind(c.kind),
        interleaved(c.interleaved),
        qkv(DType::F64, qkv_shape(), "qkv"),
        q_weight(DType::F64, {shape.q_width()}, "q_weight"),
        k_weight(DType::F64, {shape.k_width()}, "k_weight"),
        dy(DType::F64, qkv_shape(), "dy"),
        y(dtype, qkv_shape(), "y"),
        rstd(dtype, {T, shape.num_norms()}, "rstd"),
        dqkv(dtype, qkv_shape(), "dqkv"),
        dq_weight(dtype, {shape.q_width()}, "dq_weight"),
        dk_weight(dtype, {shape.k_width()}, "dk_weight"),
        cos(dtype, {T, c.half}, "cos"),
        sin(dtype, {T, c.half}, "sin") {
    qkv = qkv.fill_normal(1, 2.0, 0.5).to(dtype);
    q_weight = q_weight.fill_normal(2, 0.5, 1.0).to(dtype);
    k_weight = k_weight.fill_normal(3, 0.5, 1.0).to(dtype);
    dy = dy.fill_normal(4).to(dtype);
    const HostTensor angles = HostTensor(DType::F64, cos.shape()).fill_normal(5, 3.0);
    for (int64_t i = 0; i < angles.numel(); i++) {
      cos.set(i, 1.1 * std::cos(angles.get(i))), sin.set(i, 1.1 * std::sin(angles.get(i)));
    }
  }
  Rotation rotation() const {
    if (cos.numel() == 0) return {};
    return {cos, sin, interleaved};
  }
  void forward() {
    Device device = Device::cpu();
    qk_norm_forward(device, y, rstd, qkv, q_weight, k_weight, shape, kEps, kind, rotation());
  }
  void backward() {
    Device device = Device::cpu();
    qk_norm_backward(device, dqkv, dq_weight, dk_weight, dy, qkv, rstd, q_weight, k_weight, shape, kind, rotation());
  }
};

TEST(QkNorm, gradients_equal_central_differences) {
  constexpr int64_t kMaxElements = 20000;  // every difference evaluates the whole tensor
  for (const QkNormCase& c : kQkNormCases) {
    if (c.T * c.shape.token_width() > kMaxElements) continue;
    Problem p(c, DType::F64);
    p.forward();
    p.backward();
    const auto loss = [&] {
      p.forward();
      return dot(p.dy, p.y);
    };
    expect_gradient(p.qkv, p.dqkv, loss, "dqkv");
    expect_gradient(p.q_weight, p.dq_weight, loss, "dq_weight");
    expect_gradient(p.k_weight, p.dk_weight, loss, "dk_weight");
  }
}

/// Rows of `width` beginning at element `begin` of every token, as a tensor of their own.
HostTensor columns(const HostTensor& x, int64_t begin, int64_t width) {
  const int64_t T = x.shape()[0], token = x.numel() / T;
  HostTensor out(x.dtype(), {T, width}, "columns");
  for (int64_t i = 0; i < T * width; i++) out.set(i, x.get(i / width * token + begin + i % width));
  return out;
}

TEST(QkNorm, each_head_is_rotated_after_its_norm) {
  Device device = Device::cpu();
  for (const QkNormCase& c : kQkNormCases) {
    Problem fused(c, DType::F32), apart(c, DType::F32);
    fused.forward(), fused.backward();
    qk_norm_forward(device, apart.y, apart.rstd, apart.qkv, apart.q_weight, apart.k_weight, c.shape, kEps, c.kind);
    const int64_t heads = c.shape.num_heads + c.shape.num_kv_heads;
    rope_forward(device, apart.y, apart.cos, apart.sin, heads, c.interleaved);
    rope_backward(device, apart.dy, apart.cos, apart.sin, heads, c.interleaved);
    qk_norm_backward(device, apart.dqkv, apart.dq_weight, apart.dk_weight, apart.dy, apart.qkv, apart.rstd,
                     apart.q_weight, apart.k_weight, c.shape, c.kind);
    EXPECT_TRUE(fused.y.bit_equal(apart.y));
    EXPECT_TRUE(fused.dqkv.bit_equal(apart.dqkv));
    EXPECT_TRUE(fused.dq_weight.bit_equal(apart.dq_weight));
    EXPECT_TRUE(fused.dk_weight.bit_equal(apart.dk_weight));
  }
}

TEST(QkNorm, each_norm_is_rmsnorm_of_its_columns_and_v_is_copied) {
  Device device = Device::cpu();
  for (const QkNormCase& c : kQkNormCases) {
    QkNormCase unrotated = c;
    unrotated.half = 0;
    Problem p(unrotated, DType::F32);
    p.forward();
    const int64_t q_norms = c.shape.per_head ? c.shape.num_heads : 1;
    const int64_t v_begin = (c.shape.num_heads + c.shape.num_kv_heads) * c.shape.head_dim;
    int64_t begin = 0;
    for (int64_t i = 0; i < c.shape.num_norms(); i++) {
      const bool is_k = i >= q_norms;
      const int64_t width = is_k ? p.shape.k_width() : p.shape.q_width();
      HostTensor y(DType::F32, {c.T, width}, "y"), rstd(DType::F32, {c.T}, "rstd");
      rmsnorm_forward(device, y, rstd, columns(p.qkv, begin, width), is_k ? p.k_weight : p.q_weight, kEps, c.kind);
      EXPECT_TRUE(columns(p.y, begin, width).bit_equal(y)) << "norm " << i;
      for (int64_t t = 0; t < c.T; t++) ASSERT_EQ(p.rstd.get(t * c.shape.num_norms() + i), rstd.get(t));
      begin += width;
    }
    ASSERT_EQ(begin, v_begin);
    const int64_t v_width = c.shape.num_kv_heads * c.shape.head_dim;
    EXPECT_TRUE(columns(p.y, v_begin, v_width).bit_equal(columns(p.qkv, v_begin, v_width)));
  }
}

TEST(QkNorm, fp32_is_within_rounding_of_fp64) {
  for (const QkNormCase& c : kQkNormCases) {
    Problem low(c, DType::F32), exact(c, DType::F64);
    exact.qkv = low.qkv.to(DType::F64), exact.dy = low.dy.to(DType::F64);
    exact.q_weight = low.q_weight.to(DType::F64), exact.k_weight = low.k_weight.to(DType::F64);
    exact.cos = low.cos.to(DType::F64), exact.sin = low.sin.to(DType::F64);
    for (Problem* p : {&low, &exact}) p->forward(), p->backward();
    // Every element is rounded at most six times; sums grow an error by at most the square root of their length.
    const double length = static_cast<double>(low.shape.q_width() + c.T * c.shape.num_heads);
    const double tolerance = 6 * 0x1p-24 * std::sqrt(length);
    EXPECT_LE(relative_l2(low.y, exact.y), tolerance);
    EXPECT_LE(relative_l2(low.dqkv, exact.dqkv), tolerance);
    EXPECT_LE(relative_l2(low.dq_weight, exact.dq_weight), tolerance);
    EXPECT_LE(relative_l2(low.dk_weight, exact.dk_weight), tolerance);
  }
}

TEST(QkNorm, plain_and_late_cast_are_equal_in_fp32) {
  QkNormCase c = kQkNormCases[4];
  Problem plain(c, DType::F32);
  c.kind = NormKind::LateCast;
  Problem late(c, DType::F32);
  for (Problem* p : {&plain, &late}) p->forward(), p->backward();
  EXPECT_TRUE(plain.y.bit_equal(late.y));
  EXPECT_TRUE(plain.dqkv.bit_equal(late.dqkv));
}

TEST(QkNorm, weight_gradients_accumulate_and_dqkv_may_alias_qkv) {
  for (const QkNormCase& c : {kQkNormCases[4], kQkNormCases[5]}) {
    Problem once(c, DType::F32), twice(c, DType::F32);
    once.forward(), twice.forward();
    once.backward();
    twice.backward(), twice.backward();
    for (int64_t i = 0; i < once.dq_weight.numel(); i++) EXPECT_EQ(twice.dq_weight.get(i), 2 * once.dq_weight.get(i));
    for (int64_t i = 0; i < once.dk_weight.numel(); i++) EXPECT_EQ(twice.dk_weight.get(i), 2 * once.dk_weight.get(i));
    EXPECT_TRUE(twice.dqkv.bit_equal(once.dqkv));
    Device device = Device::cpu();
    qk_norm_backward(device, twice.qkv, twice.dq_weight, twice.dk_weight, twice.dy, twice.qkv, twice.rstd,
                     twice.q_weight, twice.k_weight, twice.shape, twice.kind, twice.rotation());
    EXPECT_TRUE(twice.qkv.bit_equal(once.dqkv));
  }
}

TEST(QkNorm, threads_change_no_bit) {
  for (const QkNormCase& c : kQkNormCases) {
    Problem one(c, DType::F32);
    with_threads(1, [&] { one.forward(), one.backward(); });
    for (const int threads : {2, 3}) {
      Problem many(c, DType::F32);
      with_threads(threads, [&] { many.forward(), many.backward(); });
      EXPECT_TRUE(many.y.bit_equal(one.y)) << threads;
      EXPECT_TRUE(many.rstd.bit_equal(one.rstd)) << threads;
      EXPECT_TRUE(many.dqkv.bit_equal(one.dqkv)) << threads;
      EXPECT_TRUE(many.dq_weight.bit_equal(one.dq_weight)) << threads;
      EXPECT_TRUE(many.dk_weight.bit_equal(one.dk_weight)) << threads;
    }
  }
}

TEST(QkNorm, contract_violations_are_named) {
  Problem p(kQkNormCases[3], DType::F32);
  Device device = Device::cpu();
  EXPECT_EQ(
      error_of([&] { qk_norm_forward(device, p.y, p.rstd, p.qkv, p.k_weight, p.k_weight, p.shape, kEps, p.kind); }),
      "qk_norm_forward: q_weight ('k_weight') is F32 (14), expected F32 (28)");
  const auto forward_to = [&](Tensor y, const Rotation& rotation) {
    return error_of(
        [&] { qk_norm_forward(device, y, p.rstd, p.qkv, p.q_weight, p.k_weight, p.shape, kEps, p.kind, rotation); });
  };
  EXPECT_EQ(forward_to(p.qkv, {}), "qk_norm_forward: y ('qkv') is qkv's own memory");
  HostTensor wide(DType::F32, {5, 4}, "wide"), other(DType::F32, {4, 3}, "other");
  EXPECT_EQ(forward_to(p.y, {wide, wide, false}),
            "qk_norm_forward: cos ('wide') (5, 4) rotates 8 dimensions, a head has 7");
  EXPECT_EQ(forward_to(p.y, {p.cos, other, false}),
            "qk_norm_forward: sin ('other') is F32 (4, 3), expected F32 (5, 3)");
  EXPECT_EQ(forward_to(p.y, {other, other, false}),
            "qk_norm_forward: cos ('other') is F32 (4, 3), expected F32 (5, 3)");
  EXPECT_EQ(error_of([&] {
              qk_norm_backward(device, p.dy, p.dq_weight, p.dk_weight, p.dy, p.qkv, p.rstd, p.q_weight, p.k_weight,
                               p.shape, p.kind);
            }),
            "qk_norm_backward: dqkv ('dy') is dy's own memory");
  const NormKind kind = std::exchange(p.kind, NormKind::LayerNorm);
  EXPECT_EQ(forward_to(p.y, {}), "qk_norm_forward: q and k are normalised by RMSNorm only, not by LayerNorm");
  EXPECT_EQ(error_of([&] { p.backward(); }),
            "qk_norm_backward: q and k are normalised by RMSNorm only, not by LayerNorm");
  p.kind = kind;
  p.shape.per_head = true;
  EXPECT_EQ(error_of([&] { p.backward(); }), "qk_norm_backward: rstd ('rstd') is F32 (5, 2), expected F32 (5, 6)");
  p.shape.num_kv_heads = 1;
  EXPECT_EQ(error_of([&] { p.forward(); }), "qk_norm_forward: qkv ('qkv') is F32 (5, 8, 7), expected F32 (5, 6, 7)");
}

}  // namespace
