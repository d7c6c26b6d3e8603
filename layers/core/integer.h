// Division that rounds up; b > 0.
#pragma once

#include <cstdint>

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// The least multiple of `multiple` that is not below a.
constexpr int64_t round_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}
