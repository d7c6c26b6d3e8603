#include "layers/adamw.h"

#include "test/testing.h"

namespace {

constexpr int64_t kN = 70001;  // several blocks for each of three threads, and a tail

struct Problem {
  HostTensor p, m, v, g;

  Problem(int64_t n, DType dtype)
      : p(DType::F64, {n}, "p"), m(DType::F64, {n}, "m"), v(DType::F64, {n}, "v"), g(DType::F64, {n}, "g") {
    p = p.fill_normal(1).to(dtype);
    m = m.fill_normal(2, 0.1).to(dtype);
    v.fill_normal(3, 0.1);
    for (int64_t i = 0; i < n; i++) v.set(i, v.get(i) * v.get(i));
    v = v.to(dtype);
    g = g.fill_normal(4).to(dtype);
  }
  void update(const AdamWStep& step) {
    Device device = Device::cpu();
    adamw_update(device, p, m, v, g, step);
  }
};

// torch 2.15.0, fp64: three steps of torch.optim.AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).
TEST(AdamW, three_steps_equal_torch) {
  const double gradients[3][4] = {{0.1, -0.2, 3.0, 1e-6}, {-0.3, 0.05, 1.5, 2e-6}, {0.0, 1.0, -2.0, -1e-6}};
  const double expected_p[3][4] = {
      {0.4895000009999999, -1.2387500005, 1.9880000000333333, -0.008901990099009901},
      {0.49390345845786243, -1.2327635915319066, 1.976619069390278, -0.018413194246090957},
      {0.4972407298483469, -1.2369309827364374, 1.9717047751456438, -0.022567085367653755}};
  const double expected_m[4] = {-0.018899999999999997, 0.08829999999999998, 0.178, 1.6099999999999995e-07};
  const double expected_v[4] = {0.004726250000000004, 0.051923750000000046, 0.7130000000000006, 2.851250000000002e-13};
  Problem problem(4, DType::F64);
  problem.m.fill(0), problem.v.fill(0);
  const double p0[4] = {0.5, -1.25, 2.0, 1e-3};
  for (int i = 0; i < 4; i++) problem.p.set(i, p0[i]);
  for (int step = 0; step < 3; step++) {
    for (int i = 0; i < 4; i++) problem.g.set(i, gradients[step][i]);
    problem.update({.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .step = step + 1});
    for (int i = 0; i < 4; i++) EXPECT_NEAR(problem.p.get(i), expected_p[step][i], 1e-15) << step << " " << i;
  }
  for (int i = 0; i < 4; i++) {
    EXPECT_NEAR(problem.m.get(i), expected_m[i], 1e-15);
    EXPECT_NEAR(problem.v.get(i), expected_v[i], 1e-15);
  }
}

/// The formula of adamw.h in fp64, for one element.
void reference_update(double& p, double& m, double& v, double g, const AdamWStep& s) {
  g *= s.clip_scale;
  p -= s.lr * s.weight_decay * p;
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
  const double correction1 = 1 - std::pow(s.beta1, s.step), correction2 = 1 - std::pow(s.beta2, s.step);
  p -= s.lr / correction1 * m / (std::sqrt(v / correction2) + s.eps);
}

TEST(AdamW, clipped_steps_equal_the_formula_in_both_dtypes) {
  const int64_t n = 1003;
  for (const DType dtype : {DType::F32, DType::F64}) {
    Problem problem(n, dtype);
    HostTensor p = problem.p.to(DType::F64), m = problem.m.to(DType::F64), v = problem.v.to(DType::F64);
    for (int64_t step = 1; step <= 5; step++) {
      const AdamWStep s{
          .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-3, .weight_decay = 0.3, .clip_scale = 0.25, .step = step};
      problem.update(s);
      for (int64_t i = 0; i < n; i++) {
        reference_update(p.as<double>()[i], m.as<double>()[i], v.as<double>()[i], problem.g.get(i), s);
      }
    }
    // p and m round once or twice a step, v, a sum of positive terms, three times.
    const double eps = dtype == DType::F64 ? 0x1p-53 : 0x1p-24;
    EXPECT_LE(relative_l2(problem.p, p), 5 * 2 * eps);
    EXPECT_LE(relative_l2(problem.m, m), 5 * 2 * eps);
    EXPECT_LE(relative_l2(problem.v, v), 5 * 3 * eps);
  }
}

// 1 - float(0.999) is off by 1 in 80000.
TEST(AdamW, the_share_of_a_new_gradient_is_rounded_to_fp32_once) {
  Problem problem(4, DType::F32);
  problem.m.fill(0), problem.v.fill(0), problem.g.fill(1);
  problem.update({.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999});
  for (int64_t i = 0; i < 4; i++) {
    EXPECT_EQ(problem.m.get(i), static_cast<float>(1 - 0.9));
    EXPECT_EQ(problem.v.get(i), static_cast<float>(1 - 0.999));
  }
}

TEST(AdamW, decay_is_decoupled_from_the_moments) {
  Problem problem(100, DType::F64);
  const HostTensor p0 = problem.p;
  problem.m.fill(0), problem.v.fill(0), problem.g.fill(0);
  problem.update({.lr = 0.1, .weight_decay = 0.5});
  for (int64_t i = 0; i < 100; i++) {
    EXPECT_NEAR(problem.p.get(i), 0.95 * p0.get(i), 1e-15);
    EXPECT_EQ(problem.m.get(i), 0.0);
    EXPECT_EQ(problem.v.get(i), 0.0);
  }
}

// The shards of a run have odd ends anywhere: a parameter must not depend on where its shard begins.
TEST(AdamW, neither_threads_nor_cuts_change_a_bit) {
  const AdamWStep step{.lr = 1e-2, .weight_decay = 0.1, .clip_scale = 0.7, .step = 3};
  Problem one(kN, DType::F32);
  with_threads(1, [&] { one.update(step); });
  for (const int threads : {2, 3}) {
    Problem many(kN, DType::F32);
    with_threads(threads, [&] { many.update(step); });
    EXPECT_TRUE(many.p.bit_equal(one.p) && many.m.bit_equal(one.m) && many.v.bit_equal(one.v)) << threads;
  }
  Problem cut(kN, DType::F32);
  Device device = Device::cpu();
  int64_t begin = 0;
  for (const int64_t end : {int64_t{1}, int64_t{4}, int64_t{11}, int64_t{5000}, int64_t{5013}, kN}) {
    const auto slice = [&](HostTensor& t) { return t.view().rows(begin, end - begin); };
    adamw_update(device, slice(cut.p), slice(cut.m), slice(cut.v), slice(cut.g), step);
    begin = end;
  }
  EXPECT_TRUE(cut.p.bit_equal(one.p) && cut.m.bit_equal(one.m) && cut.v.bit_equal(one.v));
}

TEST(AdamW, moments_without_gradients_end_at_zero_not_in_subnormal_numbers) {
  Problem problem(20, DType::F32);
  const HostTensor p0 = problem.p;
  problem.g.fill(0), problem.m.fill(-2e-38), problem.v.fill(2e-38);
  for (int64_t step = 1; step <= 20; step++) problem.update({.lr = 1e-2, .step = step});
  for (int64_t i = 0; i < 20; i++) {
    EXPECT_EQ(problem.m.get(i), 0.0);
    EXPECT_EQ(problem.v.get(i), 0.0);
    EXPECT_EQ(problem.p.get(i), p0.get(i));
  }
}

TEST(AdamW, weights_are_the_new_parameters_rounded) {
  const AdamWStep step{.lr = 1e-2, .weight_decay = 0.1, .step = 3};
  for (const DType dtype : {DType::F32, DType::F64}) {
    Problem without(kN, dtype), with(kN, dtype);
    without.update(step);
    HostTensor weights(DType::BF16, {kN}, "weights");
    Device device = Device::cpu();
    adamw_update(device, with.p, with.m, with.v, with.g, step, weights);
    EXPECT_TRUE(with.p.bit_equal(without.p) && with.m.bit_equal(without.m) && with.v.bit_equal(without.v));
    EXPECT_TRUE(weights.bit_equal(without.p.to(DType::BF16)));
  }
}

TEST(AdamW, gradients_of_bf16_are_those_numbers_in_fp32) {
  Device device = Device::cpu();
  HostTensor p(DType::F32, {5000}), m(DType::F32, {5000}), v(DType::F32, {5000}), g(DType::BF16, {5000});
  p.fill_normal(1), g.fill_normal(2);
  HostTensor p2 = p, m2 = m, v2 = v;
  const AdamWStep step{.lr = 1e-2, .weight_decay = 0.1, .clip_scale = 0.3};
  adamw_update(device, p, m, v, g, step);
  adamw_update(device, p2, m2, v2, g.to(DType::F32), step);
  EXPECT_TRUE(p.bit_equal(p2) && m.bit_equal(m2) && v.bit_equal(v2));
}

TEST(AdamW, contract_violations_are_named) {
  Problem problem(8, DType::F32);
  Device device = Device::cpu();
  HostTensor shorter(DType::F32, {7}, "shorter");
  EXPECT_EQ(error_of([&] { adamw_update(device, problem.p, problem.m, shorter, problem.g, {}); }),
            "adamw_update: v ('shorter') is F32 (7), expected F32 (8)");
  HostTensor weights(DType::F32, {8}, "weights");
  EXPECT_EQ(error_of([&] { adamw_update(device, problem.p, problem.m, problem.v, problem.g, {}, weights); }),
            "adamw_update: weights ('weights') is F32 (8), expected BF16 (8)");
  EXPECT_EQ(error_of([&] { problem.update({.step = 0}); }), "adamw_update: step 0 must count from 1");
  EXPECT_EQ(error_of([&] { problem.update({.beta1 = 1.0}); }), "adamw_update: betas (1, 0.95) must be in [0, 1)");
  EXPECT_EQ(error_of([&] { problem.update({.lr = -1.0}); }),
            "adamw_update: lr -1, eps 1e-08 and weight_decay 0 must not be negative");
}

}  // namespace
