// The CUDA kernels of the token embedding, run on the CPU, against the CPU layer.
#include "layers/embedding.h"

#include <cmath>

#include "test/layer_cases.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr double kScale = 1.7;  // no power of two: the product is rounded
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12, 13};

struct Outputs {
  HostTensor y, dw;
};

struct Inputs {
  HostTensor w, dy, dw, tokens, order;  ///< dw: what the gradient adds to
  std::vector<int64_t> count;           ///< of each token

  Inputs(const EmbeddingCase& c, DType dtype)
      : w(dtype, {c.V, c.C}, "w"),
        dy(dtype, {c.T, c.C}, "dy"),
        dw(DType::F32, {c.V, c.C}, "dw"),
        tokens(DType::I32, {c.T}, "tokens"),
        order(DType::I32, {c.T}, "order"),
        count(static_cast<size_t>(c.V)) {
    w.fill_normal(1), dy.fill_normal(2), dw.fill_normal(3);
    const Philox rng(4, 0);
    for (int64_t t = 0; t < c.T; t++) {  // small numbers are frequent, as in a vocabulary
      const uint64_t i = static_cast<uint64_t>(2 * t), V = static_cast<uint64_t>(c.V);
      const uint64_t token = rng.below(i, V) * rng.below(i + 1, V) / V;
      tokens.set(t, static_cast<double>(token));
      count[token]++;
    }
    const int32_t* ids = tokens.as<int32_t>();
    const std::vector<int32_t> sorted = embedding_order({ids, static_cast<size_t>(c.T)}, c.V);
    for (int64_t t = 0; t < c.T; t++) order.set(t, sorted[static_cast<size_t>(t)]);
  }

  /// In fp32, from the same inputs.
  Outputs on_cpu(int64_t pad_token_id = -1) const {
    Device cpu = Device::cpu();
    Outputs out = {HostTensor(DType::F32, dy.shape()), dw};
    embedding_forward(cpu, out.y, tokens, w.to(DType::F32), kScale);
    embedding_backward(cpu, out.dw, dy.to(DType::F32), tokens, {}, kScale, pad_token_id);
    return out;
  }

  /// `offset`: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, int64_t offset = 0, int64_t pad_token_id = -1) const {
    DeviceTensor w_(cuda, w, offset), dy_(cuda, dy, offset), dw_(cuda, dw, offset), tokens_(cuda, tokens),
        order_(cuda, order), y_(cuda, dy.dtype(), dy.shape(), offset);
    embedding_forward(cuda, y_, tokens_, w_, kScale);
    embedding_backward(cuda, dw_, dy_, tokens_, order_, kScale, pad_token_id);
    return {y_.to_host(), dw_.to_host()};
  }
};

std::string describe(const EmbeddingCase& c, DType dtype, int64_t offset = 0) {
  return fmt::format("{} T {} V {} C {} offset {}", name_of(dtype), c.T, c.V, c.C, offset);
}

/// A run within a chunk is summed as on the CPU, from the old value on. Of a long run the partial sums are added in
/// another order: n additions differ by about sqrt(n) roundings of the sum of their sizes.
void expect_gradient_equal(const HostTensor& actual, const HostTensor& expected, const Inputs& in) {
  const int64_t C = in.dy.shape().last();
  constexpr int64_t kChunk = 32;
  if (in.dy.shape().rows() <= kChunk) {
    EXPECT_TRUE(actual.bit_equal(expected));
    return;
  }
  HostTensor sizes(DType::F64, actual.shape());
  for (int64_t i = 0; i < actual.numel(); i++) sizes.set(i, std::abs(in.dw.get(i)));
  for (int64_t i = 0; i < in.dy.numel(); i++) {
    const int64_t at = static_cast<int64_t>(in.tokens.get(i / C)) * C + i % C;
    sizes.set(at, sizes.get(at) + std::abs(kScale * in.dy.get(i)));
  }
  for (int64_t i = 0; i < actual.numel(); i++) {
    const double n = static_cast<double>(in.count[static_cast<size_t>(i / C)]);
    const double bound = n <= 1 ? 0 : 2 * 0x1p-24 * std::sqrt(n) * sizes.get(i);
    ASSERT_NEAR(actual.get(i), expected.get(i), bound) << "dw[" << i / C << ", " << i % C << "], " << n << " tokens";
  }
}

class EmbeddingCuda : public testing::Test {
 protected:
  EmbeddingCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(EmbeddingCuda, kernels_equal_the_cpu_layer) {
  for (const EmbeddingCase& c : kEmbeddingCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(describe(c, dtype, offset));
        const Inputs in(c, dtype);
        const Outputs cuda_out = in.on_cuda(cuda, offset), cpu_out = in.on_cpu();
        EXPECT_TRUE(cuda_out.y.bit_equal(cpu_out.y.to(dtype)));  // one product, rounded once
        expect_gradient_equal(cuda_out.dw, cpu_out.dw, in);
      }
    }
  }
}

TEST_F(EmbeddingCuda, chunks_get_longer_when_there_would_be_too_many) {
  const EmbeddingCase c = {140000, 3, 1};  // 4000 chunks of 35
  const Inputs in(c, DType::F32);
  expect_gradient_equal(in.on_cuda(cuda).dw, in.on_cpu().dw, in);
}

TEST_F(EmbeddingCuda, bits_do_not_depend_on_the_schedule) {
  for (const EmbeddingCase& c : kEmbeddingCases) {
    const Inputs in(c, DType::BF16);
    const Outputs first = in.on_cuda(cuda);
    for (const uint64_t schedule : kOtherSchedules) {
      simt_options().schedule = schedule;
      const Outputs again = in.on_cuda(cuda);
      EXPECT_TRUE(again.y.bit_equal(first.y) && again.dw.bit_equal(first.dw)) << describe(c, DType::BF16) << schedule;
    }
    simt_options() = {};
  }
}

// Pads that fill chunks, that end in one, and that are rare.
TEST_F(EmbeddingCuda, the_pad_row_gets_nothing_and_the_others_what_they_get_without_pads) {
  for (const EmbeddingCase& c : {EmbeddingCase{1000, 300, 40}, EmbeddingCase{333, 2, 131}}) {
    for (const int64_t pad : {int64_t{0}, int64_t{1}, c.V - 1}) {
      const Inputs in(c, DType::BF16);
      const Outputs without = in.on_cuda(cuda), out = in.on_cuda(cuda, 0, pad);
      for (int64_t i = 0; i < c.V * c.C; i++) {
        ASSERT_EQ(out.dw.get(i), i / c.C == pad ? in.dw.get(i) : without.dw.get(i)) << pad << " " << i / c.C;
      }
    }
  }
}

TEST_F(EmbeddingCuda, no_tokens_are_no_work) {
  const EmbeddingCase c = {0, 4, 8};
  const Inputs in(c, DType::F32);
  EXPECT_TRUE(in.on_cuda(cuda).dw.bit_equal(in.dw));
}

TEST_F(EmbeddingCuda, contract_violations_are_named) {
  HostTensor x(DType::F64, {2, 8}, "x"), tokens(DType::I32, {2}, "tokens"), f32(DType::F32, {2, 8}, "f32");
  const std::string what = ": dtype F64 is not supported on the CUDA device, use F32 or BF16";
  EXPECT_EQ(error_of([&] { embedding_forward(cuda, x, tokens, x, 1); }), "embedding_forward" + what);
  EXPECT_EQ(error_of([&] { embedding_backward(cuda, x, x, tokens, tokens, 1, -1); }), "embedding_backward" + what);
  EXPECT_EQ(error_of([&] { embedding_backward(cuda, f32, f32, tokens, {}, 1, -1); }),
            "embedding_backward: order ('') is F32 (), expected I32 (2)");
}

TEST_F(EmbeddingCuda, these_kernels_ran) {
  const EmbeddingCase c = {100, 3, 8};
  Inputs(c, DType::F32).on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"embedding_forward_kernel", "embedding_backward_kernel", "embedding_partials_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
