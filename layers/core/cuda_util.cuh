// What kernels share: error check, launch, element conversion, packed access, reductions of a warp or a block.
// Plain CUDA C++ without <<<>>>, so that test/simt can compile it as C++; the rest is in cuda_primitives.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <source_location>
#include <type_traits>

#include "layers/core/cuda_primitives.cuh"
#include "layers/core/device.h"
#include "layers/core/dtype.h"
#include "layers/core/integer.h"

// ---- host

/// Throws Error with the runtime's message and the calling line unless `error` is cudaSuccess. A fault inside a kernel
/// surfaces at whichever call comes next: CUDA_LAUNCH_BLOCKING=1 moves it to the launch.
inline void cuda_check(cudaError_t error, std::source_location where = std::source_location::current()) {
  CHECK(error == cudaSuccess, "CUDA: {} ({}) at {}:{}; run with CUDA_LAUNCH_BLOCKING=1 to see which kernel failed",
        cudaGetErrorString(error), cudaGetErrorName(error), where.file_name(), where.line());
}

struct LaunchShape {
  int64_t num_blocks = 0;
  dim3 block;
  size_t shared_bytes = 0;  ///< dynamic shared memory
};

/// Queues `kernel` on the device's compute stream. Zero blocks are no work, not an error.
template <class... Parameters, class... Arguments>
void launch(Device& device, const LaunchShape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  constexpr size_t kStaticLimit = 48 * 1024;  // more is an opt-in
  if (shape.num_blocks == 0) return;
  CHECK(shape.num_blocks > 0 && shape.num_blocks <= std::numeric_limits<int>::max(),
        "a kernel of {} blocks: CUDA allows {}", shape.num_blocks, std::numeric_limits<int>::max());
  if (shape.shared_bytes > kStaticLimit) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.num_blocks));
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(device.stream());
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

/// Threads of a block whose threads take n items in turn: whole warps, no more of them than there is work for.
inline unsigned block_threads(int64_t n, int64_t max_threads) {
  constexpr int64_t kWarp = 32;
  return static_cast<unsigned>(std::clamp(round_up(n, kWarp), kWarp, max_threads));
}

/// Calls `op(T{})` with the C++ type of activations and weights that CUDA kernels support.
template <class Op>
void dispatch_cuda(DType dtype, const char* who, Op&& op) {
  switch (dtype) {
    case DType::F32:
      return op(float{});
    case DType::BF16:
      return op(bf16{});
    default:
      fail("{}: dtype {} is not supported on the CUDA device, use F32 or BF16", who, name_of(dtype));
  }
}

// ---- threads

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

/// Of a thread of a one-dimensional block.
__device__ __forceinline__ int lane_index() {
  return threadIdx.x % kWarpSize;
}
__device__ __forceinline__ int warp_index() {
  return threadIdx.x / kWarpSize;
}

// ---- elements

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(bf16 value) {
  return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
}

/// Rounds to nearest even, as bf16(float) does on the host.
template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (dtype_of<T> == DType::BF16) {
    T result;
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    return result;
  } else {
    return value;
  }
}

__device__ __forceinline__ float sigmoid(float z) {
  return 1.0f / (1.0f + expf(-z));
}

// ---- packed access

/// Elements of T in one 128-bit access.
template <class T>
constexpr int kPackWidth = 16 / static_cast<int>(sizeof(T));

/// Whether all rows of C elements that start at `pointers` can be read and written 128 bits at a time.
template <class T>
bool is_packable(int64_t C, std::initializer_list<const void*> pointers) {
  bool packable = C % kPackWidth<T> == 0;
  for (const void* p : pointers) packable = packable && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  return packable;
}

/// N neighbours, moved by one instruction: N is kPackWidth<T>, half of it, or 1.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(N == 1 || N == kPackWidth<T> || N == kPackWidth<T> / 2);
  T element[N];
};

/// 128 or 64 bits: what moves a pack of more than one element.
template <class T, int N>
using PackWord = std::conditional_t<N == kPackWidth<T>, int4, int2>;

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* p) {
  if constexpr (N == 1) {
    return {{*p}};
  } else {
    return std::bit_cast<Pack<T, N>>(*reinterpret_cast<const PackWord<T, N>*>(p));
  }
}

template <int N, class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, N>& pack) {
  if constexpr (N == 1) {
    *p = pack.element[0];
  } else if constexpr (N == kPackWidth<T>) {
    store_128(p, std::bit_cast<int4>(pack));
  } else {
    *reinterpret_cast<PackWord<T, N>*>(p) = std::bit_cast<PackWord<T, N>>(pack);
  }
}

/// N neighbours as floats, by as few accesses as there can be.
template <int N, class T>
__device__ __forceinline__ void load_floats(float (&to)[N], const T* from) {
  constexpr int kWidth = std::min(N, kPackWidth<T>);
  for (int i = 0; i < N; i += kWidth) {
    const Pack<T, kWidth> pack = load_pack<kWidth>(from + i);
    for (int k = 0; k < kWidth; k++) to[i + k] = to_float(pack.element[k]);
  }
}

/// Rounds once.
template <int N, class T>
__device__ __forceinline__ void store_floats(T* to, const float (&from)[N]) {
  constexpr int kWidth = std::min(N, kPackWidth<T>);
  for (int i = 0; i < N; i += kWidth) {
    Pack<T, kWidth> pack;
    for (int k = 0; k < kWidth; k++) pack.element[k] = from_float<T>(from[i + k]);
    store_pack<kWidth>(to + i, pack);
  }
}

// ---- reductions, in a fixed order: every thread gets the same bits in every run

/// Sum over the 32 lanes of a warp; all of them call it.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

/// Maximum over the 32 lanes of a warp; all of them call it. NaN is passed over.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}

/// Sum over the kThreads threads of a one-dimensional block; all of them call it.
template <int kThreads, class T>
__device__ __forceinline__ T block_sum(T value) {
  constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kThreads % kWarpSize == 0 && kWarps <= kWarpSize);
  __shared__ T of_warp[kWarps];
  const int lane = threadIdx.x % kWarpSize;
  value = warp_sum(value);
  if (lane == 0) of_warp[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = warp_sum(lane < kWarps ? of_warp[lane] : T(0));
  __syncthreads();  // of_warp is free for the next call
  return value;
}

/// Maximum over the kThreads threads of a one-dimensional block; all of them call it. NaN is passed over.
template <int kThreads>
__device__ __forceinline__ float block_max(float value) {
  constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kThreads % kWarpSize == 0 && kWarps <= kWarpSize);
  __shared__ float of_warp[kWarps];
  const int lane = threadIdx.x % kWarpSize;
  value = warp_max(value);
  if (lane == 0) of_warp[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  value = warp_max(of_warp[lane % kWarps]);
  __syncthreads();  // of_warp is free for the next call
  return value;
}
