// The OpenMP loop. The only place outside the GEMM and attention kernels that starts threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include <omp.h>

/// Threads that a parallel region of this process uses.
inline int num_threads() {
  return omp_get_max_threads();
}

/// Calls `body(begin, end)` over [0, n) in contiguous static pieces, at least `grain` items each.
/// Pieces must be independent; then the result does not depend on the number of threads.
template <class Body>
void parallel_for(int64_t n, int64_t grain, Body&& body) {
  const int64_t pieces =
      std::min<int64_t>(num_threads(), (n + std::max<int64_t>(grain, 1) - 1) / std::max<int64_t>(grain, 1));
  if (pieces <= 1 || omp_in_parallel()) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(static_cast <int>(pieces))
  for (int64_t p = 0; p < pieces; p++) body(p * n / pieces, (p + 1) * n / pieces);
}
