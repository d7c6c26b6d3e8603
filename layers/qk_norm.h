// RMSNorm of q and k inside the fused projection, then RoPE of both in the same pass; v is copied.
//   per head (Qwen3, Gemma3): each head of width HD is normalised, w (HD) is shared by all heads
//   full (OLMo2):             all of q, and all of k, are normalised together, w (NH * HD) and (NKV * HD)
// CUDA: qk_norm.cu.
#pragma once

#include "layers/rmsnorm.h"
#include "layers/rope.h"

struct QkNormShape {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool per_head = true;
  /// Norms per token: NH + NKV, or 2. Those of q come first.
  constexpr int64_t num_norms() const { return per_head ? num_heads + num_kv_heads : 2; }
  constexpr int64_t q_norms() const { return per_head ? num_heads : 1; }
  /// Elements of a norm of q, and of k.
  constexpr int64_t q_width() const { return per_head ? head_dim : num_heads * head_dim; }
  constexpr int64_t k_width() const { return per_head ? head_dim : num_kv_heads * head_dim; }
  /// Elements of a token: q, k, then v.
  constexpr int64_t v_begin() const { return (num_heads + num_kv_heads) * head_dim; }
  constexpr int64_t v_width() const { return num_kv_heads * head_dim; }
  constexpr int64_t token_width() const { return v_begin() + v_width(); }

  struct Norm {
    int64_t begin, width;  ///< elements of the token
    bool is_k;
  };
  constexpr Norm norm(int64_t i) const {
    if (i < q_norms()) return {i * q_width(), q_width(), false};
    return {q_norms() * q_width() + (i - q_norms()) * k_width(), k_width(), true};
  }
};

/// y (T, NH + 2 NKV, HD), rstd (T, num_norms) F32 (F64 for F64) <- qkv of the same shape as y, weights. A normalised
/// head is rounded to its dtype, then rotated. y is not qkv's own memory. LayerNorm is refused, here and below.
void qk_norm_forward(Device& device, Tensor y, Tensor rstd, ConstTensor qkv, ConstTensor q_weight, ConstTensor k_weight,
                     const QkNormShape& shape, double eps, NormKind kind, const Rotation& rotation = {});

/// dqkv = gradient of qkv; dq_weight, dk_weight +=, accumulated in rstd's dtype. dqkv may be qkv's own memory, but not
/// dy's. The gradient of a head is rotated back in rstd's dtype.
void qk_norm_backward(Device& device, Tensor dqkv, Tensor dq_weight, Tensor dk_weight, ConstTensor dy, ConstTensor qkv,
                      ConstTensor rstd, ConstTensor q_weight, ConstTensor k_weight, const QkNormShape& shape,
                      NormKind kind, const Rotation& rotation = {});

// CUDA kernels (qk_norm.cu); called by the front doors above after the contract is checked.
void qk_norm_forward_cuda(Device& device, Tensor y, Tensor rstd, ConstTensor qkv, ConstTensor q_weight,
                          ConstTensor k_weight, const QkNormShape& shape, double eps, NormKind kind,
                          const Rotation& rotation);
void qk_norm_backward_cuda(Device& device, Tensor dqkv, Tensor dq_weight, Tensor dk_weight, ConstTensor dy,
                           ConstTensor qkv, ConstTensor rstd, ConstTensor q_weight, ConstTensor k_weight,
                           const QkNormShape& shape, NormKind kind, const Rotation& rotation);
