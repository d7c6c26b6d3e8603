// Front doors and the CPU loops of elementwise sums and reductions. Contract: reduce.h.
#include "layers/reduce.h"

#include <array>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kGrain = 16384;
constexpr int64_t kPieces = 256;  // that a sum is cut into, whatever the number of threads
constexpr int64_t kLanes = 16;    // running sums inside a piece: they vectorise, and hide the latency of an addition

template <class T>
void add_cpu(T* y, const T* a, const T* b, int64_t n) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) y[i] = a[i] + b[i];
  });
}

template <class T>
double piece_sum_of_squares(const T* x, int64_t n) {
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t k = 0; k < kLanes; k++) lanes[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
  }
  double sum = 0;
  for (; i < n; i++) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class T>
double sum_of_squares_cpu(const T* x, int64_t n) {
  std::array<double, kPieces> sums;
  const int64_t grain = kPieces / std::clamp<int64_t>(n / kGrain, 1, kPieces);
  parallel_for(kPieces, grain, [&](int64_t piece_begin, int64_t piece_end) {
    for (int64_t p = piece_begin; p < piece_end; p++) {
      const int64_t begin = p * n / kPieces, end = (p + 1) * n / kPieces;
      sums[static_cast<size_t>(p)] = piece_sum_of_squares(x + begin, end - begin);
    }
  });
  double sum = 0;
  for (const double s : sums) sum += s;
  return sum;
}

}  // namespace

void residual_add(Device& device, Tensor y, ConstTensor a, ConstTensor b) {
  check_tensor(y, "residual_add: y", a.shape, a.dtype);
  check_tensor(a, "residual_add: a", a.shape, a.dtype);
  check_tensor(b, "residual_add: b", a.shape, a.dtype);
  require_cpu(device, "residual_add");
  dispatch_float(a.dtype, "residual_add", [&]<class T>(T) { add_cpu(y.as<T>(), a.as<T>(), b.as<T>(), y.numel()); });
}

double sum_of_squares(Device& device, ConstTensor x) {
  check_tensor(x, "sum_of_squares: x", x.shape, x.dtype);
  require_cpu(device, "sum_of_squares");
  double sum = 0;
  dispatch_float(x.dtype, "sum_of_squares", [&]<class T>(T) { sum = sum_of_squares_cpu(x.as<T>(), x.numel()); });
  return sum;
}
