#include "layers/core/math.h"

#include <gtest/gtest.h>

#include <limits>

namespace {

TEST(Math, fast_exp_is_within_two_ulp) {
  double worst = 0;
  for (float x = -87.0f; x < 88.0f; x += 0.00317f) {
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(fast_exp(x)) - exact) / exact);
  }
  EXPECT_LE(worst, 2 * 0x1p-23);
  EXPECT_EQ(fast_exp(0.0f), 1.0f);
  EXPECT_LE(fast_exp(-1e30f), 1.3e-38f);
  EXPECT_TRUE(std::isnan(fast_exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Math, fast_tanh_is_within_four_ulp_of_one) {
  for (float x = -12.0f; x < 12.0f; x += 0.00137f) {
    EXPECT_NEAR(fast_tanh(x), std::tanh(static_cast<double>(x)), 4e-7) << x;
  }
  for (float x = 1e-6f; x < 0.3f; x *= 1.01f) {
    const double exact = std::tanh(static_cast<double>(x));
    EXPECT_NEAR(fast_tanh(x) / exact, 1.0, 2e-6) << x;
  }
}

}  // namespace
