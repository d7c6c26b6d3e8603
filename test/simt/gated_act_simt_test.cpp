// The CUDA kernels of the gate, run on the CPU, against the CPU layer.
#include "layers/gated_act.h"

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr GateKind kKinds[] = {GateKind::Silu, GateKind::GeluTanh};
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12};

struct Outputs {
  HostTensor y, d_gate_up;
};

struct Inputs {
  HostTensor gate_up, dy;

  Inputs(const GatedActCase& c, DType dtype) : gate_up(dtype, {c.T, 2 * c.F}, "gate_up"), dy(dtype, {c.T, c.F}, "dy") {
    gate_up.fill_normal(1, 2.0), dy.fill_normal(2);
  }

  /// In fp32, from the same numbers.
  Outputs on_cpu(GateKind kind) const {
    Device cpu = Device::cpu();
    const HostTensor gate_up32 = gate_up.to(DType::F32), dy32 = dy.to(DType::F32);
    Outputs out = {HostTensor(DType::F32, dy.shape()), HostTensor(DType::F32, gate_up.shape())};
    gated_act_forward(cpu, out.y, gate_up32, kind);
    gated_act_backward(cpu, out.d_gate_up, dy32, gate_up32, kind);
    return out;
  }

  /// `in_place`: d_gate_up is gate_up's memory. `offset`: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, GateKind kind, int64_t offset = 0, bool in_place = false) const {
    DeviceTensor gate_up_(cuda, gate_up, offset), dy_(cuda, dy, offset), y_(cuda, dy.dtype(), dy.shape(), offset),
        d_gate_up_(cuda, gate_up.dtype(), gate_up.shape(), offset);
    gated_act_forward(cuda, y_, gate_up_, kind);
    gated_act_backward(cuda, in_place ? gate_up_ : d_gate_up_, dy_, gate_up_, kind);
    return {y_.to_host(), (in_place ? gate_up_ : d_gate_up_).to_host()};
  }
};

/// The exponential is good to 2 ulp on either side and then rounded five times: 16 roundings of fp32 of the products'
/// size. GeluTanh rounds its exponent a, |a| < 50 here, five times on either side: 512 roundings where y is tiny.
void expect_equal(const Outputs& cuda, const Outputs& cpu, const Inputs& in) {
  if (in.dy.dtype() == DType::F32) {
    EXPECT_LE(relative_l2(cuda.y, cpu.y), 16 * kRoundF32);
    EXPECT_LE(relative_l2(cuda.d_gate_up, cpu.d_gate_up), 16 * kRoundF32);
  }
  const double relative = 512 * kRoundF32;
  expect_elements_near(cuda.y, cpu.y, relative, 0, "y");
  // dz = dy up (s + ...) is a difference where z < 0, of numbers near 1.
  const double largest = largest_of(in.dy) * largest_of(in.gate_up);
  expect_elements_near(cuda.d_gate_up, cpu.d_gate_up, relative, 16 * kRoundF32 * largest, "d_gate_up");
}

class GatedActCuda : public testing::Test {
 protected:
  GatedActCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(GatedActCuda, kernels_equal_the_cpu_layer) {
  for (const GatedActCase& c : kGatedActCases) {
    for (const GateKind kind : kKinds) {
      for (const DType dtype : {DType::F32, DType::BF16}) {
        for (const int64_t offset : {0, 1}) {
          SCOPED_TRACE(
              fmt::format("{} ({}, {}) kind {} offset {}", name_of(dtype), c.T, c.F, static_cast<int>(kind), offset));
          const Inputs in(c, dtype);
          expect_equal(in.on_cuda(cuda, kind, offset), in.on_cpu(kind), in);
        }
      }
    }
  }
}

TEST_F(GatedActCuda, neither_schedule_nor_width_changes_a_bit) {
  for (const GatedActCase& c : kGatedActCases) {
    const Inputs in(c, DType::BF16);
    const Outputs first = in.on_cuda(cuda, GateKind::GeluTanh);
    const auto expect_same = [&](const Outputs& other) {
      EXPECT_TRUE(other.y.bit_equal(first.y) && other.d_gate_up.bit_equal(first.d_gate_up)) << c.T << "x" << c.F;
    };
    expect_same(in.on_cuda(cuda, GateKind::GeluTanh, 1));
    for (const uint64_t schedule : kOtherSchedules) {
      simt_options().schedule = schedule;
      expect_same(in.on_cuda(cuda, GateKind::GeluTanh));
    }
    simt_options() = {};
  }
}

TEST_F(GatedActCuda, gradient_may_be_the_memory_of_its_input) {
  for (const GatedActCase& c : kGatedActCases) {
    const Inputs in(c, DType::F32);
    const Outputs separate = in.on_cuda(cuda, GateKind::Silu);
    for (const uint64_t schedule : {kSimtAscending, kSimtDescending}) {
      simt_options().schedule = schedule;
      EXPECT_TRUE(in.on_cuda(cuda, GateKind::Silu, 0, true).d_gate_up.bit_equal(separate.d_gate_up)) << c.F;
    }
    simt_options() = {};
  }
}

TEST_F(GatedActCuda, large_gates_saturate) {
  for (const GateKind kind : kKinds) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      Inputs in({1, 4}, dtype);
      const double z[] = {-16384, -128, 128, 16384};  // exact in bf16
      for (int i = 0; i < 4; i++) in.gate_up.set(i, z[i]), in.gate_up.set(4 + i, 1.0), in.dy.set(i, 1.0);
      const Outputs out = in.on_cuda(cuda, kind);
      for (int i = 0; i < 4; i++) {
        EXPECT_NEAR(out.y.get(i), i < 2 ? 0.0 : z[i], 1e-20);
        EXPECT_NEAR(out.d_gate_up.get(i), i < 2 ? 0.0 : 1.0, 1e-20);
      }
    }
  }
}

TEST_F(GatedActCuda, no_tokens_are_no_work) {
  for (const GatedActCase c : {GatedActCase{0, 64}, {3, 0}}) {
    EXPECT_EQ(Inputs(c, DType::BF16).on_cuda(cuda, GateKind::Silu).y.numel(), 0);
  }
}

TEST_F(GatedActCuda, fp64_is_refused_by_name) {
  HostTensor gate_up(DType::F64, {2, 8}, "gate_up"), y(DType::F64, {2, 4}, "y");
  EXPECT_EQ(error_of([&] { gated_act_forward(cuda, y, gate_up, GateKind::Silu); }),
            "gated_act: dtype F64 is not supported on the CUDA device, use F32 or BF16");
}

TEST_F(GatedActCuda, these_kernels_ran) {
  Inputs({5, 64}, DType::F32).on_cuda(cuda, GateKind::Silu);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"gated_act_forward_kernel", "gated_act_backward_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
