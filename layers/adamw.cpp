// Front door and the CPU loop that specifies AdamW. Contract and formula: adamw.h.
#include "layers/adamw.h"

#include <cmath>
#include <limits>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kBlock = 4096;

/// The scalars of a step; computed in fp64, used in the tensors' dtype.
template <class T>
struct Coefficients {
  T clip_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_correction2, eps;

  explicit Coefficients(const AdamWStep& s)
      : clip_scale(static_cast<T>(s.clip_scale)),
        decay(static_cast<T>(s.lr * s.weight_decay)),
        beta1(static_cast<T>(s.beta1)),
        one_minus_beta1(static_cast<T>(1 - s.beta1)),
        beta2(static_cast<T>(s.beta2)),
        one_minus_beta2(static_cast<T>(1 - s.beta2)),
        step_size(static_cast<T>(s.lr / (1 - std::pow(s.beta1, static_cast<double>(s.step))))),
        inv_sqrt_correction2(static_cast<T>(1 / std::sqrt(1 - std::pow(s.beta2, static_cast<double>(s.step))))),
        eps(static_cast<T>(s.eps)) {}
};

/// The moments of a row that gets no gradient any more would decay to subnormal numbers and stay there, where
/// arithmetic is many times slower on most CPUs.
template <class T>
inline T flush_subnormal(T x) {
  return std::abs(x) < std::numeric_limits<T>::min() ? T(0) : x;
}

template <class T>
void update_cpu(T* p, T* m, T* v, const T* g, int64_t n, const Coefficients<T> k) {
  parallel_for((n + kBlock - 1) / kBlock, 4, [&](int64_t block_begin, int64_t block_end) {
    const int64_t begin = block_begin * kBlock, end = std::min(block_end * kBlock, n);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
      const T gi = k.clip_scale * g[i];
      const T mi = flush_subnormal(k.beta1 * m[i] + k.one_minus_beta1 * gi);
      const T vi = flush_subnormal(k.beta2 * v[i] + k.one_minus_beta2 * gi * gi);
      const T decayed = p[i] - k.decay * p[i];
      m[i] = mi;
      v[i] = vi;
      p[i] = decayed - k.step_size * mi / (std::sqrt(vi) * k.inv_sqrt_correction2 + k.eps);
    }
  });
}

}  // namespace

void adamw_update(Device& device, Tensor p, Tensor m, Tensor v, ConstTensor g, const AdamWStep& step) {
  check_tensor(p, "adamw_update: p", p.shape, g.dtype);
  check_tensor(m, "adamw_update: m", p.shape, g.dtype);
  check_tensor(v, "adamw_update: v", p.shape, g.dtype);
  check_tensor(g, "adamw_update: g", p.shape, g.dtype);
  CHECK(step.step >= 1, "adamw_update: step {} must count from 1", step.step);
  CHECK(step.beta1 >= 0 && step.beta1 < 1 && step.beta2 >= 0 && step.beta2 < 1,
        "adamw_update: betas ({}, {}) must be in [0, 1)", step.beta1, step.beta2);
  CHECK(step.lr >= 0 && step.eps >= 0 && step.weight_decay >= 0,
        "adamw_update: lr {}, eps {} and weight_decay {} must not be negative", step.lr, step.eps, step.weight_decay);
  require_cpu(device, "adamw_update");
  dispatch_float(g.dtype, "adamw_update", [&]<class T>(T) {
    update_cpu(p.as<T>(), m.as<T>(), v.as<T>(), g.as<T>(), p.numel(), Coefficients<T>(step));
  });
}
