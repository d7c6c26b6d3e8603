#include "layers/gated_act.h"

#include <algorithm>

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

const Gate kKinds[] = {GateKind::Silu, GateKind::GeluTanh, {GateKind::Clamped, 1.7, 1.5}};

struct Problem {
  Gate kind;
  HostTensor gate_up, dy, y, d_gate_up;

  Problem(int64_t T, int64_t F, const Gate& k, DType dtype)
      : kind(k),
        gate_up(DType::F64, {T, 2 * F}, "gate_up"),
        dy(DType::F64, {T, F}, "dy"),
        y(dtype, {T, F}, "y"),
        d_gate_up(dtype, {T, 2 * F}, "d_gate_up") {
    gate_up = gate_up.fill_normal(1, 2.0).to(dtype);
    dy = dy.fill_normal(2).to(dtype);
  }
  void forward() {
    Device device = Device::cpu();
    gated_act_forward(device, y, gate_up, kind);
  }
  void backward() {
    Device device = Device::cpu();
    gated_act_backward(device, d_gate_up, dy, gate_up, kind);
  }
};

TEST(GatedAct, gradients_equal_central_differences) {
  for (const Gate& kind : kKinds) {
    for (const GatedActCase& c : kGatedActCases) {
      if (c.T * c.F > 200) continue;  // every difference evaluates the whole tensor
      Problem p(c.T, c.F, kind, DType::F64);
      p.backward();
      const auto loss = [&] {
        p.forward();
        return dot(p.dy, p.y);
      };
      expect_gradient(p.gate_up, p.d_gate_up, loss, "d_gate_up", 1e-6, 512);
    }
  }
}

// torch 2.15.0, fp64: silu and gelu(approximate="tanh") and their derivatives at these z.
TEST(GatedAct, values_equal_torch) {
  const double z[] = {-4.0, -1.0, -0.1, 0.0, 0.5, 3.0};
  const double act[2][6] = {
      {-0.07194483984836623, -0.2689414213699951, -0.047502081252106004, 0.0, 0.3112296656009273, 2.8577223804672998},
      {-7.024594819227126e-05, -0.15880800939172324, -0.04601724895456484, 0.0, 0.34571400982514394,
       2.996362607918227}};
  const double slope[2][6] = {
      {-0.05266461489107291, 0.07232948812851325, 0.4500832085017708, 0.5, 0.7399611873026519, 1.0881041060151693},
      {-0.00033512319712218684, -0.08296408384578252, 0.4204782107282433, 0.5, 0.8673699035346424, 1.0115841666309695}};
  for (int kind = 0; kind < 2; kind++) {
    for (const DType dtype : {DType::F64, DType::F32}) {
      Problem p(1, 6, kKinds[kind], dtype);
      for (int i = 0; i < 6; i++) p.gate_up.set(i, z[i]), p.gate_up.set(6 + i, 2.0), p.dy.set(i, 3.0);
      p.forward(), p.backward();
      for (int i = 0; i < 6; i++) {
        // torch's fp64 has rounding of 1 + tanh; fp32 that of the exponent a(z), which is up to 11 here: a relative
        // one.
        const bool is_f64 = dtype == DType::F64;
        const double bound = is_f64 ? 1e-15 * std::abs(z[i]) : 20 * 0x1p-24 * std::abs(act[kind][i]);
        EXPECT_NEAR(p.y.get(i), 2 * act[kind][i], 2 * bound) << kind << " " << z[i];
        EXPECT_NEAR(p.d_gate_up.get(6 + i), 3 * act[kind][i], 3 * bound) << kind << " " << z[i];
        EXPECT_NEAR(p.d_gate_up.get(i), 6 * slope[kind][i], 6 * (is_f64 ? 1e-14 : 20 * 0x1p-24)) << kind << " " << z[i];
      }
    }
  }
}

TEST(GatedAct, fp32_is_within_rounding_of_fp64) {
  for (const Gate& kind : kKinds) {
    for (const GatedActCase& c : kGatedActCases) {
      Problem low(c.T, c.F, kind, DType::F32), exact(c.T, c.F, kind, DType::F64);
      exact.gate_up = low.gate_up.to(DType::F64), exact.dy = low.dy.to(DType::F64);
      for (Problem* p : {&low, &exact}) p->forward(), p->backward();
      // About eight roundings an element, the exponential's counted twice.
      EXPECT_LE(relative_l2(low.y, exact.y), 8 * 0x1p-24);
      EXPECT_LE(relative_l2(low.d_gate_up, exact.d_gate_up), 8 * 0x1p-24);
    }
  }
}

TEST(GatedAct, large_gates_saturate) {
  for (const Gate& kind : {Gate(GateKind::Silu), Gate(GateKind::GeluTanh)}) {
    Problem p(1, 4, kind, DType::F32);
    const double z[] = {-1e4, -100, 100, 1e4};
    for (int i = 0; i < 4; i++) p.gate_up.set(i, z[i]), p.gate_up.set(4 + i, 1.0), p.dy.set(i, 1.0);
    p.forward(), p.backward();
    for (int i = 0; i < 4; i++) {
      EXPECT_NEAR(p.y.get(i), i < 2 ? 0.0 : z[i], 1e-20);  // fast_exp never reaches zero
      EXPECT_NEAR(p.d_gate_up.get(i), i < 2 ? 0.0 : 1.0, 1e-20);
    }
  }
}

// transformers' GptOssExperts: gate and up by turns; alpha 1.7, limit 1.5.
TEST(GatedAct, clamped_values_and_slopes) {
  const double gate[] = {-4, 0.5, 1.4, 1.6, 9}, up[] = {0.3, -2, 1.4, -0.5, 2};
  Problem p(1, 5, kKinds[2], DType::F64);
  for (int f = 0; f < 5; f++) p.gate_up.set(2 * f, gate[f]), p.gate_up.set(2 * f + 1, up[f]), p.dy.set(f, 1);
  p.forward(), p.backward();
  for (int f = 0; f < 5; f++) {
    const double g = std::min(gate[f], 1.5), u = std::clamp(up[f], -1.5, 1.5), s = 1 / (1 + std::exp(-1.7 * g));
    EXPECT_NEAR(p.y.get(f), (u + 1) * g * s, 1e-14);
    EXPECT_NEAR(p.d_gate_up.get(2 * f), gate[f] > 1.5 ? 0 : (u + 1) * (s + 1.7 * g * s * (1 - s)), 1e-14);
    EXPECT_NEAR(p.d_gate_up.get(2 * f + 1), std::abs(up[f]) > 1.5 ? 0 : g * s, 1e-14);
  }
}

TEST(GatedAct, a_row_may_have_a_weight) {
  Device device = Device::cpu();
  for (const Gate& kind : kKinds) {
    Problem p(5, 11, kind, DType::F64);
    HostTensor w(DType::F64, {5}, "w"), dw(DType::F64, {5}, "dw");
    w.fill_normal(3);
    gated_act_backward(device, p.d_gate_up, p.dy, p.gate_up, kind, w, dw);
    const auto loss = [&] {
      gated_act_forward(device, p.y, p.gate_up, kind, w);
      return dot(p.dy, p.y);
    };
    expect_gradient(p.gate_up, p.d_gate_up, loss, "d_gate_up");
    expect_gradient(w, dw, loss, "d_row_weights");
  }
}

TEST(GatedAct, gradient_may_alias_its_input_and_replaces_what_was_there) {
  for (const Gate& kind : kKinds) {
    Problem apart(7, 33, kind, DType::F32), in_place(7, 33, kind, DType::F32);
    apart.d_gate_up.fill(7.0);
    apart.backward();
    Device device = Device::cpu();
    gated_act_backward(device, in_place.gate_up, in_place.dy, in_place.gate_up, kind);
    EXPECT_TRUE(in_place.gate_up.bit_equal(apart.d_gate_up));
  }
}

TEST(GatedAct, threads_change_no_bit) {
  for (const Gate& kind : kKinds) {
    Problem one(50, 1001, kind, DType::F32);
    with_threads(1, [&] { one.forward(), one.backward(); });
    for (const int threads : {2, 3}) {
      Problem many(50, 1001, kind, DType::F32);
      with_threads(threads, [&] { many.forward(), many.backward(); });
      EXPECT_TRUE(many.y.bit_equal(one.y)) << threads;
      EXPECT_TRUE(many.d_gate_up.bit_equal(one.d_gate_up)) << threads;
    }
  }
}

TEST(GatedAct, contract_violations_are_named) {
  Device device = Device::cpu();
  HostTensor gate_up(DType::F32, {3, 8}, "gate_up"), odd(DType::F32, {3, 7}, "odd"), y(DType::F32, {3, 8}, "y");
  EXPECT_EQ(error_of([&] { gated_act_forward(device, y, odd, GateKind::Silu); }),
            "gated_act_forward: gate_up ('odd') is (3, 7), expected (T, 2F)");
  EXPECT_EQ(error_of([&] { gated_act_forward(device, y, gate_up, GateKind::Silu); }),
            "gated_act_forward: y ('y') is F32 (3, 8), expected F32 (3, 4)");
}

}  // namespace
