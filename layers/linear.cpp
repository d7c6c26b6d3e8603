// Front doors and CPU side of the linear layer. Contract and formulas: linear.h.
#include "layers/linear.h"

#include "layers/core/gemm.h"
#include "layers/core/parallel.h"

namespace {

// db_n += sum over rows t of dy_tn, rows in order.
template <class T>
void add_column_sums(T* db, const T* dy, int64_t rows, int64_t N) {
  parallel_for(N, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < rows; t++) {
      for (int64_t n = begin; n < end; n++) db[n] += dy[t * N + n];
    }
  });
}

}  // namespace

void linear_forward(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, bool accumulate) {
  CHECK(x.shape.rank() == 2 && w.shape.rank() == 2, "linear_forward: x ('{}') {} and w ('{}') {} must be matrices",
        x.name, x.shape.str(), w.name, w.shape.str());
  const int64_t rows = x.shape[0], K = x.shape[1], N = w.shape[0];
  check_tensor(w, "linear_forward: w", {N, K}, x.dtype);
  const bool keeps_sums = y.dtype == accumulator_dtype(x.dtype);
  check_tensor(y, "linear_forward: y", {rows, N}, keeps_sums ? y.dtype : x.dtype);
  if (b) check_tensor(b, "linear_forward: b", {N}, x.dtype);
  CHECK(!(b && accumulate), "linear_forward: a bias ('{}') cannot be combined with accumulate", b.name);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return linear_forward_cuda(device, y, x, w, b, accumulate);
  }
  dispatch_float(x.dtype, "linear_forward", [&]<class T>(T) {
    const T* addend = accumulate ? y.as<T>() : (b ? b.as<T>() : nullptr);
    gemm<T>(y.as<T>(), rows, N, K, {x.as<T>(), K}, {w.as<T>(), K, true}, addend, accumulate ? N : 0);
  });
}

void linear_backward(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x, ConstTensor w) {
  CHECK(x.shape.rank() == 2 && w.shape.rank() == 2, "linear_backward: x ('{}') {} and w ('{}') {} must be matrices",
        x.name, x.shape.str(), w.name, w.shape.str());
  const int64_t rows = x.shape[0], K = x.shape[1], N = w.shape[0];
  check_tensor(w, "linear_backward: w", {N, K}, x.dtype);
  check_tensor(dy, "linear_backward: dy", {rows, N}, x.dtype);
  check_tensor(dw, "linear_backward: dw", {N, K}, accumulator_dtype(x.dtype));
  if (dx) check_tensor(dx, "linear_backward: dx", {rows, K}, x.dtype);
  if (db) check_tensor(db, "linear_backward: db", {N}, accumulator_dtype(x.dtype));
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return linear_backward_cuda(device, dx, dw, db, dy, x, w);
  }
  dispatch_float(x.dtype, "linear_backward", [&]<class T>(T) {
    if (dx) gemm<T>(dx.as<T>(), rows, K, N, {dy.as<T>(), N}, {w.as<T>(), K});
    gemm<T>(dw.as<T>(), N, K, rows, {dy.as<T>(), N, true}, {x.as<T>(), K}, dw.as<T>(), K);
    if (db) add_column_sums(db.as<T>(), dy.as<T>(), rows, N);
  });
}
