// Causal grouped-query attention over packed documents, in blocks with an online softmax (FlashAttention, Dao 2023):
// no (T, T) memory; blocks that the mask hides whole are never computed, so that time is linear in the documents'
// sizes.
//
//   s_ij = scale * q_i . k_j;   softcap > 0: s = cap * tanh(s / cap)
//   i sees j: same document, j <= i, and i - j < window when window > 0
//   o_i = sum_j softmax(s_i)_j v_j;   lse_i = log sum_j exp(s_ij)
//   with a sink: the sum of softmax and lse has one more term, exp(sink_h), which has no value (gpt-oss)
// Query head h reads kv head h / (NH / NKV).
// CUDA: attention_cudnn.cu where cuDNN plans the shape, else attention.cu. With the kernels of the latter the bits of a
// document depend on where it lies in the batch, and on nothing beside it.
#pragma once

#include <span>
#include <vector>

#include "layers/core/device.h"
#include "layers/core/tensor.h"

struct AttentionShape {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  double scale = 0;
  double softcap = 0;        ///< 0 = none
  int64_t window = 0;        ///< 0 = all
  bool has_sinks = false;    ///< one for each query head
  bool own_kernels = false;  ///< CUDA: not cuDNN, whatever it plans
};

/// How T tokens are cut into N documents.
struct Documents {
  std::span<const int64_t> cu_seqlens;  ///< host, N + 1 entries, 0 .. T, increasing
  ConstTensor bounds;                   ///< (T, 2) I32, document_bounds() in the device's memory; null on the CPU
  ConstTensor cu_seqlens_device = {};   ///< (N + 1) I64, cu_seqlens in the device's memory; null: cuDNN is not asked
};

/// (T, 2): for each token the first token of its document, and the token after its last.
std::vector<int32_t> document_bounds(std::span<const int64_t> cu_seqlens);

/// cu_seqlens of documents that are cut every `chunk` tokens from their start: attention within chunks.
std::vector<int64_t> cut_documents(std::span<const int64_t> cu_seqlens, int64_t chunk);

/// Bytes of scratch that a call needs for T tokens, however they are cut into documents, passed by the caller so that
/// nothing is allocated in the loop. On the CPU one buffer for all threads (as many as OpenMP gives now).
size_t attention_workspace_bytes(const AttentionShape& shape, DType dtype, int64_t T, DeviceKind kind);

/// o (T, NH, HD), lse (NH, T) F32 (F64 for F64) <- qkv (T, NH + 2 NKV, HD): q heads, k heads, v heads. What lse holds
/// is for the backward of the same device, documents and shape alone: cuDNN keeps it as (T, NH). sinks (NH), or null.
void attention_forward(Device& device, Tensor o, Tensor lse, ConstTensor qkv, const Documents& documents,
                       const AttentionShape& shape, Tensor workspace, ConstTensor sinks = {});

/// dqkv (T, NH + 2 NKV, HD) = gradient of qkv <- do (T, NH, HD) and what the forward had. d_sinks (NH) +=, in lse's
/// dtype.
void attention_backward(Device& device, Tensor dqkv, ConstTensor d_o, ConstTensor qkv, ConstTensor o, ConstTensor lse,
                        const Documents& documents, const AttentionShape& shape, Tensor workspace,
                        ConstTensor sinks = {}, Tensor d_sinks = {});

// CUDA kernels (attention.cu); called by the front doors above after the contract is checked.
size_t attention_workspace_bytes_cuda(const AttentionShape& shape, int64_t T);
void attention_forward_cuda(Device& device, Tensor o, Tensor lse, ConstTensor qkv, ConstTensor bounds,
                            const AttentionShape& shape, ConstTensor sinks);
void attention_backward_cuda(Device& device, Tensor dqkv, ConstTensor d_o, ConstTensor qkv, ConstTensor o,
                             ConstTensor lse, ConstTensor bounds, const AttentionShape& shape, Tensor workspace,
                             ConstTensor sinks, Tensor d_sinks);
