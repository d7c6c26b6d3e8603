// The CUDA kernel of AdamW, run on the CPU, against the CPU layer.
#include "layers/adamw.h"

#include "test/layer_cases.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12};

struct Outputs {
  HostTensor p, m, v, weights;

  bool bit_equal(const Outputs& other) const {
    return p.bit_equal(other.p) && m.bit_equal(other.m) && v.bit_equal(other.v) && weights.bit_equal(other.weights);
  }
};

struct Inputs {
  HostTensor p, m, v, g;

  explicit Inputs(int64_t n, DType of_g = DType::F32)
      : p(DType::F32, {n}, "p"), m(DType::F32, {n}, "m"), v(DType::F32, {n}, "v"), g(of_g, {n}, "g") {
    p.fill_normal(1), m.fill_normal(2, 0.1), v.fill_normal(3, 0.1), g.fill_normal(4);
    for (int64_t i = 0; i < n; i++) v.set(i, v.get(i) * v.get(i));
  }

  Outputs on_cpu(const AdamWStep& step) const {
    Device cpu = Device::cpu();
    Outputs out = {p, m, v, HostTensor(DType::BF16, p.shape())};
    adamw_update(cpu, out.p, out.m, out.v, g, step, out.weights);
    return out;
  }

  /// Offsets: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, const AdamWStep& step, int64_t offset = 0, int64_t weights_offset = 0) const {
    DeviceTensor p_(cuda, p, offset), m_(cuda, m, offset), v_(cuda, v, offset), g_(cuda, g, offset);
    DeviceTensor weights_(cuda, DType::BF16, p.shape(), weights_offset);
    adamw_update(cuda, p_, m_, v_, g_, step, weights_);
    return {p_.to_host(), m_.to_host(), v_.to_host(), weights_.to_host()};
  }
};

class AdamWCuda : public testing::Test {
 protected:
  AdamWCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
  const AdamWStep step{
      .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-3, .weight_decay = 0.3, .clip_scale = 0.25, .step = 3};
};

// The same operations in the same order, none contracted on this machine: nothing is left to differ.
TEST_F(AdamWCuda, kernel_has_the_bits_of_the_cpu_layer) {
  for (const int64_t n : kFlatSizes) {
    for (const auto& [offset, weights_offset] : {std::pair(0, 0), std::pair(1, 0), std::pair(0, 1), std::pair(4, 4)}) {
      for (const DType of_g : {DType::F32, DType::BF16}) {
        const Inputs in(n, of_g);
        EXPECT_TRUE(in.on_cuda(cuda, step, offset, weights_offset).bit_equal(in.on_cpu(step)))
            << n << " offsets " << offset << " " << weights_offset << " " << name_of(of_g);
      }
    }
  }
}

TEST_F(AdamWCuda, bits_do_not_depend_on_weights_or_cuts_or_the_schedule) {
  const int64_t n = 5000;
  const Inputs in(n);
  const Outputs expected = in.on_cuda(cuda, step);
  for (const uint64_t schedule : kOtherSchedules) {
    simt_options().schedule = schedule;
    EXPECT_TRUE(in.on_cuda(cuda, step).bit_equal(expected)) << schedule;
    DeviceTensor p(cuda, in.p), m(cuda, in.m), v(cuda, in.v), g(cuda, in.g);
    int64_t begin = 0;
    for (const int64_t end : {int64_t{1}, int64_t{4}, int64_t{12}, int64_t{4012}, n}) {
      const auto cut = [&](DeviceTensor& t) { return t.view().rows(begin, end - begin); };
      adamw_update(cuda, cut(p), cut(m), cut(v), cut(g), step);
      begin = end;
    }
    EXPECT_TRUE((Outputs{p.to_host(), m.to_host(), v.to_host(), expected.weights}.bit_equal(expected))) << schedule;
  }
}

TEST_F(AdamWCuda, moments_without_gradients_end_at_zero_not_in_subnormal_numbers) {
  Inputs in(20);
  in.g.fill(0), in.m.fill(-0x1.1p-126), in.v.fill(0x1p-126);
  const Outputs out = in.on_cuda(cuda, {.lr = 1e-2, .step = 1});
  for (int64_t i = 0; i < 20; i++) {
    EXPECT_EQ(out.m.get(i), 0.0);
    EXPECT_EQ(out.v.get(i), 0.0);
    EXPECT_EQ(out.p.get(i), in.p.get(i));
  }
  in.m.fill(0x1.2p-126);  // 0.9 of it is a normal number
  EXPECT_EQ(in.on_cuda(cuda, {.lr = 1e-2, .step = 1}).m.get(0), 0.9f * 0x1.2p-126f);
}

TEST_F(AdamWCuda, fp64_is_refused_by_name) {
  HostTensor x(DType::F64, {8}, "x");
  EXPECT_EQ(error_of([&] { adamw_update(cuda, x, x, x, x, step); }),
            "adamw_update: dtype F64 is not supported on the CUDA device, use F32");
}

TEST_F(AdamWCuda, this_kernel_ran) {
  Inputs(5).on_cuda(cuda, step);
  EXPECT_TRUE(simt_launched_kernels().contains("adamw_update_kernel"));
}

}  // namespace
