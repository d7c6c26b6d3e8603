// The scalars of an AdamW step, for the loops of adamw.cpp and the kernel of adamw.cu.
#pragma once

#include <cmath>

#include "layers/adamw.h"

namespace detail {

/// Computed in fp64, used in the tensors' dtype.
template <class T>
struct AdamWCoefficients {
  T clip_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_correction2, eps;

  explicit AdamWCoefficients(const AdamWStep& s)
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

}  // namespace detail
