// Packed documents in cuDNN's words, and the way back of its gradients. CUDA only; called by attention_cudnn.cu, apart
// from it so that test/simt can run these kernels, which need no cuDNN.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// The documents of a batch as cuDNN's ragged tensors describe them, in the device's memory: `slots` documents, of
/// which those that the batch does not fill have length 0 and begin where the last document ends.
struct RaggedDocuments {
  Tensor lengths;      ///< (slots) I32, in tokens
  Tensor offsets_qkv;  ///< (slots + 1) I64, in elements: where a document begins in q, k and v, slices of (T, NH + 2
                       ///< NKV, HD)
  Tensor offsets_q;    ///< (slots + 1) I64: in (T, NH, HD): o, do, dq
  Tensor offsets_kv;   ///< (slots + 1) I64: in (T, NKV, HD): dk, dv
  Tensor offsets_lse;  ///< (slots + 1) I64: in (T, NH)
};

/// documents <- cu_seqlens (N + 1) I64 in the device's memory, N <= slots.
void ragged_documents_cuda(Device& device, const RaggedDocuments& documents, ConstTensor cu_seqlens, int64_t num_heads,
                           int64_t num_kv_heads, int64_t head_dim);

/// dqkv (T, NH + 2 NKV, HD) <- dq (T, NH, HD), dk (T, NKV, HD), dv (T, NKV, HD), all BF16.
void join_qkv_cuda(Device& device, Tensor dqkv, ConstTensor dq, ConstTensor dk, ConstTensor dv);
