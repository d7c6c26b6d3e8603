// RMSNorm of q and k inside the fused projection, before RoPE; v is copied.
//   per head (Qwen3, Gemma3): each head of width HD is normalised, w (HD) is shared by all heads
//   full (OLMo2):             all of q, and all of k, are normalised together, w (NH * HD) and (NKV * HD)
#pragma once

#include "layers/rmsnorm.h"

struct QkNormShape {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool per_head = true;
  /// Norms per token: NH + NKV, or 2.
  int64_t num_norms() const { return per_head ? num_heads + num_kv_heads : 2; }
};

/// y (T, NH + 2 NKV, HD), rstd (T, num_norms) <- qkv of the same shape as y, weights.
void qk_norm_forward(Device& device, Tensor y, Tensor rstd, ConstTensor qkv, ConstTensor q_weight, ConstTensor k_weight,
                     const QkNormShape& shape, double eps, NormKind kind);

/// dqkv = gradient of qkv; dq_weight, dk_weight +=. dqkv may be dy's own memory.
void qk_norm_backward(Device& device, Tensor dqkv, Tensor dq_weight, Tensor dk_weight, ConstTensor dy, ConstTensor qkv,
                      ConstTensor rstd, ConstTensor q_weight, ConstTensor k_weight, const QkNormShape& shape,
                      NormKind kind);
