// The mixture of experts of a block, in the place of its MLP, forward and backward:
//
//   logits = x W_router^T + b;   R = T k rows, sorted by expert, see layers/moe.h
//   y_r = W_down,e (w_r act(W_gate_up,e x_r))             of each row; w_r: its weight
//   out_t = sum over the k of (y_r + w_r b_down,e) + sigmoid(x w_s) shared(x)
//
// The weight of a row multiplies the activation: what comes back from the experts is only added up, and the backward
// needs none of it. Letters: E experts, k of them for a token, F width of an expert, S of the shared one.
#pragma once

#include "llama/block.h"

MoeActivations place_moe_activations(Arena& arena, const ModelConfig& config, DType dtype, int64_t T);
MoeScratch place_moe_scratch(Arena& arena, const ModelConfig& config, DType dtype, int64_t T);

/// out (T, C) <- x (T, C). `out` null: only what the backward needs is computed.
void moe_forward(Device& device, const ModelConfig& config, int layer, Tensor out, ConstTensor x,
                 const BlockParams& params, const BlockInputs& inputs, const MoeActivations& saved,
                 const MoeScratch& scratch);

/// dx (T, C) = gradient of x <- d_out (T, C); they do not overlap. Parameter gradients +=. The gate_up tensors of
/// `saved` are overwritten.
void moe_backward(Device& device, const ModelConfig& config, Tensor dx, ConstTensor d_out, ConstTensor x,
                  const BlockParams& params, const BlockParams& grads, const BlockInputs& inputs,
                  const MoeActivations& saved, const MoeScratch& scratch);
