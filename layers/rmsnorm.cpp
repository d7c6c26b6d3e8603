// Front doors and the CPU loops that specify RMSNorm. Contract and formulas: rmsnorm.h.
#include "layers/rmsnorm.h"

#include "layers/core/parallel.h"
#include "layers/rmsnorm_row.h"

namespace {

constexpr int64_t kRowGrain = 16;

template <class Op>
void dispatch_storage(DType dtype, Op&& op) {
  if (dtype == DType::BF16) return op(bf16{});
  dispatch_float(dtype, "rmsnorm", op);
}

// `sum`, `added` null: the norm of x alone.
template <class T>
void forward_cpu(T* y, Accumulator<T>* rstd, T* sum, const T* x, const T* added, const T* w, int64_t rows, int64_t C,
                 double eps, NormKind kind) {
  using A = Accumulator<T>;
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* xr = x + r * C;
      if (added) {
        const T* br = added + r * C;
        T* sr = sum + r * C;
#pragma omp simd
        for (int64_t c = 0; c < C; c++) sr[c] = T(A(xr[c]) + A(br[c]));
        xr = sr;
      }
      rstd[r] = detail::rmsnorm_row_forward(y + r * C, xr, w, C, eps, kind);
    }
  });
}

template <class T>
void backward_cpu(T* dx, Accumulator<T>* dw, const T* dy, const T* x, const Accumulator<T>* rstd, const T* w,
                  int64_t rows, int64_t C, NormKind kind, const T* residual) {
  using A = Accumulator<T>;
  const auto sum = detail::sum_over_rows<A>(rows, C, [&](int64_t begin, int64_t end, A* dw_part) {
    for (int64_t r = begin; r < end; r++) {
      detail::rmsnorm_row_backward(dx + r * C, dw_part, dy + r * C, x + r * C, rstd[r], w, C, kind,
                                   residual ? residual + r * C : nullptr);
    }
  });
  for (int64_t c = 0; c < C; c++) dw[c] += sum[static_cast<size_t>(c)];
}

/// `sum`, `added` null: the norm of x alone.
void forward(Device& device, const char* who, Tensor sum, Tensor y, Tensor rstd, ConstTensor x, ConstTensor added,
             ConstTensor w, double eps, NormKind kind) {
  const int64_t rows = x.shape.rows(), C = x.shape.last();
  const auto check = [&](ConstTensor t, const char* name, Shape shape, DType dtype) {
    check_tensor(t, fmt::format("{}: {}", who, name).c_str(), shape, dtype);
  };
  check(y, "y", x.shape, x.dtype);
  check(rstd, "rstd", {rows}, accumulator_dtype(x.dtype));
  check(w, "w", {C}, x.dtype);
  if (added) check(sum, "sum", x.shape, x.dtype), check(added, "b", x.shape, x.dtype);
  CHECK(eps >= 0, "{}: eps = {} is negative", who, eps);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return rmsnorm_forward_cuda(device, y, rstd, sum, x, added, w, eps, kind);
  }
  dispatch_storage(x.dtype, [&]<class T>(T) {
    forward_cpu<T>(y.as<T>(), rstd.as<Accumulator<T>>(), added ? sum.as<T>() : nullptr, x.as<T>(),
                   added ? added.as<T>() : nullptr, w.as<T>(), rows, C, eps, kind);
  });
}

}  // namespace

void rmsnorm_forward(Device& device, Tensor y, Tensor rstd, ConstTensor x, ConstTensor w, double eps, NormKind kind) {
  forward(device, "rmsnorm_forward", {}, y, rstd, x, {}, w, eps, kind);
}

void add_rmsnorm_forward(Device& device, Tensor sum, Tensor y, Tensor rstd, ConstTensor a, ConstTensor b, ConstTensor w,
                         double eps, NormKind kind) {
  check_tensor(b, "add_rmsnorm_forward: b", a.shape, a.dtype);
  forward(device, "add_rmsnorm_forward", sum, y, rstd, a, b, w, eps, kind);
}

void rmsnorm_backward(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd,
                      ConstTensor w, NormKind kind, ConstTensor residual) {
  const int64_t rows = x.shape.rows(), C = x.shape.last();
  check_tensor(dx, "rmsnorm_backward: dx", x.shape, x.dtype);
  check_tensor(dy, "rmsnorm_backward: dy", x.shape, x.dtype);
  check_tensor(rstd, "rmsnorm_backward: rstd", {rows}, accumulator_dtype(x.dtype));
  check_tensor(w, "rmsnorm_backward: w", {C}, x.dtype);
  check_tensor(dw, "rmsnorm_backward: dw", {C}, accumulator_dtype(x.dtype));
  if (residual) check_tensor(residual, "rmsnorm_backward: residual", x.shape, x.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return rmsnorm_backward_cuda(device, dx, dw, dy, x, rstd, w, kind, residual);
  }
  dispatch_storage(x.dtype, [&]<class T>(T) {
    backward_cpu<T>(dx.as<T>(), dw.as<Accumulator<T>>(), dy.as<T>(), x.as<T>(), rstd.as<Accumulator<T>>(), w.as<T>(),
                    rows, C, kind, residual ? residual.as<T>() : nullptr);
  });
}
