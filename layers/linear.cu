// The linear layer on CUDA: products by cuBLASLt (layers/core/blas.h), the bias and its gradient by kernels. Contract:
// linear.h; the CPU loops that specify it: linear.cpp.
//
// Bytes from DRAM, of the least possible:
//   y = x W^T + b   the bias is added by the product, no byte more. Where cuBLASLt cannot, the rows of y start as b and
//                   the product adds to them: 2 T N sizeof(T) more, rounded once all the same.
//   db              reads dy, T N sizeof(T): the minimum, for dy is read once more than the products do; and the
//                   parts' sums, written and read, 8 / (64 sizeof(T)) of that at most: 6% in bf16
//
// db without atomics: a block sums some columns over a range of at least 64 rows, a warp every eighth row, and adds its
//   warps' sums in order; a second kernel adds the ranges' sums in order. The ranges depend on the shape alone: the
//   same bits in every run and on every GPU.
#include "layers/linear.h"

#include <algorithm>

#include "layers/core/blas.h"
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kMinRows = 64;      // of a range
constexpr int64_t kMinBlocks = 1024;  // ranges are cut until there are so many blocks: 8 an SM of an H100
constexpr int64_t kMaxRanges = 256;

// y (T, N) = b in every row. A block a row.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) linear_bias_kernel(T* y, const T* b, int64_t N) {
  T* yr = y + int64_t{blockIdx.x} * N;
  for (int64_t n = int64_t{threadIdx.x} * kWidth; n < N; n += kThreads * kWidth) {
    store_pack<kWidth>(yr + n, load_pack<kWidth>(b + n));
  }
}

// partial (ranges, N): sums of dy's columns over a range of rows. Block (range, chunk): chunk is kWarpSize kWidth
// columns, a pack a lane; warp w sums rows w, w + 8, ... of the range.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    linear_column_sums_kernel(float* partial, const T* dy, int64_t rows, int64_t N, int64_t ranges, int64_t chunks) {
  __shared__ float sums[kWarps][kWarpSize * kWidth];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t range = blockIdx.x / chunks, first = blockIdx.x % chunks * (kWarpSize * kWidth);
  const int64_t n = first + lane * kWidth;
  float sum[kWidth] = {};
  if (n < N) {
    const int64_t end = (range + 1) * rows / ranges;
    for (int64_t t = range * rows / ranges + warp; t < end; t += kWarps) {
      const Pack<T, kWidth> pack = load_pack<kWidth>(dy + t * N + n);
      for (int k = 0; k < kWidth; k++) sum[k] += to_float(pack.element[k]);
    }
  }
  for (int k = 0; k < kWidth; k++) sums[warp][k * kWarpSize + lane] = sum[k];  // lanes beside lanes: no bank conflicts
  __syncthreads();
  for (int i = threadIdx.x; i < kWarpSize * kWidth; i += kThreads) {
    const int64_t column = first + i % kWarpSize * kWidth + i / kWarpSize;
    float total = 0;
    for (int w = 0; w < kWarps; w++) total += sums[w][i];
    if (column < N) partial[range * N + column] = total;
  }
}

// db (N) += partial (ranges, N) summed over its rows, in order. A thread a column.
__global__ void __launch_bounds__(kThreads)
    linear_bias_gradient_kernel(float* db, const float* partial, int64_t ranges, int64_t N) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= N) return;
  float sum = 0;
  for (int64_t i = 0; i < ranges; i++) sum += partial[i * N + n];
  db[n] += sum;
}

template <class T, int kWidth>
void bias_gradient(Device& device, Tensor db, ConstTensor dy) {
  const int64_t rows = dy.shape[0], N = dy.shape[1];
  if (rows == 0 || N == 0) return;
  const int64_t chunks = ceil_div(N, kWarpSize * kWidth), row_bytes = N * static_cast<int64_t>(sizeof(float));
  const int64_t fitting = static_cast<int64_t>(Device::kWorkspaceBytes) / row_bytes;
  CHECK(fitting > 0, "linear: a bias of {} elements, the CUDA kernels allow {}", N,
        Device::kWorkspaceBytes / sizeof(float));
  const int64_t ranges =
      std::min({std::max<int64_t>(1, rows / kMinRows), ceil_div(kMinBlocks, chunks), kMaxRanges, fitting});
  float* partial = static_cast<float*>(device.workspace(static_cast<size_t>(ranges * row_bytes)));
  launch(device, {ranges * chunks, kThreads}, linear_column_sums_kernel<T, kWidth>, partial, dy.as<T>(), rows, N,
         ranges, chunks);
  launch(device, {ceil_div(N, kThreads), kThreads}, linear_bias_gradient_kernel, db.as<float>(), partial, ranges, N);
}

}  // namespace

void linear_forward_cuda(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, bool accumulate) {
  dispatch_cuda(x.dtype, "linear", [&]<class T>(T) {
    if (!b) return blas_gemm(device, y, {x}, {w, true}, accumulate);
    if (y.numel() == 0) return;
    if (x.numel() > 0 && blas_gemm_bias(device, y, {x}, {w, true}, b)) return;
    const int64_t rows = y.shape[0], N = y.shape[1];
    const bool packed = is_packable<T>(N, {y.data, b.data});
    launch(device, {rows, kThreads}, packed ? linear_bias_kernel<T, kPackWidth<T>> : linear_bias_kernel<T, 1>,
           y.as<T>(), b.as<T>(), N);
    blas_gemm(device, y, {x}, {w, true}, true);
  });
}

void linear_backward_cuda(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x,
                          ConstTensor w) {
  dispatch_cuda(x.dtype, "linear", [&]<class T>(T) {
    if (dx) blas_gemm(device, dx, {dy}, {w});
    blas_gemm(device, dw, {dy, true}, {x}, true);
    if (!db) return;
    const bool packed = is_packable<T>(dy.shape[1], {dy.data});
    packed ? bias_gradient<T, kPackWidth<T>>(device, db, dy) : bias_gradient<T, 1>(device, db, dy);
  });
}
