// The CUDA kernels of the gate, run on the CPU, against the CPU layer.
#include "layers/gated_act.h"

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

const Gate kGates[] = {GateKind::Silu, GateKind::GeluTanh, {GateKind::Clamped, 1.7, 1.5}};
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12};

struct Outputs {
  HostTensor y, d_gate_up, d_row_weights;
};

struct Inputs {
  HostTensor gate_up, dy, row_weights;

  Inputs(const GatedActCase& c, DType dtype)
      : gate_up(dtype, {c.T, 2 * c.F}, "gate_up"),
        dy(dtype, {c.T, c.F}, "dy"),
        row_weights(DType::F32, {c.T}, "row_weights") {
    gate_up.fill_normal(1, 2.0), dy.fill_normal(2), row_weights.fill_normal(3);
  }

  /// In fp32, from the same numbers.
  Outputs on_cpu(const Gate& gate, bool is_weighted = false) const {
    Device cpu = Device::cpu();
    const HostTensor gate_up32 = gate_up.to(DType::F32), dy32 = dy.to(DType::F32);
    Outputs out = {HostTensor(DType::F32, dy.shape()), HostTensor(DType::F32, gate_up.shape()),
                   HostTensor(DType::F32, row_weights.shape())};
    const ConstTensor w = is_weighted ? ConstTensor(row_weights) : ConstTensor();
    gated_act_forward(cpu, out.y, gate_up32, gate, w);
    gated_act_backward(cpu, out.d_gate_up, dy32, gate_up32, gate, w,
                       is_weighted ? Tensor(out.d_row_weights) : Tensor());
    return out;
  }

  /// `in_place`: d_gate_up is gate_up's memory. `offset`: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, const Gate& gate, bool is_weighted = false, int64_t offset = 0,
                  bool in_place = false) const {
    DeviceTensor gate_up_(cuda, gate_up, offset), dy_(cuda, dy, offset), y_(cuda, dy.dtype(), dy.shape(), offset),
        d_gate_up_(cuda, gate_up.dtype(), gate_up.shape(), offset), weights(cuda, row_weights, offset),
        d_weights(cuda, DType::F32, row_weights.shape(), offset);
    const ConstTensor w = is_weighted ? ConstTensor(weights) : ConstTensor();
    gated_act_forward(cuda, y_, gate_up_, gate, w);
    gated_act_backward(cuda, in_place ? gate_up_ : d_gate_up_, dy_, gate_up_, gate, w,
                       is_weighted ? Tensor(d_weights) : Tensor());
    return {y_.to_host(), (in_place ? gate_up_ : d_gate_up_).to_host(),
            is_weighted ? d_weights.to_host() : HostTensor(DType::F32, row_weights.shape())};
  }
};

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.y.bit_equal(b.y) && a.d_gate_up.bit_equal(b.d_gate_up) && a.d_row_weights.bit_equal(b.d_row_weights);
}

/// The exponential is good to 2 ulp on either side and then rounded five times: 16 roundings of fp32 of the products'
/// size. GeluTanh rounds its exponent a, |a| < 50 here, five times on either side: 512 roundings where y is tiny.
void expect_equal(const Outputs& cuda, const Outputs& cpu, const Inputs& in) {
  if (in.dy.dtype() == DType::F32) {
    EXPECT_LE(relative_l2(cuda.y, cpu.y), 16 * kRoundF32);
    EXPECT_LE(relative_l2(cuda.d_gate_up, cpu.d_gate_up), 16 * kRoundF32);
  }
  const double relative = 512 * kRoundF32;
  expect_elements_near(cuda.y, cpu.y, relative, 0, "y");
  // dz = dy up (s + ...) is a difference where z < 0, of numbers near 1; Clamped adds 1 to up.
  const double largest = largest_of(in.dy) * (largest_of(in.gate_up) + 1) * std::max(1.0, largest_of(in.row_weights));
  expect_elements_near(cuda.d_gate_up, cpu.d_gate_up, relative, 16 * kRoundF32 * largest, "d_gate_up");
  // A sum over the row, of products of up to three numbers and their roundings.
  const double F = static_cast<double>(in.dy.shape()[1]), product = largest_of(in.gate_up) * (largest + 1);
  expect_elements_near(cuda.d_row_weights, cpu.d_row_weights, 0, 16 * kRoundF32 * std::sqrt(F) * product,
                       "d_row_weights");
}

class GatedActCuda : public testing::Test {
 protected:
  GatedActCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(GatedActCuda, kernels_equal_the_cpu_layer) {
  for (const GatedActCase& c : kGatedActCases) {
    for (const Gate& gate : kGates) {
      for (const DType dtype : {DType::F32, DType::BF16}) {
        for (const int64_t offset : {0, 1}) {
          for (const bool is_weighted : {false, true}) {
            SCOPED_TRACE(fmt::format("{} ({}, {}) kind {} offset {}{}", name_of(dtype), c.T, c.F,
                                     static_cast<int>(gate.kind), offset, is_weighted ? " weighted" : ""));
            const Inputs in(c, dtype);
            expect_equal(in.on_cuda(cuda, gate, is_weighted, offset), in.on_cpu(gate, is_weighted), in);
          }
        }
      }
    }
  }
}

TEST_F(GatedActCuda, neither_schedule_nor_width_changes_a_bit) {
  for (const GatedActCase& c : kGatedActCases) {
    for (const Gate& gate : {kGates[1], kGates[2]}) {
      const Inputs in(c, DType::BF16);
      const Outputs first = in.on_cuda(cuda, gate, true);
      const Outputs narrow = in.on_cuda(cuda, gate, true, 1);  // sums of rows have another order there
      EXPECT_TRUE(narrow.y.bit_equal(first.y) && narrow.d_gate_up.bit_equal(first.d_gate_up)) << c.T << "x" << c.F;
      for (const uint64_t schedule : kOtherSchedules) {
        simt_options().schedule = schedule;
        EXPECT_TRUE(bit_equal(in.on_cuda(cuda, gate, true), first)) << c.T << "x" << c.F << " schedule " << schedule;
      }
      simt_options() = {};
    }
  }
}

TEST_F(GatedActCuda, a_weight_of_one_changes_no_bit) {
  for (const GatedActCase& c : kGatedActCases) {
    for (const Gate& gate : kGates) {
      Inputs in(c, DType::BF16);
      in.row_weights.fill(1);
      const Outputs weighted = in.on_cuda(cuda, gate, true), plain = in.on_cuda(cuda, gate);
      EXPECT_TRUE(weighted.y.bit_equal(plain.y) && weighted.d_gate_up.bit_equal(plain.d_gate_up)) << c.T << "x" << c.F;
    }
  }
}

TEST_F(GatedActCuda, gradient_may_be_the_memory_of_its_input) {
  for (const GatedActCase& c : kGatedActCases) {
    for (const Gate& gate : {kGates[0], kGates[2]}) {
      for (const bool is_weighted : {false, true}) {
        const Inputs in(c, DType::F32);
        const Outputs separate = in.on_cuda(cuda, gate, is_weighted);
        for (const uint64_t schedule : {kSimtAscending, kSimtDescending}) {
          simt_options().schedule = schedule;
          EXPECT_TRUE(bit_equal(in.on_cuda(cuda, gate, is_weighted, 0, true), separate)) << c.F;
        }
        simt_options() = {};
      }
    }
  }
}

TEST_F(GatedActCuda, large_gates_saturate) {
  for (const GateKind kind : {GateKind::Silu, GateKind::GeluTanh}) {
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

// On the limit itself the derivative is 1, beyond it 0; gate and up by turns.
TEST_F(GatedActCuda, clamped_gates_stop_at_their_limits) {
  const double gate[] = {-4, 1.5, 1.75, 0.5, 0.5, 0.5}, up[] = {0.25, 0, 0, 1.5, -1.5, 2};
  for (const DType dtype : {DType::F32, DType::BF16}) {
    Inputs in({1, 6}, dtype);
    for (int i = 0; i < 6; i++) in.gate_up.set(2 * i, gate[i]), in.gate_up.set(2 * i + 1, up[i]), in.dy.set(i, 1);
    const Outputs out = in.on_cuda(cuda, kGates[2]);
    for (int i = 0; i < 6; i++) {
      EXPECT_EQ(out.d_gate_up.get(2 * i) == 0, i == 2) << i;
      EXPECT_EQ(out.d_gate_up.get(2 * i + 1) == 0, i == 5) << i;
    }
    EXPECT_EQ(out.y.get(1), out.y.get(2));
  }
}

TEST_F(GatedActCuda, no_tokens_are_no_work) {
  for (const GatedActCase c : {GatedActCase{0, 64}, {3, 0}}) {
    const Outputs out = Inputs(c, DType::BF16).on_cuda(cuda, GateKind::Silu, true);
    EXPECT_EQ(out.y.numel(), 0);
    for (int64_t t = 0; t < c.T; t++) EXPECT_EQ(out.d_row_weights.get(t), 0);
  }
}

TEST_F(GatedActCuda, fp64_is_refused_by_name) {
  HostTensor gate_up(DType::F64, {2, 8}, "gate_up"), y(DType::F64, {2, 4}, "y");
  EXPECT_EQ(error_of([&] { gated_act_forward(cuda, y, gate_up, GateKind::Silu); }),
            "gated_act: dtype F64 is not supported on the CUDA device, use F32 or BF16");
}

TEST_F(GatedActCuda, these_kernels_ran) {
  const Inputs in({5, 64}, DType::F32);
  in.on_cuda(cuda, GateKind::Silu), in.on_cuda(cuda, GateKind::Silu, true);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name :
       {"gated_act_forward_kernel", "gated_act_backward_kernel", "gated_act_weighted_backward_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
