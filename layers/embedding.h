// Token embedding: y[t] = scale * w[token[t]]. CUDA: embedding.cu.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// The positions t of tokens (T), sorted by token; those of equal tokens in the order of t. Runs on the host; an Error
/// names a token outside [0, V), which kernels do not look for.
std::vector<int32_t> embedding_order(std::span<const int32_t> tokens, int64_t V);

/// y (T, C) <- tokens (T) I32 in [0, V), w (V, C).
void embedding_forward(Device& device, Tensor y, ConstTensor tokens, ConstTensor w, double scale);

/// dw (V, C), of the accumulator's dtype, += scale * the rows of dy (T, C) that looked each token up, in the order of t
/// (deterministic). `order` (T) I32: embedding_order of the tokens; null will do on the CPU, which does not look at it.
/// The row of `pad_token_id` gets no gradient (nn.Embedding's padding_idx); -1 = none.
void embedding_backward(Device& device, Tensor dw, ConstTensor dy, ConstTensor tokens, ConstTensor order, double scale,
                        int64_t pad_token_id);

// CUDA kernels (embedding.cu); called by the front doors above after the contract is checked.
void embedding_forward_cuda(Device& device, Tensor y, ConstTensor tokens, ConstTensor w, double scale);
void embedding_backward_cuda(Device& device, Tensor dw, ConstTensor dy, ConstTensor tokens, ConstTensor order,
                             double scale, int64_t pad_token_id);
