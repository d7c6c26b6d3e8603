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
