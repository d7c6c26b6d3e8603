// The projections of latent attention (DeepSeek-V3) in a block, forward and backward, in the place of one fused qkv:
//
//   q = rms(x W_q_a^T + b) W_q_b^T                  or x W_q^T without a latent of q
//   latent, k_rope = x W_kv_a^T + b;   k, v = rms(latent) W_kv_b^T
//   qkv as attention wants it: layers/mla.h; what rotates does so afterwards
//
// Letters: LQ, LK widths of the latents, dr of what rotates, dv of v.
#pragma once

#include "llama/block.h"

MlaActivations place_mla_activations(Arena& arena, const ModelConfig& config, DType dtype, int64_t T);
MlaScratch place_mla_scratch(Arena& arena, const ModelConfig& config, DType dtype, int64_t T);

/// qkv (T, 3 NH, HD) <- x (T, C).
void mla_forward(Device& device, const ModelConfig& config, Tensor qkv, ConstTensor x, const BlockParams& params,
                 const MlaActivations& saved, const MlaScratch& scratch);

/// dx (T, C) <- dqkv (T, 3 NH, HD). Parameter gradients +=.
void mla_backward(Device& device, const ModelConfig& config, Tensor dx, ConstTensor dqkv, ConstTensor x,
                  const BlockParams& params, const BlockParams& grads, const MlaActivations& saved,
                  const MlaScratch& scratch);

MlaShape mla_shape(const ModelConfig& config);
