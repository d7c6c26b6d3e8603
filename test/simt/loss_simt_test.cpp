// The CUDA kernels of the loss, run on the CPU over the double of cuBLASLt, against the CPU layer.
#include "layers/loss.h"

#include <cmath>
#include <limits>

#include "test/layer_cases.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr int32_t kNoTarget = -100;
constexpr double kGradScale = 0.125;
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12, 13};

// Whole packs; rows that a block passes over more than once.
constexpr LossCase kPackedCases[] = {{5, 16, 40, {2.0, 3}, 0.2},
                                     {2, 8, 8208, {0, 2}, 0.0},
                                     {5, 16, 40, {0, 3, 0.0625}, 0.2},
                                     {4, 8, 24, {3.0, 3, 2.5}, 0.2}};
// A full tile, and one that is filled up to 64 rows.
constexpr LossCase kFilledUpCase = {110, 8, 24, {2.0, 65}, 0.3};

struct Outputs {
  HostTensor nll, dx, dw;
  HostTensor logits = HostTensor(DType::F32, {0});
};

enum class Want { Gradients, GradientsInPlace, GradientsAndLogits, Loss, LossAndLogits };

struct Inputs {
  LossCase c;
  HostTensor x, w, targets, dw, nll;  ///< dw, nll: what is added to

  Inputs(const LossCase& which, DType dtype)
      : c(which),
        x(dtype, {c.T, c.C}, "x"),
        w(dtype, {c.V, c.C}, "w"),
        targets(DType::I32, {c.T}, "targets"),
        dw(DType::F32, {c.V, c.C}, "dw"),
        nll(DType::F64, {1}, "nll") {
    x.fill_normal(1), w.fill_normal(2), dw.fill(0), nll.set(0, 0);
    const Philox rng(3, 0);
    for (int64_t t = 0; t < c.T; t++) {
      const uint64_t i = static_cast<uint64_t>(t);
      const bool masked = rng.uniform(i) < c.masked;
      targets.set(t, masked ? kNoTarget : static_cast<double>(rng.below(1000 + i, static_cast<uint64_t>(c.V))));
    }
  }

  bool has_target(int64_t t) const { return targets.get(t) != kNoTarget; }

  HostTensor row_order(int64_t& num_targets) const {
    std::vector<int32_t> list;
    for (int64_t t = 0; t < c.T; t++) list.push_back(static_cast<int32_t>(targets.get(t)));
    const std::vector<int32_t> order = loss_rows(list, c.V, num_targets);
    HostTensor rows(DType::I32, {c.T}, "rows");
    std::copy(order.begin(), order.end(), rows.as<int32_t>());
    return rows;
  }
  HostTensor workspace(DType dtype) const {
    return {DType::U8, {static_cast<int64_t>(loss_workspace_bytes(c.shape, dtype, c.T, c.C, c.V))}, "workspace"};
  }

  /// In fp32, on the same values: what CUDA should give but for its rounding.
  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    const HostTensor x_ = x.to(DType::F32), w_ = w.to(DType::F32);
    Outputs out = {nll, HostTensor(DType::F32, x.shape()), dw, HostTensor(DType::F32, {c.T, c.V}, "logits")};
    HostTensor scratch = workspace(DType::F32);
    LossRows rows;
    const HostTensor order = row_order(rows.num_targets);
    rows.rows = order;
    loss_forward_backward(cpu, out.nll, out.dx, out.dw, x_, w_, targets, rows, kGradScale, c.shape, scratch,
                          out.logits);
    return out;
  }

  /// `offset`: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, Want want = Want::Gradients, int64_t offset = 0) const {
    DeviceTensor x_(cuda, x, offset), w_(cuda, w, offset), targets_(cuda, targets, offset), dw_(cuda, dw, offset);
    DeviceTensor nll_(cuda, nll), dx_(cuda, x.dtype(), x.shape(), offset);
    DeviceTensor logits_(cuda, DType::F32, {c.T, c.V}, offset), scratch(cuda, DType::U8, workspace(x.dtype()).shape());
    LossRows rows;
    DeviceTensor order(cuda, row_order(rows.num_targets), offset);
    rows.rows = order;
    const bool wants_logits = want == Want::GradientsAndLogits || want == Want::LossAndLogits;
    const Tensor logits = wants_logits ? logits_.view() : Tensor{};
    if (want == Want::Loss || want == Want::LossAndLogits) {
      loss_forward(cuda, nll_, x_, w_, targets_, rows, c.shape, scratch, logits);
      return {nll_.to_host(), x.to(DType::F32), dw_.to_host(), wants_logits ? logits_.to_host() : nll};
    }
    Tensor dx = want == Want::GradientsInPlace ? x_.view() : dx_.view();
    loss_forward_backward(cuda, nll_, dx, dw_, x_, w_, targets_, rows, kGradScale, c.shape, scratch, logits);
    return {nll_.to_host(), (want == Want::GradientsInPlace ? x_ : dx_).to_host(), dw_.to_host(),
            wants_logits ? logits_.to_host() : nll};
  }
};

std::string describe(const LossCase& c, DType dtype, int64_t offset = 0) {
  return fmt::format("{} T {} C {} V {} cap {} scale {} tile {} offset {}", name_of(dtype), c.T, c.C, c.V,
                     c.shape.softcap, c.shape.logit_scale, c.shape.tile_tokens, offset);
}

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.nll.bit_equal(b.nll) && a.dx.bit_equal(b.dx) && a.dw.bit_equal(b.dw);
}

/// A logit is a sum of C products near 1, and exp(logit - max) has its absolute error as a relative one; some eight
/// roundings more for the cap, the exponential and the products; on either side. Logits are fp32 for BF16 too, their
/// gradient is then rounded to 8 bits, which errors of random sign carry over to dx and dw as they are; and so is dx.
void expect_equal(const Outputs& cuda, const Outputs& cpu, const Inputs& in) {
  const double in_fp32 = 2 * (8 + static_cast<double>(in.c.C)) * 0x1p-24;
  const double rounded = in.x.dtype() == DType::BF16 ? 0x1p-8 : 0;
  EXPECT_NEAR(cuda.nll.get(0), cpu.nll.get(0), in_fp32 * (static_cast<double>(in.c.T) + cpu.nll.get(0)));
  for (int64_t t = 0; t < in.c.T; t++) {
    for (int64_t k = 0; !in.has_target(t) && k < in.c.C; k++) ASSERT_EQ(cuda.dx.get(t * in.c.C + k), 0);
  }
  if (in.c.V == 1) {  // the probability is 1, the gradient 0
    EXPECT_EQ(relative_l2(cuda.dx, HostTensor(DType::F32, in.x.shape())), 0);
    EXPECT_TRUE(cuda.dw.bit_equal(in.dw));
    return;
  }
  EXPECT_LE(relative_l2(cuda.dx, cpu.dx), 4 * in_fp32 + 2 * rounded);
  EXPECT_LE(relative_l2(cuda.dw, cpu.dw), 4 * in_fp32 + rounded);
}

class LossCuda : public testing::Test {
 protected:
  LossCuda() { simt_options() = {}; }

  template <class Op>
  static void for_all_cases(Op&& op) {
    for (const LossCase& c : kLossCases) op(c);
    for (const LossCase& c : kPackedCases) op(c);
  }

  Device cuda = Device::cuda(0);
};

TEST_F(LossCuda, kernels_equal_the_cpu_layer) {
  for_all_cases([&](const LossCase& c) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Inputs in(c, dtype);
      const Outputs expected = in.on_cpu();
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(describe(c, dtype, offset));
        expect_equal(in.on_cuda(cuda, Want::Gradients, offset), expected, in);
      }
    }
  });
  const Inputs in(kFilledUpCase, DType::BF16);
  expect_equal(in.on_cuda(cuda), in.on_cpu(), in);
}

TEST_F(LossCuda, loss_alone_and_with_logits_has_the_same_bits) {
  for_all_cases([&](const LossCase& c) {
    SCOPED_TRACE(describe(c, DType::BF16));
    const Inputs in(c, DType::BF16);
    const Outputs plain = in.on_cuda(cuda), with_logits = in.on_cuda(cuda, Want::GradientsAndLogits, 0);
    EXPECT_TRUE(bit_equal(with_logits, plain));
    EXPECT_TRUE(in.on_cuda(cuda, Want::Loss).nll.bit_equal(plain.nll));
    const Outputs loss = in.on_cuda(cuda, Want::LossAndLogits);
    EXPECT_TRUE(loss.nll.bit_equal(plain.nll) && loss.logits.bit_equal(with_logits.logits));
    EXPECT_LE(relative_l2(loss.logits, in.on_cpu().logits), 2 * (8 + static_cast<double>(c.C)) * 0x1p-24);
  });
}

TEST_F(LossCuda, bits_do_not_depend_on_the_schedule) {
  for (const LossCase& c : {LossCase{7, 6, 17, {3.0, 4}, 0.0}, {2, 8, 2056, {0, 3}, 0.0}, {3, 3, 1025, {5.0, 3}}}) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Inputs in(c, dtype);
      const Outputs first = in.on_cuda(cuda);
      for (const uint64_t schedule : kOtherSchedules) {
        simt_options().schedule = schedule;
        EXPECT_TRUE(bit_equal(in.on_cuda(cuda), first)) << describe(c, dtype) << " schedule " << schedule;
      }
      simt_options() = {};
    }
  }
}

TEST_F(LossCuda, dx_may_be_the_memory_of_x) {
  for_all_cases([&](const LossCase& c) {
    const Inputs in(c, DType::BF16);
    EXPECT_TRUE(bit_equal(in.on_cuda(cuda, Want::GradientsInPlace), in.on_cuda(cuda))) << describe(c, DType::BF16);
  });
  LossCase c = {12, 5, 9, {0, 4}};
  const Inputs in(c, DType::F32);
  EXPECT_TRUE(bit_equal(in.on_cuda(cuda, Want::GradientsInPlace), in.on_cuda(cuda)));
}

TEST_F(LossCuda, the_size_of_tiles_changes_rounding_only) {
  LossCase c = {20, 8, 24, {0, 20}, 0.3};
  const Outputs whole = Inputs(c, DType::F32).on_cuda(cuda);
  for (const int64_t tile : {1, 7, 13, 1000}) {
    c.shape.tile_tokens = tile;
    const Outputs tiled = Inputs(c, DType::F32).on_cuda(cuda);
    EXPECT_EQ(tiled.nll.get(0), whole.nll.get(0)) << tile;
    EXPECT_TRUE(tiled.dx.bit_equal(whole.dx)) << tile;
    EXPECT_LE(relative_l2(tiled.dw, whole.dw), 8 * 0x1p-24) << tile;
  }
}

TEST_F(LossCuda, rows_without_a_target_are_not_read) {
  for (const LossCase& c : {LossCase{12, 5, 9, {0, 4}}, kFilledUpCase}) {
    Inputs clean(c, DType::BF16), poisoned(c, DType::BF16);
    for (int64_t i = 0; i < c.T * c.C; i++) {
      if (!clean.has_target(i / c.C)) poisoned.x.set(i, std::numeric_limits<double>::quiet_NaN());
    }
    EXPECT_TRUE(bit_equal(poisoned.on_cuda(cuda), clean.on_cuda(cuda)));
  }
}

TEST_F(LossCuda, without_any_target_everything_is_zero) {
  for (const int64_t T : {6, 0}) {
    Inputs in({T, 3, 8, {0, 4}, 1.1}, DType::BF16);
    in.dw.fill_normal(4), in.nll.set(0, 2.5);
    const Outputs out = in.on_cuda(cuda, Want::GradientsAndLogits);
    EXPECT_TRUE(out.nll.bit_equal(in.nll));
    EXPECT_TRUE(out.dw.bit_equal(in.dw));
    for (int64_t i = 0; i < out.dx.numel(); i++) EXPECT_EQ(out.dx.get(i), 0);
  }
}

TEST_F(LossCuda, loss_and_weight_gradient_are_added_to_what_is_there) {
  Inputs in({12, 5, 9, {0, 4}}, DType::BF16);
  const Outputs alone = in.on_cuda(cuda);
  in.nll.set(0, 1.5), in.dw.fill_normal(4);
  const Outputs on_top = in.on_cuda(cuda);
  EXPECT_EQ(on_top.nll.get(0), 1.5 + alone.nll.get(0));
  for (int64_t i = 0; i < in.dw.numel(); i++) {
    EXPECT_NEAR(on_top.dw.get(i), in.dw.get(i) + alone.dw.get(i), 0x1p-22);
  }
}

/// One row with exactly these logits: C = 1, x = 1.
Outputs of_logits(Device& cuda, const std::vector<double>& z, int64_t target) {
  Inputs in({1, 1, static_cast<int64_t>(z.size()), {0, 1}}, DType::F32);
  in.x.set(0, 1);
  for (size_t v = 0; v < z.size(); v++) in.w.set(static_cast<int64_t>(v), z[v]);
  in.targets.set(0, static_cast<double>(target));
  return in.on_cuda(cuda);
}

TEST_F(LossCuda, huge_and_non_finite_logits_give_what_they_should) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNaN = std::numeric_limits<double>::quiet_NaN();
  const auto loss = [&](const std::vector<double>& z, int64_t target) { return of_logits(cuda, z, target).nll.get(0); };
  EXPECT_EQ(loss({1e30, -1e30}, 0), 0);
  EXPECT_NEAR(loss({1e30, -1e30}, 1), 2e30, 1e24);
  EXPECT_NEAR(loss({-1e4, -1e4 + 1}, 0), std::log(1 + std::exp(1.0)), 1e-6);
  EXPECT_FALSE(std::isfinite(loss({1, kNaN, 2}, 0)));
  EXPECT_FALSE(std::isfinite(loss({1, kInfinity, 2}, 0)));
  EXPECT_NEAR(loss({-kInfinity, 0, 0}, 1), std::log(2.0), 1e-6);
  const HostTensor dz = of_logits(cuda, {1e4, 1e4, -1e4}, 0).dw;
  EXPECT_FLOAT_EQ(dz.get(0), -0.5 * kGradScale);
  EXPECT_FLOAT_EQ(dz.get(1), 0.5 * kGradScale);
  EXPECT_EQ(dz.get(2), 0);
}

TEST_F(LossCuda, a_maximum_of_any_thread_and_pass_is_found) {
  for (const int64_t V : {5002, 5004}) {  // scalar, packed
    for (const int64_t top : {0, 31, 32, 1023, 1024, 4096, 5001}) {
      std::vector<double> z(static_cast<size_t>(V), -2.0);
      z[static_cast<size_t>(top)] = 95;  // exp overflows fp32 unless the maximum is subtracted
      EXPECT_NEAR(of_logits(cuda, z, 5).nll.get(0), 97, 1e-5) << top;
    }
  }
}

TEST_F(LossCuda, fp64_is_refused_by_name) {
  Inputs in({2, 3, 4, {0, 2}}, DType::F64);
  in.dw = HostTensor(DType::F64, {4, 3});
  EXPECT_EQ(error_of([&] { in.on_cuda(cuda); }),
            "loss: dtype F64 is not supported on the CUDA device, use F32 or BF16");
}

TEST_F(LossCuda, these_kernels_ran) {
  Inputs({12, 5, 9, {0, 4}}, DType::F32).on_cuda(cuda, Want::GradientsAndLogits);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name :
       {"loss_row_kernel", "loss_logits_kernel", "loss_gather_kernel", "loss_scatter_kernel", "loss_sum_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
