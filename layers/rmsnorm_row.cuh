// One normalised row in a kernel, forward and backward, and the sums over rows that become a weight gradient: shared by
// rmsnorm.cu (rows of a tensor) and qk_norm.cu (heads inside a fused qkv). Formulas: rmsnorm.h.
//
// Work: a row belongs to a team of threads, a warp for short rows and a block for long ones. A thread owns the packs
//   p = lane, lane + team, ... of its row (a pack: 128 bits, or one element where C or a pointer does not allow more)
//   and nobody else reads or writes them; so y may be x, dx may be dy, and only sums are exchanged. (But where a row
//   is rotated, the packs of a pair are read by the owners of both.) A row is read twice, once for its sum and once for
//   its output; the second pass finds it in L1 or L2, where w stays too. LayerNorm's forward has a pass more, for the
//   variance; its backward sums about the first element of the row, so that one pass finds the mean too.
//
// LayerNorm is a template parameter, kCentres. As a branch on NormKind it costs RMSNorm registers: the forward of fp32
//   packs takes 36 to 40 for 32 on sm_90, which leaves 51 warps of 64, and one kernel spills.
//
// Weight gradients without atomics: at most 512 blocks each sum a contiguous range of rows, a thread at a time in its
//   own slots of shared memory; a second kernel adds the blocks' sums in order. The number of blocks depends on the
//   shape alone: the same bits in every run and on every GPU.
#pragma once

#include <algorithm>
#include <type_traits>

#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/rmsnorm.h"

namespace rmsnorm {

constexpr int kThreads = 256;            // of a block
constexpr int kMinBlocks = 4;            // of an SM at a time, in the backward: bounds its registers to 64
constexpr int kMaxWarpRow = 1024;        // longer rows get a block each
constexpr int64_t kMaxPartials = 512;    // blocks of the backward: one wave of 4 a multiprocessor on an H100
constexpr size_t kMaxShared = 96 << 10;  // every GPU from sm_80 on has 99 KiB for a block

template <int kTeam>
__device__ __forceinline__ float team_sum(float value) {
  if constexpr (kTeam == kWarpSize) {
    return warp_sum(value);
  } else {
    return block_sum<kTeam>(value);
  }
}

/// What nothing rotates: the elements of a pack as they are. qk_norm.cu has the other one.
struct Unrotated {
  /// to <- the elements of the pack at column c of the rotated row; `elements_at(to, c)` has those of the row.
  template <int kWidth, class ElementsAt>
  __device__ __forceinline__ void operator()(float (&to)[kWidth], int c, float, const ElementsAt& elements_at) const {
    elements_at(to, c);
  }
};

/// y (C) <- x (C), w (C); returns rstd. All threads of the team call it. See rmsnorm.h for the three roundings.
/// kAdds: sum_row (C) = x + added is normed in the place of x. kCentres: `kind` is LayerNorm. `rotate` turns what was
/// normed and rounded; y is not x then.
template <class T, int kWidth, int kTeam, bool kAdds = false, bool kCentres = false, class Rotate = Unrotated>
__device__ __forceinline__ float row_forward(T* y, const T* x, const T* w, int C, float eps, NormKind kind, int lane,
                                             const T* added = nullptr, T* sum_row = nullptr,
                                             const Rotate& rotate = {}) {
  float sum = 0;
  for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
    Pack<T, kWidth> xp = load_pack<kWidth>(x + c);
    if constexpr (kAdds) {
      const Pack<T, kWidth> ap = load_pack<kWidth>(added + c);
      for (int k = 0; k < kWidth; k++) xp.element[k] = from_float<T>(to_float(xp.element[k]) + to_float(ap.element[k]));
      store_pack<kWidth>(sum_row + c, xp);
    }
    for (int k = 0; k < kWidth; k++) sum += to_float(xp.element[k]) * (kCentres ? 1.0f : to_float(xp.element[k]));
  }
  if constexpr (kAdds) x = sum_row;
  float centre = 0;
  if constexpr (kCentres) {
    centre = team_sum<kTeam>(sum) / static_cast<float>(C);
    sum = 0;
    for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
      const Pack<T, kWidth> xp = load_pack<kWidth>(x + c);
      for (int k = 0; k < kWidth; k++) {
        const float xk = to_float(xp.element[k]) - centre;
        sum += xk * xk;
      }
    }
  }
  const float s = 1.0f / sqrtf(team_sum<kTeam>(sum) / static_cast<float>(C) + eps);
  const float one_plus = kind == NormKind::OnePlus ? 1.0f : 0.0f;
  const auto normed_at = [=](float(&to)[kWidth], int c) {
    const Pack<T, kWidth> xp = load_pack<kWidth>(x + c), wp = load_pack<kWidth>(w + c);
    for (int k = 0; k < kWidth; k++) {
      const float xhat = (kCentres ? to_float(xp.element[k]) - centre : to_float(xp.element[k])) * s;
      const float wk = to_float(wp.element[k]);
      to[k] = to_float(kind == NormKind::Plain ? from_float<T>(wk * to_float(from_float<T>(xhat)))
                                               : from_float<T>((one_plus + wk) * xhat));
    }
  };
  for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
    float yk[kWidth];
    rotate(yk, c, 1.0f, normed_at);
    store_floats(y + c, yk);
  }
  return s;
}

/// The slots of a team's sums: element k of the i-th pack of a lane is slot (i kWidth + k) kTeam + lane.
struct SlotLayout {
  int width, team;
  int64_t per_lane;  ///< slots of one lane

  static SlotLayout of(int64_t C, int width, int team) {
    return {width, team, ceil_div(C, int64_t{width} * team) * width};
  }
  int64_t size() const { return per_lane * team; }
};

/// dx (C), sums += <- dy (C), x (C), s = rstd, w (C). All threads of the team call it. y_c = w_c x_c s; with
/// g_c = dy_c w_c (1 + w_c for OnePlus):
///   dx_c = s g_c - x_c s^3 mean(g x)         dw_c += dy_c x_c s
/// kCentres (LayerNorm): with x - mean(x) in the place of x, and dx_c - s mean(g) in that of dx_c.
/// `sums`: the slots of this thread, kThreads apart. `residual` (C) or null is added to dx. `rotate` turns dy back; dx
/// is not dy then.
template <class T, int kWidth, int kTeam, bool kCentres = false, class Rotate = Unrotated>
__device__ __forceinline__ void row_backward(T* dx, float* sums, const T* dy, const T* x, float s, const T* w, int C,
                                             NormKind kind, int lane, const T* residual = nullptr,
                                             const Rotate& rotate = {}) {
  const float one_plus = kind == NormKind::OnePlus ? 1.0f : 0.0f;
  const auto dy_at = [=](float(&to)[kWidth], int c) { load_floats(to, dy + c); };
  // Of x - x_0: far from zero, the sums of g x and of mean(x) g would cancel.
  const float origin = kCentres ? to_float(x[0]) : 0.0f;
  float gx = 0, g = 0, from_origin = 0;
#pragma unroll 1  // three packs in flight are enough at 32 warps of an SM; more would spill registers
  for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
    float dyk[kWidth];
    rotate(dyk, c, -1.0f, dy_at);
    const Pack<T, kWidth> xp = load_pack<kWidth>(x + c), wp = load_pack<kWidth>(w + c);
    for (int k = 0; k < kWidth; k++) {
      if constexpr (kCentres) {
        const float gk = dyk[k] * to_float(wp.element[k]), xk = to_float(xp.element[k]) - origin;
        gx += gk * xk, g += gk, from_origin += xk;
      } else {
        gx += dyk[k] * (one_plus + to_float(wp.element[k])) * to_float(xp.element[k]);
      }
    }
  }
  gx = team_sum<kTeam>(gx);
  float centre = 0, shift = 0;
  if constexpr (kCentres) {
    const float mean = team_sum<kTeam>(from_origin) / static_cast<float>(C);
    g = team_sum<kTeam>(g);
    gx -= mean * g;
    centre = origin + mean, shift = s * g / static_cast<float>(C);
  }
  const float scale = gx * s * s * s / static_cast<float>(C);
#pragma unroll 1
  for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
    float dyk[kWidth];
    rotate(dyk, c, -1.0f, dy_at);
    const Pack<T, kWidth> xp = load_pack<kWidth>(x + c), wp = load_pack<kWidth>(w + c);
    Pack<T, kWidth> dxp, rp;
    if (residual) rp = load_pack<kWidth>(residual + c);
    for (int k = 0; k < kWidth; k++, sums += kThreads) {
      const float xk = kCentres ? to_float(xp.element[k]) - centre : to_float(xp.element[k]);
      *sums += dyk[k] * xk * s;
      float gradient = s * (dyk[k] * (one_plus + to_float(wp.element[k]))) - xk * scale;
      if constexpr (kCentres) gradient -= shift;
      dxp.element[k] = from_float<T>(residual ? to_float(rp.element[k]) + gradient : gradient);
    }
    store_pack<kWidth>(dx + c, dxp);
  }
}

/// partial (slots of a team) <- the sums of the teams of this block, which lie in shared memory, (slots of a lane,
/// kThreads): added in the order of the teams.
template <int kTeam>
__device__ __forceinline__ void add_teams(float* partial, const float* sums, int64_t slots_per_lane) {
  __syncthreads();
  for (int64_t q = threadIdx.x; q < slots_per_lane * kTeam; q += kThreads) {
    float total = 0;
    for (int t = 0; t < kThreads / kTeam; t++) total += sums[q / kTeam * kThreads + t * kTeam + q % kTeam];
    partial[q] = total;
  }
}

/// The blocks that sum `rows` rows (or tokens), `teams` at a time in a block; every block needs `partial_bytes` of the
/// workspace.
inline int64_t backward_blocks(int64_t rows, int64_t teams, size_t partial_bytes) {
  const int64_t fitting = std::max<int64_t>(1, static_cast<int64_t>(Device::kWorkspaceBytes / partial_bytes));
  return std::min({kMaxPartials, ceil_div(rows, teams), fitting});
}

/// Calls `op` with the size of a team for rows of C elements, and whether the sums of the backward fit in shared
/// memory, as constants. `block_slots`: the slots of a team that is a block.
template <class Op>
void with_team(int64_t C, int64_t block_slots, Op&& op) {
  if (C <= kMaxWarpRow) return op(std::integral_constant<int, kWarpSize>(), std::true_type());
  const std::integral_constant<int, kThreads> block;
  if (static_cast<size_t>(block_slots) * sizeof(float) <= kMaxShared) return op(block, std::true_type());
  op(block, std::false_type());
}

/// A row's length, for kernels that count columns in 32 bits; offsets of rows take 64.
inline int row_length(int64_t C) {
  constexpr int64_t kMax = int64_t{1} << 30;
  CHECK(C <= kMax, "rmsnorm: rows of {} elements, the CUDA kernels allow {}", C, kMax);
  return static_cast<int>(C);
}

/// dw (C) += the sum over blocks of their slots: those of block b begin at partial + b pitch. Defined in rmsnorm.cu.
void add_partials(Device& device, float* dw, const float* partial, int64_t num_partials, int64_t pitch, int C,
                  const SlotLayout& slots);

}  // namespace rmsnorm
