// CUDA C++ as C++: the keywords, and the launch. Stands in for NVIDIA's header of this name when a .cu file is
// compiled for the SIMT runtime, so that no CUDA installation is needed.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <tuple>
#include <utility>

#include "test/simt/device_side.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

// Blocks run one after another, so that shared memory can be static. As thread-local data all of it lies in one
// segment, which the runtime fills with NaN before each block and the check build watches. Under ASan, plain static
// arrays get red zones, thread-local ones do not.
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static __thread
#endif

#include <device_functions.h>

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using Call = std::tuple<void (*)(Parameters...), Parameters...>;
  const auto* parameters = new Call(kernel, std::forward<Arguments>(arguments)...);
  SimtLaunch launch;
  launch.grid = config->gridDim;
  launch.block = config->blockDim;
  launch.shared_bytes = config->dynamicSmemBytes;
  launch.kernel = reinterpret_cast<const void*>(kernel);
  launch.parameters = parameters;
  launch.parameters_size = sizeof *parameters;
  launch.call = [](const void* p) {
    std::apply([](auto function, const Parameters&... values) { function(values...); }, *static_cast<const Call*>(p));
  };
  simt_queue(config->stream, launch, [](const void* p) { delete static_cast<const Call*>(p); });
  return cudaSuccess;
}

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
