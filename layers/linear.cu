// The linear layer on CUDA: products by cuBLASLt (layers/core/blas.h), the bias and its gradient by kernels. Contract:
// linear.h; the CPU loops that specify it: linear.cpp.
//
// Bytes from DRAM, of the least possible:
//   y = x W^T + b   the bias is added by the product, no byte more. Where cuBLASLt cannot, and where y is fp32 and b
//                   bf16, the rows of y start as b and the product adds to them: 2 T N sizeof(Y) more, rounded once
//                   all the same.
//   db              column_sums.cu: reads dy once more than the products do
#include "layers/linear.h"

#include "layers/column_sums.h"
#include "layers/core/blas.h"
#include "layers/core/cuda_util.cuh"

namespace {

constexpr int kThreads = 256;

// y (T, N) = b in every row. A block a row.
template <class Y, class T, int kWidth>
__global__ void __launch_bounds__(kThreads) linear_bias_kernel(Y* y, const T* b, int64_t N) {
  Y* yr = y + int64_t{blockIdx.x} * N;
  for (int64_t n = int64_t{threadIdx.x} * kWidth; n < N; n += kThreads * kWidth) {
    float value[kWidth];
    load_floats(value, b + n);
    store_floats(yr + n, value);
  }
}

template <class Y, class T>
void fill_with_bias(Device& device, Tensor y, ConstTensor b) {
  const int64_t rows = y.shape[0], N = y.shape[1];
  const bool packed = is_packable<Y>(N, {y.data, b.data});
  launch(device, {rows, kThreads}, packed ? linear_bias_kernel<Y, T, kPackWidth<Y>> : linear_bias_kernel<Y, T, 1>,
         y.as<Y>(), b.as<T>(), N);
}

}  // namespace

void linear_forward_cuda(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, bool accumulate) {
  dispatch_cuda(x.dtype, "linear", [&]<class T>(T) {
    if (!b) return blas_gemm(device, y, {x}, {w, true}, accumulate);
    if (y.numel() == 0) return;
    if (x.numel() > 0 && b.dtype == y.dtype && blas_gemm_bias(device, y, {x}, {w, true}, b)) return;
    y.dtype == b.dtype ? fill_with_bias<T, T>(device, y, b) : fill_with_bias<float, T>(device, y, b);
    blas_gemm(device, y, {x}, {w, true}, true);
  });
}

void linear_backward_cuda(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x,
                          ConstTensor w) {
  dispatch_cuda(x.dtype, "linear", [&](auto) {  // refuses what cannot be
    if (dx) blas_gemm(device, dx, {dy}, {w});
    blas_gemm(device, dw, {dy, true}, {x}, true);
  });
  if (db) add_column_sums_cuda(device, db, dy, dy.shape[0]);
}
