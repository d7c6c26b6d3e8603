// What CUDA C++ can only say in its own syntax: a C++ compiler cannot parse it, so test/simt has a twin of this file
// that says the same to its runtime. Keep it short: everything here is tested through its twin, not as it is.
#pragma once

#include <cuda_runtime.h>

/// The block's dynamic shared memory, LaunchShape::shared_bytes long, aligned for every access.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];
  return reinterpret_cast<T*>(dynamic_shared_bytes);
}

/// One store of 128 bits, aligned: nvcc cuts some of those that C++ says into four.
__device__ __forceinline__ void store_128(void* to, int4 word) {
  asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// ---- copies from global to shared memory that run beside the thread (sm_80)

/// Starts to copy 16 bytes, both addresses aligned to 16. The destination is undefined until this thread's wait, and
/// until a barrier after it for the other threads.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
}

/// Closes a group: the copies that this thread started since the last one.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}

/// Waits for this thread's groups but the newest kPending.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// ---- tensor cores (sm_80): all lanes of a warp call these. Fragments as in the PTX manual; an 8 x 8 matrix of 16-bit
// elements is one register a lane: lane l holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, the first one low.

/// Four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8, 16 bytes in shared memory, aligned.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&matrix)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

/// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&matrix)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

/// d (16 x 8, fp32) += a (16 x 16, bf16) b (16 x 8, bf16).
///   a: 8 x 8 blocks (rows, columns) = (0-7, 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15)
///   b0, b1: rows 0-7, rows 8-15, transposed: lane l holds rows 2 (l % 4) and 2 (l % 4) + 1 of column l / 4
///   d: lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, then those of row l / 4 + 8
__device__ __forceinline__ void mma_bf16_16x8x16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
