// Kernels around cuDNN's attention. Contract: attention_ragged.h.
//
// Bytes from DRAM, of the least possible:
//   ragged_documents: reads cu_seqlens, 8 (N + 1); writes lengths and four arrays of offsets, 36 slots + 32    the
//   minimum join_qkv:         reads dq, dk, dv, writes dqkv, each 2 T (NH + 2 NKV) HD the minimum
// Every element of an output is written by one thread, and nobody reads it.
#include <algorithm>

#include "layers/attention_ragged.h"
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"

namespace {

constexpr int kThreads = 256;  // of a block

/// Elements of one token in each of the ragged tensors.
struct TokenSizes {
  int64_t qkv, q, kv, lse;
};

/// Thread i writes entry i of all arrays.
__global__ void __launch_bounds__(kThreads)
    ragged_documents_kernel(int32_t* lengths, int64_t* offsets_qkv, int64_t* offsets_q, int64_t* offsets_kv,
                            int64_t* offsets_lse, const int64_t* cu_seqlens, int64_t num_documents, int64_t num_slots,
                            TokenSizes sizes) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i > num_slots) return;
  const int64_t token = cu_seqlens[i < num_documents ? i : num_documents];
  if (i < num_slots) lengths[i] = i < num_documents ? static_cast<int32_t>(cu_seqlens[i + 1] - token) : 0;
  offsets_qkv[i] = token * sizes.qkv;
  offsets_q[i] = token * sizes.q;
  offsets_kv[i] = token * sizes.kv;
  offsets_lse[i] = token * sizes.lse;
}

/// A thread a pack of dqkv. A row of it is q_row + 2 kv_row elements.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    join_qkv_kernel(bf16* dqkv, const bf16* dq, const bf16* dk, const bf16* dv, int64_t T, int q_row, int kv_row) {
  const int row = q_row + 2 * kv_row;
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (at >= T * row) return;
  const int64_t t = at / row;
  const int c = static_cast<int>(at - t * row);
  const bf16* from = c < q_row            ? dq + t * q_row + c
                     : c < q_row + kv_row ? dk + t * kv_row + (c - q_row)
                                          : dv + t * kv_row + (c - q_row - kv_row);
  store_pack<kWidth>(dqkv + at, load_pack<kWidth>(from));
}

template <int kWidth>
void join_qkv(Device& device, Tensor dqkv, ConstTensor dq, ConstTensor dk, ConstTensor dv) {
  const int64_t q_row = dq.shape[1] * dq.shape[2], kv_row = dk.shape[1] * dk.shape[2];
  launch(device, {ceil_div(dqkv.numel(), int64_t{kThreads} * kWidth), kThreads}, join_qkv_kernel<kWidth>,
         dqkv.as<bf16>(), dq.as<bf16>(), dk.as<bf16>(), dv.as<bf16>(), dqkv.shape[0], static_cast<int>(q_row),
         static_cast<int>(kv_row));
}

}  // namespace

void ragged_documents_cuda(Device& device, const RaggedDocuments& documents, ConstTensor cu_seqlens, int64_t num_heads,
                           int64_t num_kv_heads, int64_t head_dim) {
  const int64_t num_slots = documents.lengths.shape[0], num_documents = cu_seqlens.shape[0] - 1;
  CHECK(num_documents >= 0 && num_documents <= num_slots, "ragged_documents: {} documents for {} slots", num_documents,
        num_slots);
  const TokenSizes sizes = {(num_heads + 2 * num_kv_heads) * head_dim, num_heads * head_dim, num_kv_heads * head_dim,
                            num_heads};
  launch(device, {ceil_div(num_slots + 1, kThreads), kThreads}, ragged_documents_kernel,
         documents.lengths.as<int32_t>(), documents.offsets_qkv.as<int64_t>(), documents.offsets_q.as<int64_t>(),
         documents.offsets_kv.as<int64_t>(), documents.offsets_lse.as<int64_t>(), cu_seqlens.as<int64_t>(),
         num_documents, num_slots, sizes);
}

void join_qkv_cuda(Device& device, Tensor dqkv, ConstTensor dq, ConstTensor dk, ConstTensor dv) {
  const int64_t T = dqkv.shape[0], HD = dqkv.shape[2];
  check_tensor(dk, "join_qkv: dk", {T, dk.shape[1], HD}, DType::BF16);
  check_tensor(dv, "join_qkv: dv", dk.shape, DType::BF16);
  check_tensor(dq, "join_qkv: dq", {T, dqkv.shape[1] - 2 * dk.shape[1], HD}, DType::BF16);
  CHECK(dqkv.shape[1] * HD <= int64_t{1} << 30, "join_qkv: rows of {} elements", dqkv.shape[1] * HD);
  if (is_packable<bf16>(HD, {dqkv.data, dq.data, dk.data, dv.data})) {
    return join_qkv<kPackWidth<bf16>>(device, dqkv, dq, dk, dv);
  }
  join_qkv<1>(device, dqkv, dq, dk, dv);
}
