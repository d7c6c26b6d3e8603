// The CUDA kernels of the Ulysses layouts, run on the CPU, against the CPU layer.
#include "layers/ulysses.h"

#include "test/layer_cases.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12};

struct Outputs {
  HostTensor sent, dqkv, o, sent_heads;
};

struct Inputs {
  UlyssesCase c;
  HostTensor qkv, received, received_heads, d_o;

  Inputs(const UlyssesCase& which, DType dtype)
      : c(which),
        qkv(dtype, {c.Ts, c.shape.num_heads + 2 * c.shape.num_kv_heads, c.shape.head_dim}, "qkv"),
        received(dtype, {c.shape.parts, c.Ts, c.shape.part_qkv_heads(), c.shape.head_dim}, "received"),
        received_heads(dtype, {c.shape.parts, c.Ts, c.shape.part_heads(), c.shape.head_dim}, "received_heads"),
        d_o(dtype, {c.Ts, c.shape.num_heads, c.shape.head_dim}, "d_o") {
    qkv.fill_normal(1), received.fill_normal(2), received_heads.fill_normal(3), d_o.fill_normal(4);
  }

  /// In fp32, from the same numbers, and then rounded as a kernel rounds: once.
  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    const auto f32 = [](const HostTensor& t) { return t.to(DType::F32); };
    Outputs out = {f32(received), f32(qkv), f32(d_o), f32(received_heads)};
    ulysses_pack_qkv(cpu, out.sent, f32(qkv), c.shape);
    ulysses_unpack_dqkv(cpu, out.dqkv, f32(received), c.shape);
    ulysses_unpack_heads(cpu, out.o, f32(received_heads), c.shape);
    ulysses_pack_heads(cpu, out.sent_heads, f32(d_o), c.shape);
    for (HostTensor* t : {&out.sent, &out.dqkv, &out.o, &out.sent_heads}) *t = t->to(qkv.dtype());
    return out;
  }

  /// `offset`: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, int64_t offset = 0) const {
    DeviceTensor qkv_(cuda, qkv, offset), received_(cuda, received, offset), heads_(cuda, received_heads, offset),
        d_o_(cuda, d_o, offset);
    const DType dtype = qkv.dtype();
    DeviceTensor sent_(cuda, dtype, received.shape(), offset), dqkv_(cuda, dtype, qkv.shape(), offset),
        o_(cuda, dtype, d_o.shape(), offset), sent_heads_(cuda, dtype, received_heads.shape(), offset);
    ulysses_pack_qkv(cuda, sent_, qkv_, c.shape);
    ulysses_unpack_dqkv(cuda, dqkv_, received_, c.shape);
    ulysses_unpack_heads(cuda, o_, heads_, c.shape);
    ulysses_pack_heads(cuda, sent_heads_, d_o_, c.shape);
    return {sent_.to_host(), dqkv_.to_host(), o_.to_host(), sent_heads_.to_host()};
  }
};

void expect_bit_equal(const Outputs& a, const Outputs& b) {
  EXPECT_TRUE(a.sent.bit_equal(b.sent));
  EXPECT_TRUE(a.dqkv.bit_equal(b.dqkv));
  EXPECT_TRUE(a.o.bit_equal(b.o));
  EXPECT_TRUE(a.sent_heads.bit_equal(b.sent_heads));
}

std::string describe(const UlyssesCase& c, DType dtype) {
  const UlyssesShape& s = c.shape;
  return fmt::format("{} Ts {} heads {} + 2 {} of {} in {} parts", name_of(dtype), c.Ts, s.num_heads, s.num_kv_heads,
                     s.head_dim, s.parts);
}

class UlyssesCuda : public testing::Test {
 protected:
  UlyssesCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(UlyssesCuda, kernels_equal_the_cpu_layer_bit_for_bit) {  // copies, and sums in the same order
  for (const UlyssesCase& c : kUlyssesCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(describe(c, dtype));
        const Inputs in(c, dtype);
        expect_bit_equal(in.on_cuda(cuda, offset), in.on_cpu());
      }
    }
  }
}

TEST_F(UlyssesCuda, bits_do_not_depend_on_the_schedule) {
  for (const UlyssesCase& c : kUlyssesCases) {
    SCOPED_TRACE(describe(c, DType::BF16));
    const Inputs in(c, DType::BF16);
    const Outputs first = in.on_cuda(cuda);
    for (const uint64_t schedule : kOtherSchedules) {
      simt_options().schedule = schedule;
      expect_bit_equal(in.on_cuda(cuda), first);
    }
    simt_options() = {};
  }
}

TEST_F(UlyssesCuda, no_tokens_are_no_work) {
  EXPECT_EQ(Inputs({0, {4, 2, 8, 2}}, DType::BF16).on_cuda(cuda).sent.numel(), 0);
}

TEST_F(UlyssesCuda, fp64_is_refused_by_name) {
  const UlyssesShape shape = {2, 2, 4, 2};
  HostTensor qkv(DType::F64, {3, 6, 4}, "qkv"), sent(DType::F64, {2, 3, 3, 4}, "sent");
  EXPECT_EQ(error_of([&] { ulysses_pack_qkv(cuda, sent, qkv, shape); }),
            "ulysses: dtype F64 is not supported on the CUDA device, use F32 or BF16");
}

TEST_F(UlyssesCuda, these_kernels_ran) {
  Inputs({3, {4, 2, 8, 2}}, DType::F32).on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"ulysses_pack_qkv_kernel", "ulysses_unpack_dqkv_kernel", "ulysses_swap_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
