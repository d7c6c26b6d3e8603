// Front doors and the CPU loops that specify RMSNorm. Contract and formulas: rmsnorm.h.
#include "layers/rmsnorm.h"

#include <cmath>
#include <vector>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kRowGrain = 16;
constexpr int64_t kMaxPartials = 64;  // rows are summed in at most this many pieces, whatever the number of threads

template <class Op>
void dispatch_storage(DType dtype, Op&& op) {
  if (dtype == DType::BF16) return op(bf16{});
  dispatch_float(dtype, "rmsnorm", op);
}

DType accumulator_dtype(DType dtype) {
  return dtype == DType::F64 ? DType::F64 : DType::F32;
}

template <class T>
void forward_cpu(T* y, Accumulator<T>* rstd, const T* x, const T* w, int64_t rows, int64_t C, double eps,
                 NormKind kind) {
  using A = Accumulator<T>;
  const A one_plus = kind == NormKind::OnePlus ? A(1) : A(0);
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* xr = x + r * C;
      T* yr = y + r * C;
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < C; c++) sum += A(xr[c]) * A(xr[c]);
      const A s = A(1) / std::sqrt(sum / A(C) + A(eps));
      rstd[r] = s;
      if (kind == NormKind::Plain) {
        for (int64_t c = 0; c < C; c++) yr[c] = T(A(w[c]) * A(T(A(xr[c]) * s)));
      } else {
        for (int64_t c = 0; c < C; c++) yr[c] = T((one_plus + A(w[c])) * (A(xr[c]) * s));
      }
    }
  });
}

// y_c = w_c x_c s with s = rstd, and ds/dx_c = -s^3 x_c / C. With g_c = dy_c w_c:
//   dx_c = s g_c - x_c s^3 mean(g x)        dw_c += sum over rows of dy_c x_c s
template <class T>
void backward_cpu(T* dx, Accumulator<T>* dw, const T* dy, const T* x, const Accumulator<T>* rstd, const T* w,
                  int64_t rows, int64_t C, NormKind kind) {
  using A = Accumulator<T>;
  const A one_plus = kind == NormKind::OnePlus ? A(1) : A(0);
  const int64_t pieces = std::min(kMaxPartials, (rows + kRowGrain - 1) / kRowGrain);
  std::vector<A> partial(static_cast<size_t>(pieces * C), A(0));
  parallel_for(pieces, 1, [&](int64_t piece_begin, int64_t piece_end) {
    for (int64_t p = piece_begin; p < piece_end; p++) {
      A* dwp = partial.data() + p * C;
      for (int64_t r = p * rows / pieces; r < (p + 1) * rows / pieces; r++) {
        const T* xr = x + r * C;
        const T* dyr = dy + r * C;
        T* dxr = dx + r * C;
        const A s = rstd[r];
        A gx = 0;
#pragma omp simd reduction(+ : gx)
        for (int64_t c = 0; c < C; c++) gx += A(dyr[c]) * (one_plus + A(w[c])) * A(xr[c]);
        const A k = gx * s * s * s / A(C);
        for (int64_t c = 0; c < C; c++) {
          const A dyc = A(dyr[c]), xc = A(xr[c]);
          dwp[c] += dyc * xc * s;
          dxr[c] = T(s * (dyc * (one_plus + A(w[c]))) - xc * k);
        }
      }
    }
  });
  for (int64_t p = 0; p < pieces; p++) {
    for (int64_t c = 0; c < C; c++) dw[c] += partial[static_cast<size_t>(p * C + c)];
  }
}

}  // namespace

void rmsnorm_forward(Device& device, Tensor y, Tensor rstd, ConstTensor x, ConstTensor w, double eps, NormKind kind) {
  const int64_t rows = x.shape.rows(), C = x.shape.last();
  check_tensor(y, "rmsnorm_forward: y", x.shape, x.dtype);
  check_tensor(rstd, "rmsnorm_forward: rstd", {rows}, accumulator_dtype(x.dtype));
  check_tensor(w, "rmsnorm_forward: w", {C}, x.dtype);
  CHECK(eps >= 0, "rmsnorm_forward: eps = {} is negative", eps);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return rmsnorm_forward_cuda(device, y, rstd, x, w, eps, kind);
  }
  dispatch_storage(x.dtype, [&]<class T>(T) {
    forward_cpu<T>(y.as<T>(), rstd.as<Accumulator<T>>(), x.as<T>(), w.as<T>(), rows, C, eps, kind);
  });
}

void rmsnorm_backward(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd,
                      ConstTensor w, NormKind kind) {
  const int64_t rows = x.shape.rows(), C = x.shape.last();
  check_tensor(dx, "rmsnorm_backward: dx", x.shape, x.dtype);
  check_tensor(dy, "rmsnorm_backward: dy", x.shape, x.dtype);
  check_tensor(rstd, "rmsnorm_backward: rstd", {rows}, accumulator_dtype(x.dtype));
  check_tensor(w, "rmsnorm_backward: w", {C}, x.dtype);
  check_tensor(dw, "rmsnorm_backward: dw", {C}, accumulator_dtype(x.dtype));
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return rmsnorm_backward_cuda(device, dx, dw, dy, x, rstd, w, kind);
  }
  dispatch_storage(x.dtype, [&]<class T>(T) {
    backward_cpu<T>(dx.as<T>(), dw.as<Accumulator<T>>(), dy.as<T>(), x.as<T>(), rstd.as<Accumulator<T>>(), w.as<T>(),
                    rows, C, kind);
  });
}
