// Attention by cuDNN, for what it plans: BF16, on GPUs of compute capability 9.x and 10.x. Called by the front doors of
// attention.h before our own kernels; the contract is theirs. Where cudnn.h was not there at build time,
// attention_cudnn_stub.cpp stands in and nothing is planned.
//
// o, lse and dqkv are as attention.h says, but that lse is (T, NH): only the backward here reads it.
// Which plan serves a batch depends on its size, so the bits of a document do too. On 9.x the backward adds the parts
// of dq in the order in which blocks finish: the last bits of dq differ from run to run. On 10.x they do not.
#pragma once

#include <functional>
#include <string>

#include "layers/attention.h"

/// Whether cuDNN does this attention, forward and backward, on a GPU of compute capability `sm` (90: 9.0).
bool attention_cudnn_plans(const AttentionShape& shape, DType dtype, int sm);

/// Bytes of workspace for T tokens, however they are cut into documents. 0 when this process's GPU does not plan the
/// shape; without a GPU, what an H100 needs.
size_t attention_cudnn_workspace_bytes(const AttentionShape& shape, DType dtype, int64_t T);

/// Each returns whether it has queued the work; false for the same batches in both directions. The first call of a
/// shape builds its plans, which takes seconds; from then on nothing is allocated. No call waits for the device.
bool attention_cudnn_forward(Device& device, Tensor o, Tensor lse, ConstTensor qkv, const Documents& documents,
                             const AttentionShape& shape, Tensor workspace);
bool attention_cudnn_backward(Device& device, Tensor dqkv, ConstTensor d_o, ConstTensor qkv, ConstTensor o,
                              ConstTensor lse, const Documents& documents, const AttentionShape& shape,
                              Tensor workspace);

/// Where a line goes for each shape that is planned, or that cuDNN turns down. Nowhere, if this is not called.
void attention_cudnn_log(std::function<void(const std::string&)> log);

/// A batch, rounded up so that few plans serve all batches.
struct AttentionCudnnBatch {
  int64_t slots = 0;        ///< documents; a power of two
  int64_t slot_length = 0;  ///< tokens of the longest; a power of two
  int64_t num_tokens = 0;   ///< of all
};
AttentionCudnnBatch attention_cudnn_batch(std::span<const int64_t> cu_seqlens);

/// For tests on machines without a GPU: asks cuDNN itself whether it has an engine, within the workspace that
/// attention_cudnn_workspace_bytes counts. `device_properties`: the GPU in cuDNN's JSON. Returns "", or the reason.
std::string attention_cudnn_support(const AttentionShape& shape, const AttentionCudnnBatch& batch, bool is_backward,
                                    int sm, const std::string& device_properties);
