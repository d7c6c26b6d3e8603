// Dense matrix products of the CUDA device, by cuBLASLt; the CPU's are in gemm.h.
//
// BF16 x BF16 -> BF16 or F32, and F32 x F32 -> F32 (never TF32). Sums are fp32, an element of the result is rounded
// once. The algorithm is the heuristic's first, asked for once per problem (shapes, dtypes, alignment) and kept by the
// device. Algorithms that split the sum keep the parts in fp32 in the workspace and add them in a fixed order; those
// that add into the result are excluded. So a problem gives the same bits on every run on one kind of GPU.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// A row-major matrix, taken as it lies in memory or transposed.
struct BlasOperand {
  ConstTensor matrix;
  bool transposed = false;
};

/// d (M, N) <- a (M, K) b (K, N), or d += with `accumulate`. d must not overlap a or b. No rows or columns are no work.
void blas_gemm(Device& device, Tensor d, BlasOperand a, BlasOperand b, bool accumulate = false);

/// d (M, N) <- a (M, K) b (K, N) + bias (N) in every row, K > 0; bias has the dtype of d. False, and nothing is done,
/// where cuBLASLt has no algorithm that adds a bias.
bool blas_gemm_bias(Device& device, Tensor d, BlasOperand a, BlasOperand b, ConstTensor bias);
