// Elementary functions that vectorise: branch-free, so that a loop of them becomes SIMD code without fast-math.
// The fp64 overloads are the C library's, for the gradient checks.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

/// e^x to 1.1 ulp for x in [-87.3, 88.7]; clamped outside (never 0, never infinite); NaN for NaN.
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its minimax polynomial; 2^n by the exponent bits.
inline float fast_exp(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which the low bits then hold
  const float shifted = clamped * 0x1.715476p+0f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0x1.62e400p-1f) - n * 0x1.7f7d1cp-20f;
  float p = 0x1.6850e4p-10f;
  p = p * r + 0x1.123bccp-7f;
  p = p * r + 0x1.555b98p-5f;
  p = p * r + 0x1.55548ep-3f;
  p = p * r + 0x1.fffff8p-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t exponent = std::bit_cast<int32_t>(shifted) << 23;
  const float result = std::bit_cast<float>(std::bit_cast<int32_t>(p) + exponent);
  return x == x ? result : x;
}
inline double fast_exp(double x) {
  return std::exp(x);
}

template <class T>
inline T fast_sigmoid(T x) {
  return T(1) / (T(1) + fast_exp(-x));
}

/// tanh to about 2e-7 absolute: 1 - 2 / (e^{2x} + 1), and the odd polynomial where that would cancel.
inline float fast_tanh(float x) {
  const float big = 1.0f - 2.0f / (fast_exp(2.0f * x) + 1.0f);
  const float s = x * x;
  const float small = x * (1.0f + s * (-0x1.555556p-2f + s * (0x1.111112p-3f + s * -0x1.ba1ba2p-5f)));
  return (x < 0.2f && x > -0.2f) ? small : big;
}
inline double fast_tanh(double x) {
  return std::tanh(x);
}
