// Linear layers of experts: rows [offsets[e], offsets[e + 1]) of x are multiplied by the weight of expert e. A group
// may be empty: its weight then has no gradient.
//   y_r = x_r W_e^T + b_e,   W_e (N, K);   or, with WeightLayout::InOut as gpt-oss stores them, x_r W_e, W_e (K, N)
// offsets (E + 1) I32 lie in the device's memory, and the host never waits for them. CUDA: grouped_linear.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

enum class WeightLayout { OutIn, InOut };

/// y (R, N) <- x (R, K), w (E, N, K) or (E, K, N), b (E, N) or null.
void grouped_linear_forward(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, ConstTensor offsets,
                            WeightLayout layout);

/// dx (R, K) = gradient of x; dw += and db += (skipped when null), shaped as w and b, in accumulator_dtype(x.dtype).
void grouped_linear_backward(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x,
                             ConstTensor w, ConstTensor offsets, WeightLayout layout);

// CUDA kernels (grouped_linear.cu); called by the front doors above after the contract is checked.
void grouped_linear_forward_cuda(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b,
                                 ConstTensor offsets, WeightLayout layout);
void grouped_linear_backward_cuda(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x,
                                  ConstTensor w, ConstTensor offsets, WeightLayout layout);
