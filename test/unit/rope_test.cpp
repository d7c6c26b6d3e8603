#include "layers/rope.h"

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

struct Problem {
  RopeCase c;
  HostTensor x, dy, positions, inv_freq, cos, sin;

  Problem(const RopeCase& which, DType dtype)
      : c(which),
        x(DType::F64, {c.T, c.H, c.HD}, "x"),
        dy(DType::F64, {c.T, c.H, c.HD}, "dy"),
        positions(DType::I32, {c.T}, "positions"),
        inv_freq(DType::F32, {c.half}, "inv_freq"),
        cos(dtype, {c.T, c.half}, "cos"),
        sin(dtype, {c.T, c.half}, "sin") {
    x = x.fill_normal(1).to(dtype);
    dy = dy.fill_normal(2).to(dtype);
    for (int64_t t = 0; t < c.T; t++) positions.set(t, static_cast<double>(t % 100 * 3));
    for (int64_t m = 0; m < c.half; m++)
      inv_freq.set(m, std::pow(1e4, -static_cast<double>(m) / static_cast<double>(c.half)));
  }
  void make_table(double attention_factor = 1.0) {
    Device device = Device::cpu();
    rope_table(device, cos, sin, positions, inv_freq, attention_factor);
  }
  void forward(HostTensor& t) {
    Device device = Device::cpu();
    rope_forward(device, t, cos, sin, c.num_heads, c.interleaved);
  }
  void backward(HostTensor& t) {
    Device device = Device::cpu();
    rope_backward(device, t, cos, sin, c.num_heads, c.interleaved);
  }
};

// torch 2.15.0: a = torch.tensor([position]).float() * torch.tensor([inv_freq]); a.cos(), a.sin(). At position 100003
// the fp64 angle would give cos = 0.42548.
TEST(Rope, fp32_angles_round_as_in_torch) {
  struct Row {
    double position, inv_freq, cos, sin;
  };
  const Row rows[] = {{1, 1.0, 0.5403023362159729, 0.8414709568023682},
                      {4095, 0.31622776601683794, 0.8159282207489014, 0.5781531929969788},
                      {100003, 0.7, 0.4229887127876282, 0.9061349630355835},
                      {131071, 1e-4, 0.8573336601257324, 0.5147610306739807}};
  Device device = Device::cpu();
  for (const Row& r : rows) {
    HostTensor positions(DType::I32, {1}), inv_freq(DType::F32, {1}), cos(DType::F32, {1, 1}), sin(DType::F32, {1, 1});
    positions.set(0, r.position), inv_freq.set(0, r.inv_freq);
    rope_table(device, cos, sin, positions, inv_freq, 1.0);
    EXPECT_NEAR(cos.get(0), r.cos, 0x1p-23) << r.position;  // two libraries, each within an ulp of a number below 1
    EXPECT_NEAR(sin.get(0), r.sin, 0x1p-23) << r.position;
    rope_table(device, cos, sin, positions, inv_freq, 1.25);
    EXPECT_NEAR(cos.get(0), 1.25 * r.cos, 0x1p-22) << r.position;
    EXPECT_NEAR(sin.get(0), 1.25 * r.sin, 0x1p-22) << r.position;
  }
}

TEST(Rope, fp64_tables_have_fp64_angles) {
  Problem p(kRopeCases[6], DType::F64);
  p.make_table(0.5);
  for (int64_t i = 0; i < p.cos.numel(); i++) {
    const double angle = p.positions.get(i / p.c.half) * p.inv_freq.get(i % p.c.half);
    ASSERT_NEAR(p.cos.get(i), 0.5 * std::cos(angle), 1e-15);
    ASSERT_NEAR(p.sin.get(i), 0.5 * std::sin(angle), 1e-15);
  }
}

TEST(Rope, gradient_equals_central_differences) {
  for (const RopeCase& c : kRopeCases) {
    Problem p(c, DType::F64);
    p.make_table(1.2);
    HostTensor dx = p.dy;
    p.backward(dx);
    const auto loss = [&] {
      HostTensor y = p.x;
      p.forward(y);
      return dot(p.dy, y);
    };
    expect_gradient(p.x, dx, loss, "dx", 1e-6, 64);
  }
}

/// The two dimensions of pair m.
std::pair<int64_t, int64_t> pair_of(const RopeCase& c, int64_t m) {
  return c.interleaved ? std::pair{2 * m, 2 * m + 1} : std::pair{m, m + c.half};
}

TEST(Rope, every_pair_turns_by_its_angle_and_the_rest_stays) {
  for (const RopeCase& c : kRopeCases) {
    Problem p(c, DType::F64);
    p.make_table();
    HostTensor y = p.x;
    p.forward(y);
    HostTensor expected = p.x;
    for (int64_t t = 0; t < c.T; t++) {
      for (int64_t h = 0; h < c.num_heads; h++) {
        for (int64_t m = 0; m < c.half; m++) {
          const auto [i0, i1] = pair_of(c, m);
          const int64_t head = (t * c.H + h) * c.HD;
          const double x0 = p.x.get(head + i0), x1 = p.x.get(head + i1);
          const double angle = p.positions.get(t) * p.inv_freq.get(m);
          expected.set(head + i0, x0 * std::cos(angle) - x1 * std::sin(angle));
          expected.set(head + i1, x0 * std::sin(angle) + x1 * std::cos(angle));
        }
      }
    }
    for (int64_t i = 0; i < y.numel(); i++) {
      const bool turns = i / c.HD % c.H < c.num_heads && i % c.HD < 2 * c.half;
      ASSERT_NEAR(y.get(i), expected.get(i), turns ? 1e-14 : 0.0) << i;
    }
  }
}

TEST(Rope, scores_depend_on_the_distance_of_positions_alone) {
  for (const bool interleaved : {false, true}) {
    Problem p({2, 1, 16, 1, 8, interleaved}, DType::F64);
    const auto score = [&](double query_position, double key_position) {
      p.positions.set(0, query_position), p.positions.set(1, key_position);
      p.make_table();
      HostTensor y = p.x;
      p.forward(y);
      double sum = 0;
      for (int64_t i = 0; i < 16; i++) sum += y.get(i) * y.get(16 + i);
      return sum;
    };
    EXPECT_NEAR(score(7, 3), score(1007, 1003), 1e-12);
    EXPECT_GT(std::abs(score(7, 3) - score(7, 4)), 1e-3);
  }
}

TEST(Rope, backward_undoes_forward) {
  for (const RopeCase& c : kRopeCases) {
    Problem p(c, DType::F64);
    p.make_table();
    HostTensor x = p.x;
    p.forward(x), p.backward(x);
    EXPECT_LE(relative_l2(x, p.x), 1e-15);
  }
}

TEST(Rope, fp32_is_within_rounding_of_fp64) {
  for (const RopeCase& c : kRopeCases) {
    Problem low(c, DType::F32), exact(c, DType::F64);
    low.make_table();
    exact.cos = low.cos.to(DType::F64), exact.sin = low.sin.to(DType::F64);
    HostTensor y = low.x, exact_y = low.x.to(DType::F64);
    low.forward(y), exact.forward(exact_y);
    EXPECT_LE(relative_l2(y, exact_y), 2 * 0x1p-24);  // two products and a sum
  }
}

TEST(Rope, threads_change_no_bit) {
  for (const RopeCase& c : kRopeCases) {
    Problem one(c, DType::F32);
    HostTensor y = one.x;
    with_threads(1, [&] { one.make_table(), one.forward(y); });
    for (const int threads : {2, 3}) {
      Problem many(c, DType::F32);
      with_threads(threads, [&] { many.make_table(), many.forward(many.x); });
      EXPECT_TRUE(many.cos.bit_equal(one.cos) && many.sin.bit_equal(one.sin)) << threads;
      EXPECT_TRUE(many.x.bit_equal(y)) << threads;
    }
  }
}

TEST(Rope, contract_violations_are_named) {
  Problem p(kRopeCases[4], DType::F32);
  Device device = Device::cpu();
  EXPECT_EQ(error_of([&] { rope_forward(device, p.x, p.cos, p.sin, 7, false); }),
            "rope_forward: 7 heads to rotate, x ('x') (9, 6, 24) has 6");
  HostTensor wide(DType::F32, {9, 13}, "wide");
  EXPECT_EQ(error_of([&] { rope_backward(device, p.x, wide, wide, 4, false); }),
            "rope_backward: cos ('wide') (9, 13) rotates 26 dimensions, a head has 24");
  HostTensor shorter(DType::F32, {8, 9}, "shorter");
  EXPECT_EQ(error_of([&] { rope_forward(device, p.x, p.cos, shorter, 4, false); }),
            "rope_forward: sin ('shorter') is F32 (8, 9), expected F32 (9, 9)");
  EXPECT_EQ(error_of([&] { rope_table(device, p.cos, shorter, p.positions, p.inv_freq, 1.0); }),
            "rope_table: sin ('shorter') is F32 (8, 9), expected F32 (9, 9)");
}

}  // namespace
