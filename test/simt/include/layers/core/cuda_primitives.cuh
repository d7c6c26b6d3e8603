// The twin of layers/core/cuda_primitives.cuh for the SIMT runtime; the include path puts it first.
#pragma once

#include <cuda_runtime.h>

template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  return static_cast<T*>(simt_dynamic_shared());
}
