// Elementwise sums, conversions and reductions, in a fixed order: the same bits for any number of threads.
// CUDA: reduce.cu, for tensors of F32 and BF16, and add_parts of F64.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// y = a + b. y may be a or b.
void residual_add(Device& device, Tensor y, ConstTensor a, ConstTensor b);

/// sum (n) += the `num_parts` parts of parts (num_parts * n), added up in their order. F32 and BF16 in any combination,
/// added in fp32 and rounded once; or both F64.
void add_parts(Device& device, Tensor sum, ConstTensor parts, int num_parts);

void fill_zero(Device& device, Tensor x);

/// sum (1) F64 += sum of x^2, in fp64; x is F32, BF16 or F64. `sum` is in the device's memory, so that many tensors
/// need one copy to the host.
void add_sum_of_squares(Device& device, Tensor sum, ConstTensor x);

/// to = from, of the same shape and any two of F32, BF16, F64; they do not overlap. Rounds to nearest even (F64 to BF16
/// by way of F32). A NaN stays one, an equal dtype keeps every bit.
void convert(Device& device, Tensor to, ConstTensor from);

// CUDA kernels (reduce.cu); called by the front doors above after the contract is checked.
void residual_add_cuda(Device& device, Tensor y, ConstTensor a, ConstTensor b);
void add_parts_cuda(Device& device, Tensor sum, ConstTensor parts, int num_parts);
void add_sum_of_squares_cuda(Device& device, Tensor sum, ConstTensor x);
void convert_cuda(Device& device, Tensor to, ConstTensor from);
