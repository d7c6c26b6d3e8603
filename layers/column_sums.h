// Sums over the rows of a matrix on CUDA, of all rows or of groups of them: the gradients of biases. The CPU's loops
// are those of linear.cpp, grouped_linear.cpp and moe.cpp. Kernels: column_sums.cu.
#pragma once

#include <cstdint>

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// Which rows are summed. Null pointers: one group of all rows of x, each counted once.
struct RowGroups {
  const int32_t* offsets = nullptr;    ///< (groups + 1): group e has the rows [offsets[e], offsets[e + 1])
  const int32_t* slots = nullptr;      ///< (rows), with row_weights: row r is row slots[r] / slots_per_row of x
  const float* row_weights = nullptr;  ///< (rows): what a row is multiplied by
  int slots_per_row = 1;
};

/// sums (groups, N) F32 += sums of the columns of x (T, N) F32 or BF16 over the rows of each group, `rows` in all.
void add_column_sums_cuda(Device& device, Tensor sums, ConstTensor x, int64_t rows, const RowGroups& groups = {});
