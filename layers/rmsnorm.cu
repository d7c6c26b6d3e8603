// RMSNorm on CUDA. Contract and formulas: rmsnorm.h; the CPU loops that specify it: rmsnorm.cpp.
//
// Work: a row belongs to a team of threads, a warp for short rows and a block for long ones. A thread owns the packs
//   p = lane, lane + team, ... of its row (a pack: 128 bits, or one element where C or a pointer does not allow more)
//   and nobody else reads or writes them; so y may be x, dx may be dy, and only sums are exchanged.
//
// Bytes from DRAM, of the least possible: each kernel passes over a row twice, once for its sum and once for its
//   output; the second pass finds the row in L1 or L2, where w stays too.
//     forward:  reads x, writes y                 2 rows C sizeof(T)                 the minimum
//     backward: reads x, dy, writes dx            3 rows C sizeof(T)                 the minimum
//               dw: partial sums written and read 2 blocks C 4, at most 512 blocks   4% at 16384 rows in bf16
//
// dw without atomics: at most 512 blocks each sum a contiguous range of rows, a thread at a time in its own slots of
//   shared memory; a second kernel adds the blocks' sums in order. The number of blocks depends on the shape alone:
//   the same bits in every run and on every GPU.
#include <algorithm>
#include <type_traits>

#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/rmsnorm.h"

namespace {

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

// A team a row. s = rstd; see rmsnorm.h for the three roundings.
template <class T, int kWidth, int kTeam>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_forward_kernel(T* y, float* rstd, const T* x, const T* w, int64_t rows, int C, float eps, NormKind kind) {
  const int lane = threadIdx.x % kTeam;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (row >= rows) return;  // all lanes of a warp alike
  const T* xr = x + row * C;
  T* yr = y + row * C;
  float sum = 0;
  for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
    const Pack<T, kWidth> xp = load_pack<kWidth>(xr + c);
    for (int k = 0; k < kWidth; k++) sum += to_float(xp.element[k]) * to_float(xp.element[k]);
  }
  const float s = 1.0f / sqrtf(team_sum<kTeam>(sum) / static_cast<float>(C) + eps);
  if (lane == 0) rstd[row] = s;
  const float one_plus = kind == NormKind::OnePlus ? 1.0f : 0.0f;
  for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
    const Pack<T, kWidth> xp = load_pack<kWidth>(xr + c), wp = load_pack<kWidth>(w + c);
    Pack<T, kWidth> yp;
    for (int k = 0; k < kWidth; k++) {
      const float xhat = to_float(xp.element[k]) * s, wk = to_float(wp.element[k]);
      yp.element[k] = kind == NormKind::Plain ? from_float<T>(wk * to_float(from_float<T>(xhat)))
                                              : from_float<T>((one_plus + wk) * xhat);
    }
    store_pack<kWidth>(yr + c, yp);
  }
}

// The slots of a team's sums: element k of the i-th pack of a lane is slot (i kWidth + k) kTeam + lane.
struct SlotLayout {
  int width, team;
  int64_t per_lane;  ///< slots of one lane

  static SlotLayout of(int64_t C, int width, int team) {
    return {width, team, ceil_div(C, int64_t{width} * team) * width};
  }
  int64_t size() const { return per_lane * team; }
};

// Blocks of contiguous rows, a team a row at a time. y_c = w_c x_c s; with g_c = dy_c w_c (1 + w_c for OnePlus):
//   dx_c = s g_c - x_c s^3 mean(g x)         dw_c += sum over rows of dy_c x_c s
// `partial` (blocks, slots): the block's dw. It is summed in shared memory, (slots of a lane, kThreads), where a thread
// touches its own column only; rows too long for that are summed in `partial` itself (a team is a block there).
template <class T, int kWidth, int kTeam, bool kInShared>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    rmsnorm_backward_kernel(T* dx, float* partial, const T* dy, const T* x, const float* rstd, const T* w, int64_t rows,
                            int C, NormKind kind, SlotLayout slots) {
  static_assert(kInShared || kTeam == kThreads);
  constexpr int kTeams = kThreads / kTeam;
  const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  const float one_plus = kind == NormKind::OnePlus ? 1.0f : 0.0f;
  float* partial_of_block = partial + blockIdx.x * slots.per_lane * kTeam;
  float* sums = (kInShared ? dynamic_shared<float>() : partial_of_block) + threadIdx.x;
  for (int64_t i = 0; i < slots.per_lane; i++) sums[i * kThreads] = 0;

  const int64_t end = (int64_t{blockIdx.x} + 1) * rows / gridDim.x;
  for (int64_t row = blockIdx.x * rows / gridDim.x + team; row < end; row += kTeams) {
    const T* xr = x + row * C;
    const T* dyr = dy + row * C;
    T* dxr = dx + row * C;
    const float s = rstd[row];
    float gx = 0;
    for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
      const Pack<T, kWidth> xp = load_pack<kWidth>(xr + c), dyp = load_pack<kWidth>(dyr + c),
                            wp = load_pack<kWidth>(w + c);
      for (int k = 0; k < kWidth; k++) {
        gx += to_float(dyp.element[k]) * (one_plus + to_float(wp.element[k])) * to_float(xp.element[k]);
      }
    }
    const float scale = team_sum<kTeam>(gx) * s * s * s / static_cast<float>(C);
    float* sum = sums;
    for (int c = lane * kWidth; c < C; c += kTeam * kWidth) {
      const Pack<T, kWidth> xp = load_pack<kWidth>(xr + c), dyp = load_pack<kWidth>(dyr + c),
                            wp = load_pack<kWidth>(w + c);
      Pack<T, kWidth> dxp;
      for (int k = 0; k < kWidth; k++, sum += kThreads) {
        const float xk = to_float(xp.element[k]), dyk = to_float(dyp.element[k]);
        *sum += dyk * xk * s;
        dxp.element[k] = from_float<T>(s * (dyk * (one_plus + to_float(wp.element[k]))) - xk * scale);
      }
      store_pack<kWidth>(dxr + c, dxp);
    }
  }

  if constexpr (kInShared) {  // the teams' sums, in order
    __syncthreads();
    const float* all = dynamic_shared<float>();
    for (int64_t q = threadIdx.x; q < slots.per_lane * kTeam; q += kThreads) {
      float total = 0;
      for (int t = 0; t < kTeams; t++) total += all[q / kTeam * kThreads + t * kTeam + q % kTeam];
      partial_of_block[q] = total;
    }
  }
}

constexpr int kSumColumns = 32, kSumRows = 8;

// dw += partial (partials, slots) summed over its rows. A block sums 32 slots: thread (column, r) rows r, r + 8, ...
// in order, a warp reading 128 bytes of a row; then thread (column, 0) adds the 8 sums in order.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    rmsnorm_weight_gradient_kernel(float* dw, const float* partial, int64_t num_partials, int C, SlotLayout slots) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int64_t num_slots = slots.per_lane * slots.team;
  const int64_t q = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;  // a multiple of 32 slots: q < num_slots
  float sum = 0;
  for (int64_t p = threadIdx.y; p < num_partials; p += kSumRows) sum += partial[p * num_slots + q];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const int64_t i = q / slots.team, lane = q % slots.team;
  const int64_t c = (i / slots.width * slots.team + lane) * slots.width + i % slots.width;
  if (threadIdx.y > 0 || c >= C) return;
  sum = 0;
  for (int r = 0; r < kSumRows; r++) sum += sums[r][threadIdx.x];
  dw[c] += sum;
}

/// C, for kernels that count columns in 32 bits; offsets of rows take 64.
int row_length(ConstTensor x) {
  constexpr int64_t kMax = int64_t{1} << 30;
  CHECK(x.shape.last() <= kMax, "rmsnorm: rows of {} elements, the CUDA kernels allow {}", x.shape.last(), kMax);
  return static_cast<int>(x.shape.last());
}

template <class T, int kWidth>
void forward(Device& device, Tensor y, Tensor rstd, ConstTensor x, ConstTensor w, double eps, NormKind kind) {
  const int64_t rows = x.shape.rows();
  const int C = row_length(x);
  const auto run = [&]<int kTeam>(std::integral_constant<int, kTeam>) {
    launch(device, {ceil_div(rows, kThreads / kTeam), kThreads}, rmsnorm_forward_kernel<T, kWidth, kTeam>, y.as<T>(),
           rstd.as<float>(), x.as<T>(), w.as<T>(), rows, C, static_cast<float>(eps), kind);
  };
  if (C <= kMaxWarpRow) return run(std::integral_constant<int, kWarpSize>());
  run(std::integral_constant<int, kThreads>());
}

template <class T, int kWidth>
void backward(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd, ConstTensor w,
              NormKind kind) {
  const int64_t rows = x.shape.rows();
  const int C = row_length(x);
  if (rows == 0 || C == 0) return;
  const auto run = [&]<int kTeam, bool kInShared>(std::integral_constant<int, kTeam>, std::bool_constant<kInShared>) {
    const SlotLayout slots = SlotLayout::of(C, kWidth, kTeam);
    const size_t size_bytes = static_cast<size_t>(slots.size()) * sizeof(float);
    const int64_t fitting = std::max<int64_t>(1, static_cast<int64_t>(Device::kWorkspaceBytes / size_bytes));
    const int64_t blocks = std::min({kMaxPartials, ceil_div(rows, kThreads / kTeam), fitting});
    float* partial = static_cast<float*>(device.workspace(static_cast<size_t>(blocks) * size_bytes));
    const size_t shared = kInShared ? static_cast<size_t>(slots.per_lane) * kThreads * sizeof(float) : 0;
    launch(device, {blocks, kThreads, shared}, rmsnorm_backward_kernel<T, kWidth, kTeam, kInShared>, dx.as<T>(),
           partial, dy.as<T>(), x.as<T>(), rstd.as<float>(), w.as<T>(), rows, C, kind, slots);
    launch(device, {slots.size() / kSumColumns, dim3(kSumColumns, kSumRows)}, rmsnorm_weight_gradient_kernel,
           dw.as<float>(), partial, blocks, C, slots);
  };
  if (C <= kMaxWarpRow) return run(std::integral_constant<int, kWarpSize>(), std::true_type());
  const std::integral_constant<int, kThreads> block;
  if (SlotLayout::of(C, kWidth, kThreads).size() * sizeof(float) <= kMaxShared) return run(block, std::true_type());
  run(block, std::false_type());
}

}  // namespace

void rmsnorm_forward_cuda(Device& device, Tensor y, Tensor rstd, ConstTensor x, ConstTensor w, double eps,
                          NormKind kind) {
  dispatch_cuda(x.dtype, "rmsnorm", [&]<class T>(T) {
    const bool packed = is_packable<T>(x.shape.last(), {y.data, x.data, w.data});
    packed ? forward<T, kPackWidth<T>>(device, y, rstd, x, w, eps, kind)
           : forward<T, 1>(device, y, rstd, x, w, eps, kind);
  });
}

void rmsnorm_backward_cuda(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd,
                           ConstTensor w, NormKind kind) {
  dispatch_cuda(x.dtype, "rmsnorm", [&]<class T>(T) {
    const bool packed = is_packable<T>(x.shape.last(), {dx.data, dy.data, x.data, w.data});
    packed ? backward<T, kPackWidth<T>>(device, dx, dw, dy, x, rstd, w, kind)
           : backward<T, 1>(device, dx, dw, dy, x, rstd, w, kind);
  });
}
