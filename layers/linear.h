// y = x W^T + b, W (N, K) as on disk.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// y (T, N) <- x (T, K), w (N, K), b (N) or null. `accumulate`: y += instead of y =, then b must be null.
void linear_forward(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, bool accumulate = false);

/// dx (T, K) = dy W (skipped when dx is null); dw (N, K) += dy^T x; db (N) += column sums of dy (skipped when null).
void linear_backward(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x, ConstTensor w);
