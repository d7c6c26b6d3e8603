// How far the results of a kernel may lie from those of the CPU layer.
#pragma once

#include <algorithm>
#include <cmath>

#include "test/testing.h"

/// Rounding of fp32: half an ulp of 1.
constexpr double kRoundF32 = 0x1p-24;

inline double norm(const HostTensor& t) {
  double sum = 0;
  for (int64_t i = 0; i < t.numel(); i++) sum += t.get(i) * t.get(i);
  return std::sqrt(sum);
}

inline double distance(const HostTensor& a, const HostTensor& b) {
  double sum = 0;
  for (int64_t i = 0; i < a.numel(); i++) sum += (a.get(i) - b.get(i)) * (a.get(i) - b.get(i));
  return std::sqrt(sum);
}

inline double largest_of(const HostTensor& t) {
  double largest = 0;
  for (int64_t i = 0; i < t.numel(); i++) largest = std::max(largest, std::abs(t.get(i)));
  return largest;
}

/// Every element: |actual - expected| <= relative |expected| + absolute, which bound what fp32 arithmetic differs by.
/// A BF16 result was rounded once: another half ulp of bf16, which has 8 bits.
inline void expect_elements_near(const HostTensor& actual, const HostTensor& expected, double relative, double absolute,
                                 const char* what) {
  ASSERT_EQ(actual.shape(), expected.shape()) << what;
  for (int64_t i = 0; i < actual.numel(); i++) {
    const double a = actual.get(i), e = expected.get(i);
    double bound = relative * std::abs(e) + absolute;
    if (actual.dtype() == DType::BF16 && e != 0) bound += std::ldexp(1.0, std::ilogb(std::abs(e) + bound) - 8);
    ASSERT_LE(std::abs(a - e), bound) << what << "[" << i << "] = " << a << ", not " << e;
  }
}

/// Every element is a sum of n products of numbers near 1, rounded n times in fp32 with random sign, in two orders; an
/// element of `actual` is rounded once more to its dtype. The largest of many errors is within some six standard
/// deviations.
inline void expect_sums_near(const HostTensor& actual, const HostTensor& expected, int64_t n, const char* what) {
  const double in_fp32 = kRoundF32 * 6 * (static_cast<double>(n) + 1);
  const double last = actual.dtype() == DType::BF16 ? 0x1p-8 : kRoundF32;  // half an ulp
  for (int64_t i = 0; i < actual.numel(); i++) {
    const double e = expected.get(i);
    ASSERT_NEAR(actual.get(i), e, in_fp32 + last * 1.01 * std::abs(e)) << what << "[" << i << "]";
  }
}
