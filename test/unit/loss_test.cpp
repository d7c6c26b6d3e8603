#include "layers/loss.h"

#include <limits>

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

constexpr int32_t kNoTarget = -100;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

using Case = LossCase;

struct Problem {
  Case c;
  HostTensor x, w, targets, dx, dw, logits, workspace;
  double grad_scale = 0.125;

  Problem(const Case& which, DType dtype)
      : c(which),
        x(DType::F64, {c.T, c.C}, "x"),
        w(DType::F64, {c.V, c.C}, "w"),
        targets(DType::I32, {c.T}, "targets"),
        dx(dtype, {c.T, c.C}, "dx"),
        dw(dtype, {c.V, c.C}, "dw"),
        logits(dtype, {c.T, c.V}, "logits"),
        workspace(DType::U8, {static_cast<int64_t>(loss_workspace_bytes(c.shape, dtype, c.T, c.C, c.V))}, "workspace") {
    x = x.fill_normal(1).to(dtype);
    w = w.fill_normal(2).to(dtype);
    const Philox rng(3, 0);
    for (int64_t t = 0; t < c.T; t++) {
      const uint64_t i = static_cast<uint64_t>(t);
      const bool masked = rng.uniform(i) < c.masked;
      targets.set(t, masked ? kNoTarget : static_cast<double>(rng.below(1000 + i, static_cast<uint64_t>(c.V))));
    }
  }
  bool has_target(int64_t t) const { return targets.get(t) != kNoTarget; }
  double forward(Tensor logits_out = {}) {
    return run([&](Device& device, Tensor nll, const LossRows& rows) {
      loss_forward(device, nll, x, w, targets, rows, c.shape, workspace, logits_out);
    });
  }
  double forward_with_logits() { return forward(logits); }
  double forward_backward(bool with_logits = false) {
    return forward_backward_into(dx, with_logits ? logits.view() : Tensor{});
  }
  double forward_backward_into(Tensor dx_out, Tensor logits_out = {}) {
    return run([&](Device& device, Tensor nll, const LossRows& rows) {
      loss_forward_backward(device, nll, dx_out, dw, x, w, targets, rows, grad_scale, c.shape, workspace, logits_out);
    });
  }
  /// What `op` adds to nll.
  template <class Op>
  double run(Op&& op) {
    Device device = Device::cpu();
    HostTensor rows(DType::I32, {c.T}, "rows"), nll(DType::F64, {1}, "nll");
    nll.set(0, 0);
    LossRows order{rows, 0};
    const int32_t* t = targets.as<int32_t>();
    const std::vector<int32_t> sorted = loss_rows({t, static_cast<size_t>(c.T)}, c.V, order.num_targets);
    std::copy(sorted.begin(), sorted.end(), rows.as<int32_t>());
    op(device, nll, order);
    return nll.get(0);
  }
  /// The logits that the cross-entropy sees, in fp64.
  double logit(int64_t t, int64_t v) const {
    double z = 0;
    for (int64_t k = 0; k < c.C; k++) z += x.get(t * c.C + k) * w.get(v * c.C + k);
    z *= c.shape.logit_scale;
    return c.shape.softcap > 0 ? c.shape.softcap * std::tanh(z / c.shape.softcap) : z;
  }
  double nll(int64_t t) const {
    double sum = 0;
    for (int64_t v = 0; v < c.V; v++) sum += std::exp(logit(t, v));
    return std::log(sum) - logit(t, static_cast<int64_t>(targets.get(t)));
  }
};

TEST(Loss, gradients_equal_central_differences) {
  for (const Case& c : kLossCases) {
    Problem p(c, DType::F64);
    p.forward_backward();
    const auto loss = [&] { return p.grad_scale * p.forward(); };
    expect_gradient(p.x, p.dx, loss, "dx", 1e-6, 64);
    expect_gradient(p.w, p.dw, loss, "dw", 1e-6, 64);
  }
}

// torch 2.15.0, fp64: cross_entropy(2 tanh(x w^T / 2), target, ignore_index=-100, reduction="sum") and its gradients.
TEST(Loss, loss_and_gradients_equal_torch) {
  const double x[] = {1.0, -2.0, 0.5, 3.0, 4.0, 0.25}, w[] = {1.0, 0.5, -0.5, 2.0, 0.25, -1.0};
  const double dx[] = {0.14520859398116526, 0.14644454134766585, 0.0, 0.0, 0.02339075075346499, -0.1643968693431996};
  const double dw[] = {0.09865410043443738,   -0.3271702891393308, 0.07332770086142074,
                       0.0025340913850139674, 0.7071253879651928,  0.17547133823149413};
  Problem p({3, 2, 3, {2.0, 2}}, DType::F64);
  for (int i = 0; i < 6; i++) p.x.set(i, x[i]), p.w.set(i, w[i]);
  p.targets.set(0, 2), p.targets.set(1, kNoTarget), p.targets.set(2, 0);
  p.grad_scale = 1;
  EXPECT_NEAR(p.forward_backward(), 0.49346715907298533, 1e-14);
  for (int i = 0; i < 6; i++) {
    EXPECT_NEAR(p.dx.get(i), dx[i], 1e-14) << i;
    EXPECT_NEAR(p.dw.get(i), dw[i], 1e-14) << i;
  }
}

// A power of two changes no rounding: scaled logits are those of scaled weights, whose gradient is the chain rule's.
TEST(Loss, a_scale_of_the_logits_is_one_of_the_weights) {
  for (const double softcap : {0.0, 3.0}) {
    Problem scaled({12, 5, 9, {softcap, 4, 0.25}}, DType::F32), plain({12, 5, 9, {softcap, 4}}, DType::F32);
    for (int64_t i = 0; i < plain.w.numel(); i++) plain.w.set(i, 0.25 * plain.w.get(i));
    EXPECT_EQ(scaled.forward_backward(true), plain.forward_backward(true));
    EXPECT_TRUE(scaled.logits.bit_equal(plain.logits) && scaled.dx.bit_equal(plain.dx));
    for (int64_t i = 0; i < plain.dw.numel(); i++) ASSERT_EQ(scaled.dw.get(i), 0.25 * plain.dw.get(i));
  }
}

TEST(Loss, loss_is_the_sum_of_negative_log_likelihoods) {
  for (const Case& c : kLossCases) {
    Problem p(c, DType::F64);
    double expected = 0;
    for (int64_t t = 0; t < c.T; t++) expected += p.has_target(t) ? p.nll(t) : 0.0;
    EXPECT_NEAR(p.forward(), expected, 1e-12 * std::max(1.0, expected));
    EXPECT_EQ(p.forward(), p.forward_backward()) << "forward alone and with a backward";
  }
}

TEST(Loss, fp32_is_within_rounding_of_fp64) {
  for (const Case& c : kLossCases) {
    Problem low(c, DType::F32), exact(c, DType::F64);
    exact.x = low.x.to(DType::F64), exact.w = low.w.to(DType::F64);
    const double loss = low.forward_backward(), exact_loss = exact.forward_backward();
    // A logit is a sum of C products near 1, and p = exp(logit - max) has its absolute error as a relative one; about
    // eight roundings more for the cap, the exponential and the products.
    const double tolerance = (8 + static_cast<double>(c.C)) * 0x1p-24;
    EXPECT_NEAR(loss, exact_loss, tolerance * (static_cast<double>(c.T) + exact_loss)) << c.T << "x" << c.V;
    if (c.V == 1) continue;  // the gradient is zero
    EXPECT_LE(relative_l2(low.dx, exact.dx), 4 * tolerance) << c.T << "x" << c.V;
    EXPECT_LE(relative_l2(low.dw, exact.dw), 4 * tolerance) << c.T << "x" << c.V;
  }
}

TEST(Loss, the_size_of_tiles_changes_rounding_only) {
  const Case base{50, 16, 40, {0, 50}, 0.3};
  Problem whole(base, DType::F32);
  const double loss = whole.forward_backward();
  for (const int64_t tile : {1, 7, 49, 1000}) {
    Case c = base;
    c.shape.tile_tokens = tile;
    Problem tiled(c, DType::F32);
    EXPECT_NEAR(tiled.forward_backward(), loss, 1e-6 * loss) << tile;
    EXPECT_LE(relative_l2(tiled.dx, whole.dx), 8 * 0x1p-24) << tile;
    EXPECT_LE(relative_l2(tiled.dw, whole.dw), 8 * 0x1p-24) << tile;
  }
}

TEST(Loss, rows_without_a_target_are_not_read_and_get_no_gradient) {
  for (const DType dtype : {DType::F32, DType::F64}) {
    Problem clean({12, 5, 9, {0, 4}}, dtype), poisoned({12, 5, 9, {0, 4}}, dtype);
    int64_t masked = 0;
    for (int64_t t = 0; t < 12; t++) {
      if (clean.has_target(t)) continue;
      masked++;
      for (int64_t k = 0; k < 5; k++) poisoned.x.set(t * 5 + k, kNaN);
    }
    ASSERT_GT(masked, 0);
    poisoned.dx.fill(7.0);
    EXPECT_EQ(poisoned.forward_backward(), clean.forward_backward());
    EXPECT_TRUE(poisoned.dx.bit_equal(clean.dx));
    EXPECT_TRUE(poisoned.dw.bit_equal(clean.dw));
    for (int64_t i = 0; i < 60; i++) ASSERT_TRUE(clean.has_target(i / 5) || clean.dx.get(i) == 0.0);
  }
}

TEST(Loss, without_any_target_everything_is_zero) {
  Problem p({6, 3, 8, {0, 4}, 1.1}, DType::F32);
  p.dx.fill(7.0), p.dw.fill(3.0);
  EXPECT_EQ(p.forward_backward(), 0.0);
  for (int64_t i = 0; i < p.dx.numel(); i++) ASSERT_EQ(p.dx.get(i), 0.0);
  for (int64_t i = 0; i < p.dw.numel(); i++) ASSERT_EQ(p.dw.get(i), 3.0);
  EXPECT_EQ(p.forward_with_logits(), 0.0);
}

TEST(Loss, rows_are_those_with_a_target_then_those_without) {
  int64_t num_targets = -1;
  EXPECT_EQ(loss_rows(std::vector<int32_t>{kNoTarget, 3, 0, kNoTarget, 1}, 4, num_targets),
            (std::vector<int32_t>{1, 2, 4, 0, 3}));
  EXPECT_EQ(num_targets, 3);
  EXPECT_TRUE(loss_rows({}, 4, num_targets).empty());
  EXPECT_EQ(num_targets, 0);
}

TEST(Loss, nll_is_added_to_what_is_there) {
  Problem p({12, 5, 9, {0, 4}}, DType::F32);
  const double alone = p.forward();
  p.run([&](Device& device, Tensor nll, const LossRows& rows) {
    *nll.as<double>() = 3.5;
    loss_forward(device, nll, p.x, p.w, p.targets, rows, p.c.shape, p.workspace);
    EXPECT_EQ(*nll.as<double>(), 3.5 + alone);
  });
}

TEST(Loss, weight_gradient_accumulates) {
  Problem once({12, 5, 9, {0, 4}}, DType::F64), twice({12, 5, 9, {0, 4}}, DType::F64);
  once.forward_backward();
  twice.forward_backward(), twice.forward_backward();
  for (int64_t i = 0; i < once.dw.numel(); i++) EXPECT_NEAR(twice.dw.get(i), 2 * once.dw.get(i), 1e-14);
  EXPECT_TRUE(twice.dx.bit_equal(once.dx));
}

TEST(Loss, logits_are_what_the_cross_entropy_saw_and_change_no_bit) {
  for (const Case& c : kLossCases) {
    for (const bool in_place : {false, true}) {
      Problem plain(c, DType::F64), with_logits(c, DType::F64);
      HostTensor expected(DType::F64, {c.T, c.V});
      for (int64_t i = 0; i < expected.numel(); i++) expected.set(i, plain.logit(i / c.V, i % c.V));
      const double loss = plain.forward_backward();
      HostTensor& dx = in_place ? with_logits.x : with_logits.dx;
      EXPECT_EQ(with_logits.forward_backward_into(dx, with_logits.logits), loss);
      EXPECT_TRUE(dx.bit_equal(plain.dx)) << c.T << "x" << c.V << (in_place ? " in place" : "");
      EXPECT_TRUE(with_logits.dw.bit_equal(plain.dw));
      EXPECT_LE(relative_l2(with_logits.logits, expected), 1e-13);
    }
  }
}

TEST(Loss, dx_may_alias_x) {
  for (const Case& c : kLossCases) {
    Problem apart(c, DType::F32), in_place(c, DType::F32);
    const double loss = apart.forward_backward();
    EXPECT_EQ(in_place.forward_backward_into(in_place.x), loss);
    EXPECT_TRUE(in_place.x.bit_equal(apart.dx));
    EXPECT_TRUE(in_place.dw.bit_equal(apart.dw));
  }
}

/// One row with exactly these logits: C = 1, x = 1.
std::pair<double, HostTensor> loss_of_logits(const std::vector<double>& z, int64_t target) {
  const int64_t V = static_cast<int64_t>(z.size());
  Problem p({1, 1, V, {0, 1}}, DType::F32);
  p.x.set(0, 1.0);
  for (int64_t v = 0; v < V; v++) p.w.set(v, z[static_cast<size_t>(v)]);
  p.targets.set(0, static_cast<double>(target));
  p.grad_scale = 1;
  const double loss = p.forward_backward();
  return {loss, p.dw};  // dw = dz
}

TEST(Loss, huge_logits_neither_overflow_nor_vanish) {
  EXPECT_EQ(loss_of_logits({1e30, -1e30}, 0).first, 0.0);
  EXPECT_NEAR(loss_of_logits({1e30, -1e30}, 1).first, 2e30, 1e24);
  EXPECT_NEAR(loss_of_logits({1e4, 1e4, 1e4}, 1).first, std::log(3.0), 1e-6);
  EXPECT_NEAR(loss_of_logits({-1e4, -1e4 + 1}, 0).first, std::log(1 + std::exp(1.0)), 1e-6);
  const HostTensor dz = loss_of_logits({1e4, 1e4, -1e4}, 0).second;
  EXPECT_FLOAT_EQ(dz.get(0), -0.5);
  EXPECT_FLOAT_EQ(dz.get(1), 0.5);
  EXPECT_NEAR(dz.get(2), 0.0, 1e-30);
}

TEST(Loss, a_maximum_in_any_block_is_found) {
  for (const int64_t top : {0, 1023, 1024, 2047, 2999}) {
    std::vector<double> z(3000, -2.0);
    z[static_cast<size_t>(top)] = 95.0;  // exp overflows fp32 unless the maximum is subtracted
    EXPECT_NEAR(loss_of_logits(z, top).first, 0.0, 1e-6) << top;
    EXPECT_NEAR(loss_of_logits(z, 5).first, top == 5 ? 0.0 : 97.0, 1e-5) << top;
  }
}

TEST(Loss, non_finite_logits_show_in_the_loss) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(std::isfinite(loss_of_logits({1.0, kNaN, 2.0}, 0).first));
  EXPECT_FALSE(std::isfinite(loss_of_logits({1.0, infinity, 2.0}, 0).first));
  EXPECT_NEAR(loss_of_logits({-infinity, 0.0, 0.0}, 1).first, std::log(2.0), 1e-6);
}

TEST(Loss, threads_change_no_bit) {
  const Case c{60, 24, 3000, {4.0, 25}, 0.2};
  Problem one(c, DType::F32);
  double loss = 0;
  with_threads(1, [&] { loss = one.forward_backward(true); });
  for (const int threads : {2, 3}) {
    Problem many(c, DType::F32);
    with_threads(threads, [&] { EXPECT_EQ(many.forward_backward(true), loss) << threads; });
    EXPECT_TRUE(many.dx.bit_equal(one.dx)) << threads;
    EXPECT_TRUE(many.dw.bit_equal(one.dw)) << threads;
    EXPECT_TRUE(many.logits.bit_equal(one.logits)) << threads;
  }
}

TEST(Loss, workspace_holds_one_tile_whatever_the_number_of_tokens) {
  const LossShape shape{0, 256};
  const size_t tile = loss_workspace_bytes(shape, DType::F32, 256, 64, 32000);
  EXPECT_GE(tile, size_t{256} * 32000 * 4);
  EXPECT_EQ(loss_workspace_bytes(shape, DType::F32, 256 + 8192, 64, 32000) - tile, size_t{8192} * 8);
  EXPECT_LT(loss_workspace_bytes(shape, DType::F32, 16, 64, 32000), tile / 15);
  const size_t in_bf16 = loss_workspace_bytes(shape, DType::BF16, 256, 64, 32000);  // the logits stay fp32
  EXPECT_EQ(in_bf16 - tile, size_t{256} * 32000 * 2 - 2 * size_t{256} * 64 * 2);
}

TEST(Loss, contract_violations_are_named) {
  Problem p({6, 3, 8, {0, 4}, 0.0}, DType::F32);
  for (const double target : {8.0, -1.0, -99.0}) {
    p.targets.set(2, target);
    EXPECT_EQ(error_of([&] { p.forward(); }),
              fmt::format("loss: target {} at position 2 is neither in the vocabulary [0, 8) nor -100 (no loss)",
                          static_cast<int>(target)));
  }
  p.targets.set(2, 0);
  HostTensor small(DType::U8, {100}, "small"), w(DType::F32, {8, 4}, "w"), logits(DType::F32, {6, 7}, "logits");
  const auto error = [&](ConstTensor weight, const LossShape& shape, Tensor workspace, Tensor logits_out = {}) {
    return error_of([&] {
      p.run([&](Device& device, Tensor nll, const LossRows& rows) {
        loss_forward(device, nll, p.x, weight, p.targets, rows, shape, workspace, logits_out);
      });
    });
  };
  EXPECT_EQ(error(p.w, p.c.shape, small),
            fmt::format("loss_forward: workspace ('small') has 100 bytes, 6 tokens in tiles of 4 need {} "
                        "(loss_workspace_bytes)",
                        p.workspace.numel()));
  EXPECT_EQ(error(w, p.c.shape, p.workspace), "loss_forward: w ('w') is F32 (8, 4), expected F32 (8, 3)");
  EXPECT_EQ(error(p.w, p.c.shape, p.workspace, logits),
            "loss_forward: logits ('logits') is F32 (6, 7), expected F32 (6, 8)");
  EXPECT_EQ(error(p.w, {0, 0}, p.workspace), "loss_forward: tile_tokens 0 must be positive");
  EXPECT_EQ(error(p.w, {0, 4, 0}, p.workspace), "loss_forward: logit_scale is 0");
  EXPECT_EQ(error_of([&] {
              p.run([&](Device& device, Tensor nll, const LossRows& rows) {
                loss_forward(device, nll, p.x, p.w, p.targets, {rows.rows, 7}, p.c.shape, p.workspace);
              });
            }),
            "loss_forward: 7 of 6 rows have a target");
}

}  // namespace
