// One normalised row, forward and backward, and the fixed order in which rows add up to a weight gradient: shared by
// rmsnorm.cpp (rows of a tensor) and qk_norm.cpp (heads inside a fused qkv). Formulas: rmsnorm.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "layers/core/parallel.h"
#include "layers/rmsnorm.h"

namespace detail {

/// What is subtracted from x (C): its mean for LayerNorm, nothing for RMSNorm.
template <class T>
Accumulator<T> row_centre(const T* x, int64_t C, NormKind kind) {
  using A = Accumulator<T>;
  if (kind != NormKind::LayerNorm) return A(0);
  const A origin = C > 0 ? A(x[0]) : A(0);  // far from zero, a sum of x itself would lose the digits of the mean
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < C; c++) sum += A(x[c]) - origin;
  return origin + sum / A(C);
}

/// y (C) <- x (C), w (C); returns rstd. y may be x.
template <class T>
Accumulator<T> rmsnorm_row_forward(T* y, const T* x, const T* w, int64_t C, double eps, NormKind kind) {
  using A = Accumulator<T>;
  const A one_plus = kind == NormKind::OnePlus ? A(1) : A(0);
  const A centre = row_centre(x, C, kind);
  A sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < C; c++) sum += (A(x[c]) - centre) * (A(x[c]) - centre);
  const A rstd = A(1) / std::sqrt(sum / A(C) + A(eps));
  if (kind == NormKind::Plain) {
#pragma omp simd
    for (int64_t c = 0; c < C; c++) y[c] = T(A(w[c]) * A(T(A(x[c]) * rstd)));
  } else {
#pragma omp simd
    for (int64_t c = 0; c < C; c++) y[c] = T((one_plus + A(w[c])) * ((A(x[c]) - centre) * rstd));
  }
  return rstd;
}

/// dx (C), dw (C) += <- dy (C), x (C), w (C); residual (C) or null is added to dx. dx may be dy or residual. y_c = w_c
/// x_c s with s = rstd, and ds/dx_c = -s^3 x_c / C. With g_c = dy_c w_c:
///   dx_c = s g_c - x_c s^3 mean(g x)        dw_c += dy_c x_c s
/// LayerNorm: with x - mean(x) in the place of x, and dx_c - s mean(g) in that of dx_c.
template <class T>
void rmsnorm_row_backward(T* dx, Accumulator<T>* dw, const T* dy, const T* x, Accumulator<T> rstd, const T* w,
                          int64_t C, NormKind kind, const T* residual = nullptr) {
  using A = Accumulator<T>;
  const A one_plus = kind == NormKind::OnePlus ? A(1) : A(0);
  const A centre = row_centre(x, C, kind);
  A gx = 0, g = 0;
#pragma omp simd reduction(+ : gx, g)
  for (int64_t c = 0; c < C; c++) {
    const A gc = A(dy[c]) * (one_plus + A(w[c]));
    gx += gc * (A(x[c]) - centre);
    g += gc;
  }
  const A k = gx * rstd * rstd * rstd / A(C);
  const A shift = kind == NormKind::LayerNorm ? rstd * g / A(C) : A(0);
  const auto run = [&](auto residual_at) {
#pragma omp simd
    for (int64_t c = 0; c < C; c++) {
      const A dyc = A(dy[c]), xc = A(x[c]) - centre;
      dw[c] += dyc * xc * rstd;
      dx[c] = T(residual_at(c) + (rstd * (dyc * (one_plus + A(w[c]))) - xc * k - shift));
    }
  };
  if (residual) return run([&](int64_t c) { return A(residual[c]); });
  run([](int64_t) { return A(0); });
}

/// The sum over rows [0, rows) of a vector of `width`, as `body(begin, end, sum)` adds it up for a range of rows.
/// The ranges depend on the number of rows alone and are added in their order, so that threads change no bit.
template <class A, class Body>
std::vector<A> sum_over_rows(int64_t rows, int64_t width, Body&& body) {
  constexpr int64_t kMinRows = 16, kMaxPieces = 64;
  const int64_t pieces = std::clamp<int64_t>((rows + kMinRows - 1) / kMinRows, 1, kMaxPieces);
  std::vector<A> sums(static_cast<size_t>(pieces * width), A(0));
  parallel_for(pieces, 1, [&](int64_t piece_begin, int64_t piece_end) {
    for (int64_t p = piece_begin; p < piece_end; p++) {
      body(p * rows / pieces, (p + 1) * rows / pieces, sums.data() + p * width);
    }
  });
  for (int64_t p = 1; p < pieces; p++) {
    for (int64_t c = 0; c < width; c++) sums[static_cast<size_t>(c)] += sums[static_cast<size_t>(p * width + c)];
  }
  sums.resize(static_cast<size_t>(width));
  return sums;
}

}  // namespace detail
