// The register tile that all matrix products are made of, and the packing that feeds it. Written with the compiler's
// vector extensions: the vector is as wide as -march allows, and every element is summed in the order of `depth`,
// whatever its place in the tile, so that bits do not depend on how a matrix is cut into tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

/// The widest vector of T; loads and stores through it need no alignment.
template <class T>
struct VecOf {
  typedef T type __attribute__((vector_size(__BIGGEST_ALIGNMENT__), aligned(alignof(T)), may_alias));
};
template <class T>
using Vec = typename VecOf<T>::type;
template <class T>
inline constexpr int kLanes = __BIGGEST_ALIGNMENT__ / sizeof(T);

// 6 x 2 sums, 2 vectors of B and one broadcast of A fill the 16 registers of AVX2, and 12 independent sums cover
// the latency of two fused multiply-adds a cycle.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVecs = 2;
template <class T>
inline constexpr int kTileCols = kTileVecs* kLanes<T>;

template <class T>
inline Vec<T> load(const T* p) {
  return *reinterpret_cast<const Vec<T>*>(p);
}
template <class T>
inline void store(T* p, Vec<T> v) {
  *reinterpret_cast<Vec<T>*>(p) = v;
}

template <class T, int kRows = kTileRows, int kVecs = kTileVecs>
struct Tile {
  Vec<T> sum[kRows][kVecs] = {};

  /// sum[i][j] += sum over k < depth of a[i * kRowStride + k * kDepthStride] * b[k * kTileCols + j]
  template <int kRowStride, int kDepthStride>
  [[gnu::always_inline]] void multiply(int64_t depth, const T* a, const T* b) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < depth; k++) {
      Vec<T> row[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; v++) row[v] = load(b + k * kTileCols<T> + v * kLanes<T>);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
        const T scalar = a[r * kRowStride + k * kDepthStride];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; v++) sum[r][v] += scalar * row[v];
      }
    }
  }

  /// c[i * ld + j] = sum + (addend ? addend[i * addend_ld + j] : 0) for i < rows and j < cols.
  [[gnu::always_inline]] void store_to(T* c, int64_t ld, int64_t rows, int64_t cols, const T* addend,
                                       int64_t addend_ld) const {
    constexpr int kCols = kVecs * kLanes<T>;
    if (rows >= kRows && cols >= kCols) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; v++) {
          const int64_t at = v * kLanes<T>;
          store(c + r * ld + at, addend ? sum[r][v] + load(addend + r * addend_ld + at) : sum[r][v]);
        }
      }
      return;
    }
    T out[kRows][kCols];
    std::memcpy(out, sum, sizeof out);
    for (int64_t r = 0; r < std::min<int64_t>(rows, kRows); r++) {
      for (int64_t j = 0; j < std::min<int64_t>(cols, kCols); j++) {
        c[r * ld + j] = addend ? out[r][j] + addend[r * addend_ld + j] : out[r][j];
      }
    }
  }
};

namespace detail {

typedef float Float4 __attribute__((vector_size(16), aligned(4), may_alias));

// to[k * ld + r] = rows[r][k] for r < 4, k < 4.
inline void transpose_4x4(const float* r0, const float* r1, const float* r2, const float* r3, float* to, int64_t ld) {
  const Float4 a = *reinterpret_cast<const Float4*>(r0), b = *reinterpret_cast<const Float4*>(r1);
  const Float4 c = *reinterpret_cast<const Float4*>(r2), d = *reinterpret_cast<const Float4*>(r3);
  const Float4 ab_lo = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_hi = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Float4 cd_lo = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_hi = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  *reinterpret_cast<Float4*>(to) = __builtin_shufflevector(ab_lo, cd_lo, 0, 1, 4, 5);
  *reinterpret_cast<Float4*>(to + ld) = __builtin_shufflevector(ab_lo, cd_lo, 2, 3, 6, 7);
  *reinterpret_cast<Float4*>(to + 2 * ld) = __builtin_shufflevector(ab_hi, cd_hi, 0, 1, 4, 5);
  *reinterpret_cast<Float4*>(to + 3 * ld) = __builtin_shufflevector(ab_hi, cd_hi, 2, 3, 6, 7);
}

// to[k * ld + r] = rows[r][k] for r < 2, k < 4.
inline void transpose_2x4(const float* r0, const float* r1, float* to, int64_t ld) {
  const Float4 a = *reinterpret_cast<const Float4*>(r0), b = *reinterpret_cast<const Float4*>(r1);
  const Float4 lo = __builtin_shufflevector(a, b, 0, 4, 1, 5), hi = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  std::memcpy(to, &lo, 8);
  std::memcpy(to + ld, reinterpret_cast<const char*>(&lo) + 8, 8);
  std::memcpy(to + 2 * ld, &hi, 8);
  std::memcpy(to + 3 * ld, reinterpret_cast<const char*>(&hi) + 8, 8);
}

}  // namespace detail

/// Asks for the next `count` elements at p.
template <class T>
inline void prefetch_row(const T* p, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(p + i, 0, 3);
}

/// to[k * kWidth + r] = row(r)[k] for k < depth and r < count; zero for count <= r < kWidth.
template <int kWidth, class T, class Row>
inline void pack_transposed(T* to, int64_t depth, int count, Row&& row) {
  int r = 0;
  if constexpr (std::is_same_v<T, float>) {
    for (; r + 4 <= count; r += 4) {
      const float *r0 = row(r), *r1 = row(r + 1), *r2 = row(r + 2), *r3 = row(r + 3);
      int64_t k = 0;
      for (; k + 4 <= depth; k += 4) {
        detail::transpose_4x4(r0 + k, r1 + k, r2 + k, r3 + k, to + k * kWidth + r, kWidth);
      }
      for (; k < depth; k++) {
        float* out = to + k * kWidth + r;
        out[0] = r0[k], out[1] = r1[k], out[2] = r2[k], out[3] = r3[k];
      }
    }
    for (; r + 2 <= count; r += 2) {
      const float *r0 = row(r), *r1 = row(r + 1);
      int64_t k = 0;
      for (; k + 4 <= depth; k += 4) detail::transpose_2x4(r0 + k, r1 + k, to + k * kWidth + r, kWidth);
      for (; k < depth; k++) to[k * kWidth + r] = r0[k], to[k * kWidth + r + 1] = r1[k];
    }
  }
  for (; r < count; r++) {
    const T* from = row(r);
    for (int64_t k = 0; k < depth; k++) to[k * kWidth + r] = from[k];
  }
  for (; r < kWidth; r++) {
    for (int64_t k = 0; k < depth; k++) to[k * kWidth + r] = T(0);
  }
}

/// Cuts a matrix of `depth` rows and `width` columns into strips of kWidth columns, the last one filled with zeros:
/// strip s at to + s * kWidth * strip_depth holds (k, c) at [k * kWidth + c]. row(k) points to row k.
template <int kWidth, class T, class Row>
inline void pack_rows(T* to, int64_t strip_depth, int64_t depth, int64_t width, Row&& row) {
  constexpr int64_t kRowsAtOnce = 8;  // read along the rows, but write whole cache lines of each strip
  for (int64_t k0 = 0; k0 < depth; k0 += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, depth - k0);
    const T* from[kRowsAtOnce];
    for (int64_t k = 0; k < count; k++) from[k] = row(k0 + k);
    for (int64_t k = k0 + kRowsAtOnce; k < std::min(depth, k0 + 2 * kRowsAtOnce); k++) prefetch_row(row(k), width);
    for (int64_t c = 0; c < width; c += kWidth) {
      T* strip = to + c * strip_depth + k0 * kWidth;
      if (c + kWidth <= width) {
        for (int64_t k = 0; k < count; k++) std::memcpy(strip + k * kWidth, from[k] + c, kWidth * sizeof(T));
      } else {
        for (int64_t k = 0; k < count; k++) {
          for (int64_t q = 0; q < kWidth; q++) strip[k * kWidth + q] = c + q < width ? from[k][c + q] : T(0);
        }
      }
    }
  }
}
