// Elementwise sums, conversions and reductions on CUDA. Contract: reduce.h; the CPU loops that specify them:
// reduce.cpp.
//
// Work: a thread owns one pack (128 bits of the wider operand, 64 of a narrower one; one element where the length or a
//   pointer does not allow more) and nobody else touches it; so y may be a or b, and additions have the order of the
//   CPU. Every instruction of a warp moves whole sectors.
//
// Bytes from DRAM, each the minimum, of n elements of T:
//     residual_add: reads a, b, writes y                        3 n sizeof(T)
//     add_parts:    reads num_parts parts, reads, writes sum    n (num_parts sizeof(Part) + 2 sizeof(Sum))
//     convert:      reads from, writes to                       n (sizeof(From) + sizeof(To))
//     squares:      reads x; at most 1024 partial sums          n sizeof(T)
//
// The sum of squares without atomics: at most 1024 blocks each sum every so-manieth pack in fp64; a second kernel of
// one
//   block adds the blocks' sums in order. The number of blocks depends on n alone (and on whether x can be packed): the
//   same bits in every run and on every GPU.
#include <algorithm>
#include <type_traits>

#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/reduce.h"

namespace {

constexpr int kThreads = 256;           // of a block
constexpr int64_t kMaxPartials = 1024;  // blocks of a sum: about one wave of 8 a multiprocessor on an H100
constexpr int kMinPacks = 8;            // of a thread of a sum: fewer blocks before shorter threads

/// The first element of this thread's pack.
template <int kWidth>
__device__ __forceinline__ int64_t first_element() {
  return (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
}

template <int kWidth>
int64_t num_blocks(int64_t n) {
  return ceil_div(n, int64_t{kThreads} * kWidth);
}

// y = a + b.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) residual_add_kernel(T* y, const T* a, const T* b, int64_t n) {
  const int64_t i = first_element<kWidth>();
  if (i >= n) return;
  float ai[kWidth], bi[kWidth];
  load_floats(ai, a + i);
  load_floats(bi, b + i);
  for (int k = 0; k < kWidth; k++) ai[k] += bi[k];
  store_floats(y + i, ai);
}

// sum += parts[0] + parts[1] + ..., each n elements long.
template <class Sum, class Part, int kWidth>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(Sum* sum, const Part* parts, int64_t n, int num_parts) {
  const int64_t i = first_element<kWidth>();
  if (i >= n) return;
  float added[kWidth], next[kWidth];
  load_floats(added, parts + i);
#pragma unroll 4
  for (int p = 1; p < num_parts; p++) {
    load_floats(next, parts + p * n + i);
    for (int k = 0; k < kWidth; k++) added[k] += next[k];
  }
  load_floats(next, sum + i);
  for (int k = 0; k < kWidth; k++) next[k] += added[k];
  store_floats(sum + i, next);
}

// The same in fp64. Statistics, a few thousand numbers: one element a thread.
__global__ void __launch_bounds__(kThreads)
    add_double_parts_kernel(double* sum, const double* parts, int64_t n, int num_parts) {
  const int64_t i = first_element<1>();
  if (i >= n) return;
  double added = parts[i];
  for (int p = 1; p < num_parts; p++) added += parts[p * n + i];
  sum[i] += added;
}

template <class To, class From, int kWidth>
__global__ void __launch_bounds__(kThreads) convert_kernel(To* to, const From* from, int64_t n) {
  const int64_t i = first_element<kWidth>();
  if (i >= n) return;
  if constexpr (std::is_same_v<To, From>) {  // a copy: bits of a NaN too
    store_pack<kWidth>(to + i, load_pack<kWidth>(from + i));
  } else {
    float value[kWidth];
    load_floats(value, from + i);
    store_floats(to + i, value);
  }
}

// partial (blocks): the block's sum of x^2. The square of a float is exact in fp64, and neither overflows nor vanishes.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) sum_of_squares_kernel(double* partial, const T* x, int64_t n) {
  double sum = 0;
  const int64_t stride = int64_t{gridDim.x} * kThreads * kWidth;
#pragma unroll 4
  for (int64_t i = first_element<kWidth>(); i < n; i += stride) {
    float xi[kWidth];
    load_floats(xi, x + i);
    for (int k = 0; k < kWidth; k++) sum += static_cast<double>(xi[k]) * static_cast<double>(xi[k]);
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// sum += partial (num_partials). One block: a thread adds every 256th in order, then the block adds its threads.
__global__ void __launch_bounds__(kThreads) add_partials_kernel(double* sum, const double* partial, int num_partials) {
  double added = 0;
  for (int p = threadIdx.x; p < num_partials; p += kThreads) added += partial[p];
  added = block_sum<kThreads>(added);
  if (threadIdx.x == 0) *sum += added;
}

/// Calls op with T's pack width, or 1, as an integral_constant.
template <class T, class Op>
void dispatch_width(bool packed, Op&& op) {
  packed ? op(std::integral_constant<int, kPackWidth<T>>()) : op(std::integral_constant<int, 1>());
}

}  // namespace

void residual_add_cuda(Device& device, Tensor y, ConstTensor a, ConstTensor b) {
  const int64_t n = y.numel();
  dispatch_cuda(a.dtype, "residual_add", [&]<class T>(T) {
    dispatch_width<T>(is_packable<T>(n, {y.data, a.data, b.data}),
                      [&]<int kWidth>(std::integral_constant<int, kWidth>) {
                        launch(device, {num_blocks<kWidth>(n), kThreads}, residual_add_kernel<T, kWidth>, y.as<T>(),
                               a.as<T>(), b.as<T>(), n);
                      });
  });
}

void add_parts_cuda(Device& device, Tensor sum, ConstTensor parts, int num_parts) {
  const int64_t n = sum.numel();
  if (sum.dtype == DType::F64) {
    return launch(device, {num_blocks<1>(n), kThreads}, add_double_parts_kernel, sum.as<double>(), parts.as<double>(),
                  n, num_parts);
  }
  dispatch_cuda(sum.dtype, "add_parts", [&]<class Sum>(Sum) {
    dispatch_cuda(parts.dtype, "add_parts", [&]<class Part>(Part) {
      using Wider = std::conditional_t<sizeof(Sum) >= sizeof(Part), Sum, Part>;
      dispatch_width<Wider>(is_packable<Wider>(n, {sum.data, parts.data}),
                            [&]<int kWidth>(std::integral_constant<int, kWidth>) {
                              launch(device, {num_blocks<kWidth>(n), kThreads}, add_parts_kernel<Sum, Part, kWidth>,
                                     sum.as<Sum>(), parts.as<Part>(), n, num_parts);
                            });
    });
  });
}

void add_sum_of_squares_cuda(Device& device, Tensor sum, ConstTensor x) {
  const int64_t n = x.numel();
  if (n == 0) return;
  dispatch_cuda(x.dtype, "add_sum_of_squares", [&]<class T>(T) {
    dispatch_width<T>(is_packable<T>(n, {x.data}), [&]<int kWidth>(std::integral_constant<int, kWidth>) {
      const int64_t blocks = std::min(kMaxPartials, num_blocks<kWidth * kMinPacks>(n));
      double* partial = static_cast<double*>(device.workspace(static_cast<size_t>(blocks) * sizeof(double)));
      launch(device, {blocks, kThreads}, sum_of_squares_kernel<T, kWidth>, partial, x.as<T>(), n);
      launch(device, {1, kThreads}, add_partials_kernel, sum.as<double>(), partial, static_cast<int>(blocks));
    });
  });
}

void convert_cuda(Device& device, Tensor to, ConstTensor from) {
  const int64_t n = to.numel();
  dispatch_cuda(to.dtype, "convert", [&]<class To>(To) {
    dispatch_cuda(from.dtype, "convert", [&]<class From>(From) {
      using Wider = std::conditional_t<sizeof(To) >= sizeof(From), To, From>;
      const bool packed = is_packable<Wider>(n, {to.data, from.data});
      dispatch_width<Wider>(packed, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
        launch(device, {num_blocks<kWidth>(n), kThreads}, convert_kernel<To, From, kWidth>, to.as<To>(),
               from.as<From>(), n);
      });
    });
  });
}
