// The kernels around cuDNN's attention on the emulated GPU, against loops that say what they do.
#include "layers/attention_ragged.h"

#include <algorithm>
#include <vector>

#include "test/simt/device_tensor.h"

namespace {

constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 2, 3};

class AttentionRaggedCuda : public testing::Test {
 protected:
  AttentionRaggedCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

HostTensor to_tensor(const std::vector<int64_t>& values) {
  HostTensor t(DType::I64, {static_cast<int64_t>(values.size())}, "cu_seqlens");
  std::copy(values.begin(), values.end(), t.as<int64_t>());
  return t;
}

struct Slots {
  DeviceTensor lengths, qkv, q, kv, lse;

  Slots(Device& device, int64_t n)
      : lengths(device, DType::I32, {n}),
        qkv(device, DType::I64, {n + 1}),
        q(device, DType::I64, {n + 1}),
        kv(device, DType::I64, {n + 1}),
        lse(device, DType::I64, {n + 1}) {}
  RaggedDocuments view() { return {lengths, qkv, q, kv, lse}; }
};

struct DocumentsCase {
  std::vector<int64_t> cu_seqlens;
  int64_t slots;
};

// One document; all slots filled; some empty; an entry more than a block has threads; a tail; offsets over 2^32.
const DocumentsCase kDocumentsCases[] = {
    {{0, 5}, 1},      {{0, 1, 4, 9, 10}, 4}, {{0, 7, 20, 21}, 8},
    {{0, 3, 4}, 256}, {{0, 2, 4, 5}, 300},   {{0, int64_t{1} << 20, (int64_t{1} << 20) + 3}, 4},
};

TEST_F(AttentionRaggedCuda, documents_become_lengths_and_offsets) {
  constexpr int64_t kHeads = 32, kKvHeads = 8, kHeadDim = 128;
  for (const DocumentsCase& c : kDocumentsCases) {
    for (const uint64_t schedule : {kSimtAscending, kSimtDescending}) {
      SCOPED_TRACE(fmt::format("{} documents, {} slots", c.cu_seqlens.size() - 1, c.slots));
      simt_options().schedule = schedule;
      Slots slots(cuda, c.slots);
      DeviceTensor cu(cuda, to_tensor(c.cu_seqlens));
      ragged_documents_cuda(cuda, slots.view(), cu, kHeads, kKvHeads, kHeadDim);
      HostTensor lengths = slots.lengths.to_host(), qkv = slots.qkv.to_host(), q = slots.q.to_host(),
                 kv = slots.kv.to_host(), lse = slots.lse.to_host();
      const int64_t N = static_cast<int64_t>(c.cu_seqlens.size()) - 1;
      for (int64_t i = 0; i <= c.slots; i++) {
        const int64_t begin = c.cu_seqlens[static_cast<size_t>(std::min(i, N))];
        const int64_t end = c.cu_seqlens[static_cast<size_t>(std::min(i + 1, N))];
        if (i < c.slots) {
          ASSERT_EQ(lengths.get(i), end - begin) << i;
        }
        ASSERT_EQ(qkv.as<int64_t>()[i], begin * (kHeads + 2 * kKvHeads) * kHeadDim) << i;
        ASSERT_EQ(q.as<int64_t>()[i], begin * kHeads * kHeadDim) << i;
        ASSERT_EQ(kv.as<int64_t>()[i], begin * kKvHeads * kHeadDim) << i;
        ASSERT_EQ(lse.as<int64_t>()[i], begin * kHeads) << i;
      }
    }
  }
}

TEST_F(AttentionRaggedCuda, more_documents_than_slots_are_refused) {
  Slots slots(cuda, 2);
  DeviceTensor cu(cuda, to_tensor({0, 1, 2, 3}));
  EXPECT_THROW(ragged_documents_cuda(cuda, slots.view(), cu, 2, 1, 8), Error);
}

struct JoinCase {
  int64_t T, NH, NKV, HD, offset;
};

// One token; GQA, MHA; packs and single elements, by width and by alignment; several blocks with a tail.
constexpr JoinCase kJoinCases[] = {
    {1, 1, 1, 8, 0},   {1, 1, 1, 1, 0},   {3, 6, 2, 16, 0}, {7, 4, 4, 8, 0},
    {65, 5, 1, 64, 0}, {33, 6, 2, 16, 1}, {50, 3, 1, 5, 0}, {0, 2, 1, 16, 0},
};

HostTensor random(const JoinCase& c, int64_t heads, uint64_t seed) {
  return HostTensor(DType::F32, {c.T, heads, c.HD}).fill_normal(seed).to(DType::BF16);
}

TEST_F(AttentionRaggedCuda, gradients_are_joined) {
  for (const JoinCase& c : kJoinCases) {
    const HostTensor dq = random(c, c.NH, 1), dk = random(c, c.NKV, 2), dv = random(c, c.NKV, 3);
    HostTensor expected(DType::BF16, {c.T, c.NH + 2 * c.NKV, c.HD});
    for (int64_t t = 0, at = 0; t < c.T; t++) {
      for (int64_t i = 0; i < c.NH * c.HD; i++) expected.set(at++, dq.get(t * c.NH * c.HD + i));
      for (int64_t i = 0; i < c.NKV * c.HD; i++) expected.set(at++, dk.get(t * c.NKV * c.HD + i));
      for (int64_t i = 0; i < c.NKV * c.HD; i++) expected.set(at++, dv.get(t * c.NKV * c.HD + i));
    }
    for (const uint64_t schedule : {kSimtAscending, kOtherSchedules[0], kOtherSchedules[1], kOtherSchedules[2]}) {
      simt_options().schedule = schedule;
      DeviceTensor dqkv(cuda, DType::BF16, expected.shape(), c.offset);
      DeviceTensor q(cuda, dq, c.offset), k(cuda, dk, c.offset), v(cuda, dv, c.offset);
      join_qkv_cuda(cuda, dqkv, q, k, v);
      EXPECT_TRUE(dqkv.to_host().bit_equal(expected))
          << fmt::format("T {}, heads {} and {}, width {}, offset {}", c.T, c.NH, c.NKV, c.HD, c.offset);
    }
    simt_options() = {};
  }
}

TEST_F(AttentionRaggedCuda, one_tensor_out_of_line_is_enough_for_single_elements) {
  const JoinCase c = {9, 3, 1, 16, 0};
  const HostTensor dq = random(c, c.NH, 1), dk = random(c, c.NKV, 2), dv = random(c, c.NKV, 3);
  DeviceTensor q(cuda, dq), k(cuda, dk), v(cuda, dv), aligned(cuda, DType::BF16, {c.T, c.NH + 2 * c.NKV, c.HD});
  join_qkv_cuda(cuda, aligned, q, k, v);
  for (int out_of_line = 0; out_of_line < 4; out_of_line++) {
    const auto offset = [&](int which) { return int64_t{which == out_of_line}; };
    DeviceTensor dqkv(cuda, DType::BF16, {c.T, c.NH + 2 * c.NKV, c.HD}, offset(0));
    DeviceTensor q_(cuda, dq, offset(1)), k_(cuda, dk, offset(2)), v_(cuda, dv, offset(3));
    join_qkv_cuda(cuda, dqkv, q_, k_, v_);
    EXPECT_TRUE(dqkv.to_host().bit_equal(aligned.to_host())) << out_of_line;
  }
}

TEST_F(AttentionRaggedCuda, these_kernels_ran) {
  Slots slots(cuda, 2);
  DeviceTensor cu(cuda, to_tensor({0, 1, 2}));
  ragged_documents_cuda(cuda, slots.view(), cu, 2, 1, 8);
  const JoinCase c = {2, 2, 1, 8, 0};
  DeviceTensor dqkv(cuda, DType::BF16, {2, 4, 8}), q(cuda, random(c, 2, 1)), k(cuda, random(c, 1, 2)),
      v(cuda, random(c, 1, 3));
  join_qkv_cuda(cuda, dqkv, q, k, v);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"ragged_documents_kernel", "join_qkv_kernel"}) EXPECT_TRUE(kernels.contains(name)) << name;
}

}  // namespace
