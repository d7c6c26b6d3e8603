// Front doors and CPU side of the linear layer. Contract and formulas: linear.h.
#include "layers/linear.h"

#include <cblas.h>

#include "layers/core/parallel.h"

namespace {

void blas_gemm(bool ta, bool tb, int64_t M, int64_t N, int64_t K, const float* a, const float* b, float beta,
               float* c) {
  cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, int(M), int(N), int(K), 1,
              a, int(ta ? M : K), b, int(tb ? K : N), beta, c, int(N));
}
void blas_gemm(bool ta, bool tb, int64_t M, int64_t N, int64_t K, const double* a, const double* b, double beta,
               double* c) {
  cblas_dgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, int(M), int(N), int(K), 1,
              a, int(ta ? M : K), b, int(tb ? K : N), beta, c, int(N));
}

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
  check_tensor(y, "linear_forward: y", {rows, N}, x.dtype);
  if (b) check_tensor(b, "linear_forward: b", {N}, x.dtype);
  CHECK(!(b && accumulate), "linear_forward: a bias ('{}') cannot be combined with accumulate", b.name);
  require_cpu(device, "linear_forward");
  dispatch_float(x.dtype, "linear_forward", [&]<class T>(T) {
    T* yp = y.as<T>();
    if (b) {
      for (int64_t t = 0; t < rows; t++) std::copy_n(b.as<T>(), N, yp + t * N);
    }
    blas_gemm(false, true, rows, N, K, x.as<T>(), w.as<T>(), (accumulate || b) ? T(1) : T(0), yp);
  });
}

void linear_backward(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x, ConstTensor w) {
  CHECK(x.shape.rank() == 2 && w.shape.rank() == 2, "linear_backward: x ('{}') {} and w ('{}') {} must be matrices",
        x.name, x.shape.str(), w.name, w.shape.str());
  const int64_t rows = x.shape[0], K = x.shape[1], N = w.shape[0];
  check_tensor(w, "linear_backward: w", {N, K}, x.dtype);
  check_tensor(dy, "linear_backward: dy", {rows, N}, x.dtype);
  check_tensor(dw, "linear_backward: dw", {N, K}, x.dtype);
  if (dx) check_tensor(dx, "linear_backward: dx", {rows, K}, x.dtype);
  if (db) check_tensor(db, "linear_backward: db", {N}, x.dtype);
  require_cpu(device, "linear_backward");
  dispatch_float(x.dtype, "linear_backward", [&]<class T>(T) {
    if (dx) blas_gemm(false, false, rows, K, N, dy.as<T>(), w.as<T>(), T(0), dx.as<T>());
    blas_gemm(true, false, N, K, rows, dy.as<T>(), x.as<T>(), T(1), dw.as<T>());
    if (db) add_column_sums(db.as<T>(), dy.as<T>(), rows, N);
  });
}
