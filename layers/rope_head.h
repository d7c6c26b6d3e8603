// The rotation of one head: shared by rope.cpp and qk_norm.cpp. Formula: rope.h.
#pragma once

#include <cstdint>

namespace detail {

/// Rotates one head x (r = 2 half) by the angles with these cosines, and sines times `sign`.
template <bool kInterleaved, class T>
inline void rotate_head(T* x, const T* cos, const T* sin, T sign, int64_t half) {
#pragma omp simd
  for (int64_t m = 0; m < half; m++) {
    const int64_t i0 = kInterleaved ? 2 * m : m, i1 = kInterleaved ? 2 * m + 1 : m + half;
    const T x0 = x[i0], x1 = x[i1], c = cos[m], s = sign * sin[m];
    x[i0] = x0 * c - x1 * s;
    x[i1] = x1 * c + x0 * s;
  }
}

}  // namespace detail
