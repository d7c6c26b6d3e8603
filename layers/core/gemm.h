// Dense matrix products of the CPU device: C = A B + D, row-major, fp32 and fp64 (for gradient checks).
//
// Own code and not a BLAS because bits must not depend on the number of threads or on the rows beside a row: each
// element of C is summed by one thread over k in blocks of fixed size, in order. OpenBLAS keeps neither promise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layers/core/dtype.h"

/// A matrix as it lies in memory: element (i, j) is data[i * ld + j], or data[j * ld + i] when transposed.
template <class T>
struct MatrixView {
  const T* data;
  int64_t ld;
  bool transposed = false;
};

/// C (M, N) with row stride N <- A (M, K) B (K, N) + D. D is none (null), a matrix (M, N) with row stride N, such as C
/// itself, or with `addend_ld` 0 one row (N) for all rows. C must not overlap A or B.
/// Threads: as many as OpenMP gives; inside a parallel region, where every thread may call it, only the caller's own.
template <class T>
void gemm(T* c, int64_t M, int64_t N, int64_t K, MatrixView<T> a, MatrixView<T> b, const T* addend = nullptr,
          int64_t addend_ld = 0);

/// Bytes of packing buffers that the process keeps after its first product, at most. `in_parallel_regions`: also after
/// products of every thread alone.
size_t gemm_buffer_bytes(DType dtype, bool in_parallel_regions = false);
