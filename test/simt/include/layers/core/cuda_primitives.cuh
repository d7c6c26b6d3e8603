// The twin of layers/core/cuda_primitives.cuh for the SIMT runtime; the include path puts it first.
#pragma once

#include <cuda_runtime.h>

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  return static_cast<T*>(simt_dynamic_shared());
}

__device__ __forceinline__ void store_128(void* to, int4 word) {
  *static_cast<int4*>(to) = word;
}

// Copies land at their wait; see test/simt/async_copy.cpp.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
  simt_copy_async(shared, global, 16);
}
__device__ __forceinline__ void cp_async_commit() {
  simt_copy_async_commit();
}
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  simt_copy_async_wait(kPending);
}

// Warp collectives; see test/simt/tensor_core.cpp.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&matrix)[4], const void* row,
                                            const SimtSite& site = SimtSite::current()) {
  simt_load_matrices(matrix, row, false, site);
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&matrix)[4], const void* row,
                                                  const SimtSite& site = SimtSite::current()) {
  simt_load_matrices(matrix, row, true, site);
}
__device__ __forceinline__ void mma_bf16_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                                 const SimtSite& site = SimtSite::current()) {
  simt_mma_bf16(d, a, b0, b1, site);
}
