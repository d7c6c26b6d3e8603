// Front doors and CPU side of the experts' linear layers. Contract: grouped_linear.h.
#include "layers/grouped_linear.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "layers/core/gemm.h"
#include "layers/core/parallel.h"

namespace {

struct Sizes {
  int64_t rows, E, N, K;
};

Sizes check_common(const char* who, const ConstTensor& y, const ConstTensor& x, const ConstTensor& w,
                   const ConstTensor& offsets, WeightLayout layout) {
  CHECK(x.shape.rank() == 2 && w.shape.rank() == 3, "{}: x ('{}') {} and w ('{}') {} must be (R, K) and (E, N, K)", who,
        x.name, x.shape.str(), w.name, w.shape.str());
  const bool is_out_in = layout == WeightLayout::OutIn;
  const Sizes s = {x.shape[0], w.shape[0], w.shape[is_out_in ? 1 : 2], x.shape[1]};
  check_tensor(w, fmt::format("{}: w", who).c_str(), {s.E, is_out_in ? s.N : s.K, is_out_in ? s.K : s.N}, x.dtype);
  check_tensor(y, fmt::format("{}: y", who).c_str(), {s.rows, s.N}, x.dtype);
  check_tensor(offsets, fmt::format("{}: offsets", who).c_str(), {s.E + 1}, DType::I32);
  return s;
}

/// Calls `op(e, begin, end)` for every expert that has rows. Many small products go to one thread each, the largest
/// first; few large ones are split themselves. The bits of a product do not depend on that.
template <class Op>
void for_each_group(const int32_t* offsets, int64_t E, Op&& op) {
  std::vector<int64_t> order(static_cast<size_t>(E));
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto rows = [&](int64_t e) { return offsets[e + 1] - offsets[e]; };
  std::erase_if(order, [&](int64_t e) { return rows(e) == 0; });
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rows(a) > rows(b); });
  constexpr int64_t kGroupsAThread = 4;
  const auto n = static_cast<int64_t>(order.size());
  if (n < kGroupsAThread * num_threads()) {
    for (const int64_t e : order) op(e, offsets[e], offsets[e + 1]);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < n; i++) {
    const int64_t e = order[static_cast<size_t>(i)];
    op(e, offsets[e], offsets[e + 1]);
  }
}

}  // namespace

void grouped_linear_forward(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, ConstTensor offsets,
                            WeightLayout layout) {
  const auto [rows, E, N, K] = check_common("grouped_linear_forward", y, x, w, offsets, layout);
  if (b) check_tensor(b, "grouped_linear_forward: b", {E, N}, x.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return grouped_linear_forward_cuda(device, y, x, w, b, offsets, layout);
  }
  dispatch_float(x.dtype, "grouped_linear_forward", [&]<class T>(T) {
    T* const yp = y.as<T>();
    const T *const xp = x.as<T>(), *const wp = w.as<T>(), *const bp = b ? b.as<T>() : nullptr;
    const bool is_out_in = layout == WeightLayout::OutIn;
    for_each_group(offsets.as<int32_t>(), E, [&](int64_t e, int64_t begin, int64_t end) {
      gemm<T>(yp + begin * N, end - begin, N, K, {xp + begin * K, K}, {wp + e * N * K, is_out_in ? K : N, is_out_in},
              bp ? bp + e * N : nullptr);
    });
  });
}

void grouped_linear_backward(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x,
                             ConstTensor w, ConstTensor offsets, WeightLayout layout) {
  const auto [rows, E, N, K] = check_common("grouped_linear_backward", dy, x, w, offsets, layout);
  check_tensor(dx, "grouped_linear_backward: dx", x.shape, x.dtype);
  check_tensor(dw, "grouped_linear_backward: dw", w.shape, accumulator_dtype(x.dtype));
  if (db) check_tensor(db, "grouped_linear_backward: db", {E, N}, accumulator_dtype(x.dtype));
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return grouped_linear_backward_cuda(device, dx, dw, db, dy, x, w, offsets, layout);
  }
  dispatch_float(x.dtype, "grouped_linear_backward", [&]<class T>(T) {
    const T *const dyp = dy.as<T>(), *const xp = x.as<T>(), *const wp = w.as<T>();
    T *const dxp = dx.as<T>(), *const dwp = dw.as<T>(), *const dbp = db ? db.as<T>() : nullptr;
    const bool is_out_in = layout == WeightLayout::OutIn;
    for_each_group(offsets.as<int32_t>(), E, [&](int64_t e, int64_t begin, int64_t end) {
      const int64_t n = end - begin;
      const T *const dye = dyp + begin * N, *const xe = xp + begin * K;
      T* const dwe = dwp + e * N * K;
      gemm<T>(dxp + begin * K, n, K, N, {dye, N}, {wp + e * N * K, is_out_in ? K : N, !is_out_in});
      if (is_out_in) {
        gemm<T>(dwe, N, K, n, {dye, N, true}, {xe, K}, dwe, K);
      } else {
        gemm<T>(dwe, K, N, n, {xe, K, true}, {dye, N}, dwe, N);
      }
      for (int64_t r = 0; dbp && r < n; r++) {
        for (int64_t c = 0; c < N; c++) dbp[e * N + c] += dye[r * N + c];
      }
    });
  });
}
