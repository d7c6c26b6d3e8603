// Elementwise sums and reductions, in a fixed order: the same bits for any number of threads.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// y = a + b. y may be a or b.
void residual_add(Device& device, Tensor y, ConstTensor a, ConstTensor b);

/// sum (n) += the `num_parts` parts of parts (num_parts * n), added up in their order.
void add_parts(Device& device, Tensor sum, ConstTensor parts, int num_parts);

void fill_zero(Device& device, Tensor x);

/// Sum of squares, in fp64.
double sum_of_squares(Device& device, ConstTensor x);
