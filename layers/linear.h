// y = x W^T + b, W (N, K) as on disk. CUDA: linear.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// y (T, N) <- x (T, K), w (N, K), b (N) or null. `accumulate`: y += instead of y =, then b must be null.
/// y may have accumulator_dtype(x.dtype) where the caller wants the sums as they are: F32 of BF16 products.
void linear_forward(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, bool accumulate = false);

/// dx (T, K) = dy W (skipped when dx is null); dw (N, K) += dy^T x; db (N) += column sums of dy (skipped when null).
/// dw and db have accumulator_dtype(x.dtype).
void linear_backward(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x, ConstTensor w);

// CUDA (linear.cu): cuBLASLt and kernels; called by the front doors above after the contract is checked.
void linear_forward_cuda(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, bool accumulate);
void linear_backward_cuda(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x,
                          ConstTensor w);
