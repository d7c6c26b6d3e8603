// Front door and the CPU loop that specifies AdamW. Contract and formula: adamw.h.
#include "layers/adamw.h"

#include <cmath>
#include <limits>

#include "layers/adamw_coefficients.h"
#include "layers/core/parallel.h"

namespace {

constexpr int64_t kBlock = 4096;

/// The moments of a row that gets no gradient any more would decay to subnormal numbers and stay there, where
/// arithmetic is many times slower on most CPUs.
template <class T>
inline T flush_subnormal(T x) {
  return std::abs(x) < std::numeric_limits<T>::min() ? T(0) : x;
}

template <class T, class G>
void update_cpu(T* p, T* m, T* v, bf16* weights, const G* g, int64_t n, const detail::AdamWCoefficients<T> k) {
  parallel_for((n + kBlock - 1) / kBlock, 4, [&](int64_t block_begin, int64_t block_end) {
    const int64_t begin = block_begin * kBlock, end = std::min(block_end * kBlock, n);
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
      const T gi = k.clip_scale * static_cast<T>(static_cast<Accumulator<G>>(g[i]));
      const T mi = flush_subnormal(k.beta1 * m[i] + k.one_minus_beta1 * gi);
      const T vi = flush_subnormal(k.beta2 * v[i] + k.one_minus_beta2 * gi * gi);
      const T decayed = p[i] - k.decay * p[i];
      m[i] = mi;
      v[i] = vi;
      p[i] = decayed - k.step_size * mi / (std::sqrt(vi) * k.inv_sqrt_correction2 + k.eps);
    }
    if (!weights) return;
    for (int64_t i = begin; i < end; i++) weights[i] = bf16(static_cast<float>(p[i]));
  });
}

}  // namespace

void adamw_update(Device& device, Tensor p, Tensor m, Tensor v, ConstTensor g, const AdamWStep& step, Tensor weights) {
  check_tensor(p, "adamw_update: p", p.shape, accumulator_dtype(g.dtype));
  check_tensor(m, "adamw_update: m", p.shape, p.dtype);
  check_tensor(v, "adamw_update: v", p.shape, p.dtype);
  check_tensor(g, "adamw_update: g", p.shape, g.dtype);
  if (weights) check_tensor(weights, "adamw_update: weights", p.shape, DType::BF16);
  CHECK(step.step >= 1, "adamw_update: step {} must count from 1", step.step);
  CHECK(step.beta1 >= 0 && step.beta1 < 1 && step.beta2 >= 0 && step.beta2 < 1,
        "adamw_update: betas ({}, {}) must be in [0, 1)", step.beta1, step.beta2);
  CHECK(step.lr >= 0 && step.eps >= 0 && step.weight_decay >= 0,
        "adamw_update: lr {}, eps {} and weight_decay {} must not be negative", step.lr, step.eps, step.weight_decay);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return adamw_update_cuda(device, p, m, v, g, step, weights);
  }
  dispatch_float(p.dtype, "adamw_update", [&]<class T>(T) {
    const auto update = [&]<class G>(const G* gradient) {
      update_cpu(p.as<T>(), m.as<T>(), v.as<T>(), weights ? weights.as<bf16>() : nullptr, gradient, p.numel(),
                 detail::AdamWCoefficients<T>(step));
    };
    g.dtype == DType::BF16 ? update(g.as<bf16>()) : update(g.as<T>());
  });
}
