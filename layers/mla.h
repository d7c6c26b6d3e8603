// Multi-head latent attention (DeepSeek-V2, 2024): the layouts between its projections and the attention kernel, which
// wants heads of one width. Training is plain multi-head attention: NH heads of q, k and v.
//
//   dn: width without position; dr: width that rotates, one key of it for all heads; dv: width of v; HD = dn + dr >= dv
//   as projected:   q (T, NH, dn | dr)    kv (T, NH, dn of k | dv of v)    k_rope (T, dr)
//   for attention:  qkv (T, 3 NH, HD): q and k (dr | dn), so that what rotates comes first; v (dv | zeros)
//
// The order within a head is the same in q and k and changes no score; zeros in v give zeros in o.
// CUDA: mla.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

struct MlaShape {
  int64_t num_heads = 0, nope = 0, rope = 0, v = 0;  // NH, dn, dr, dv
  constexpr int64_t head_dim() const { return nope + rope; }
};

/// qkv <- q, kv, k_rope.
void mla_assemble(Device& device, Tensor qkv, ConstTensor q, ConstTensor kv, ConstTensor k_rope, const MlaShape& shape);
/// Its gradient: dk_rope is the sum over the heads, in order.
void mla_assemble_backward(Device& device, Tensor dq, Tensor dkv, Tensor dk_rope, ConstTensor dqkv,
                           const MlaShape& shape);

/// narrow (T, NH, dv) <- wide (T, NH, HD): what is not padding.
void mla_narrow(Device& device, Tensor narrow, ConstTensor wide, const MlaShape& shape);
/// wide (T, NH, HD) <- narrow (T, NH, dv), and zeros.
void mla_widen(Device& device, Tensor wide, ConstTensor narrow, const MlaShape& shape);

// CUDA kernels (mla.cu); called by the front doors above after the contract is checked.
void mla_assemble_cuda(Device& device, Tensor qkv, ConstTensor q, ConstTensor kv, ConstTensor k_rope,
                       const MlaShape& shape);
void mla_assemble_backward_cuda(Device& device, Tensor dq, Tensor dkv, Tensor dk_rope, ConstTensor dqkv,
                                const MlaShape& shape);
void mla_narrow_cuda(Device& device, Tensor narrow, ConstTensor wide, const MlaShape& shape);
void mla_widen_cuda(Device& device, Tensor wide, ConstTensor narrow, const MlaShape& shape);
