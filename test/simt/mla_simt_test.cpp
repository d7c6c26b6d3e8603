// The CUDA kernels of latent attention's layouts, run on the CPU, against the CPU layer: copies, so bit for bit.
#include "layers/mla.h"

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

struct Outputs {
  HostTensor qkv, dq, dkv, dk_rope, narrow, wide;
};

struct Inputs {
  MlaCase c;
  HostTensor q, kv, k_rope, dqkv;

  Inputs(const MlaCase& which, DType dtype)
      : c(which),
        q(dtype, {c.T, c.shape.num_heads * c.shape.head_dim()}, "q"),
        kv(dtype, {c.T, c.shape.num_heads * (c.shape.nope + c.shape.v)}, "kv"),
        k_rope(dtype, {c.T, c.shape.rope}, "k_rope"),
        dqkv(dtype, {c.T, 3 * c.shape.num_heads, c.shape.head_dim()}, "dqkv") {
    q.fill_normal(1), kv.fill_normal(2), k_rope.fill_normal(3), dqkv.fill_normal(4);
  }
  Shape narrow_shape() const { return {c.T, c.shape.num_heads * c.shape.v}; }
  Shape wide_shape() const { return {c.T, c.shape.num_heads, c.shape.head_dim()}; }

  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    const HostTensor q32 = q.to(DType::F32), kv32 = kv.to(DType::F32), rope32 = k_rope.to(DType::F32),
                     d32 = dqkv.to(DType::F32);
    Outputs out = {HostTensor(DType::F32, dqkv.shape()),   HostTensor(DType::F32, q.shape()),
                   HostTensor(DType::F32, kv.shape()),     HostTensor(DType::F32, k_rope.shape()),
                   HostTensor(DType::F32, narrow_shape()), HostTensor(DType::F32, wide_shape())};
    mla_assemble(cpu, out.qkv, q32, kv32, rope32, c.shape);
    mla_assemble_backward(cpu, out.dq, out.dkv, out.dk_rope, d32, c.shape);
    mla_narrow(cpu, out.narrow, Tensor(out.dq).reshaped(wide_shape()), c.shape);
    mla_widen(cpu, out.wide, out.narrow, c.shape);
    return out;
  }

  /// `offset`: elements between a tensor and an aligned address; if `only` >= 0, for that one of the ten alone.
  Outputs on_cuda(Device& cuda, int64_t offset = 0, int only = -1) const {
    const DType dtype = q.dtype();
    const auto of = [&](int i) { return only < 0 || only == i ? offset : 0; };
    DeviceTensor q_(cuda, q, of(0)), kv_(cuda, kv, of(1)), rope_(cuda, k_rope, of(2)), d_(cuda, dqkv, of(3));
    DeviceTensor qkv_(cuda, dtype, dqkv.shape(), of(4)), dq_(cuda, dtype, q.shape(), of(5)),
        dkv_(cuda, dtype, kv.shape(), of(6)), dk_rope_(cuda, dtype, k_rope.shape(), of(7)),
        narrow_(cuda, dtype, narrow_shape(), of(8)), wide_(cuda, dtype, wide_shape(), of(9));
    mla_assemble(cuda, qkv_, q_, kv_, rope_, c.shape);
    mla_assemble_backward(cuda, dq_, dkv_, dk_rope_, d_, c.shape);
    mla_narrow(cuda, narrow_, dq_.view().reshaped(wide_shape()), c.shape);
    mla_widen(cuda, wide_, narrow_, c.shape);
    return {qkv_.to_host(), dq_.to_host(), dkv_.to_host(), dk_rope_.to_host(), narrow_.to_host(), wide_.to_host()};
  }
};

class MlaCuda : public testing::Test {
 protected:
  MlaCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(MlaCuda, kernels_equal_the_cpu_layer) {
  for (const MlaCase& c : kMlaCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Inputs in(c, dtype);
      const Outputs cpu = in.on_cpu();
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(fmt::format("{} T {} heads {} offset {}", name_of(dtype), c.T, c.shape.num_heads, offset));
        const Outputs out = in.on_cuda(cuda, offset);
        expect_elements_near(out.qkv, cpu.qkv, 0, 0, "qkv");
        expect_elements_near(out.dq, cpu.dq, 0, 0, "dq");
        expect_elements_near(out.dkv, cpu.dkv, 0, 0, "dkv");
        expect_elements_near(out.dk_rope, cpu.dk_rope, 0, 0, "dk_rope");  // the heads in order, rounded once
        expect_elements_near(out.narrow, cpu.narrow, 0, 0, "narrow");
        expect_elements_near(out.wide, cpu.wide, 0, 0, "wide");
      }
    }
  }
}

TEST_F(MlaCuda, one_tensor_out_of_line_is_enough_for_single_elements) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    const Inputs in({3, {2, 16, 8, 16}}, dtype);
    const Outputs aligned = in.on_cuda(cuda);
    for (int only = 0; only < 10; only++) {
      const Outputs out = in.on_cuda(cuda, 1, only);
      EXPECT_TRUE(out.qkv.bit_equal(aligned.qkv) && out.dq.bit_equal(aligned.dq) && out.dkv.bit_equal(aligned.dkv) &&
                  out.dk_rope.bit_equal(aligned.dk_rope) && out.narrow.bit_equal(aligned.narrow) &&
                  out.wide.bit_equal(aligned.wide))
          << name_of(dtype) << " " << only;
    }
  }
}

TEST_F(MlaCuda, these_kernels_ran) {
  Inputs({2, {2, 8, 8, 8}}, DType::BF16).on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"mla_assemble_kernel", "mla_assemble_backward_kernel", "mla_resize_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
