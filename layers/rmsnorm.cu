// RMSNorm on CUDA. Contract and formulas: rmsnorm.h; the CPU loops that specify it: rmsnorm.cpp; what a team of threads
// does with a row: rmsnorm_row.cuh.
//
// Bytes from DRAM, of the least possible (a row is read twice, by LayerNorm's forward three times, from the second time
// on from L1 or L2):
//     forward:  reads x, writes y                 2 rows C sizeof(T)                 the minimum
//     ... after an add: reads a, b, writes sum, y 4 rows C sizeof(T)                 the minimum; 5 in two steps
//     backward: reads x, dy, writes dx            3 rows C sizeof(T)                 the minimum
//     ... and a residual: reads it too            4 rows C sizeof(T)                 the minimum; 6 in two steps
//               dw: partial sums written and read 2 blocks C 4, at most 512 blocks   4% at 16384 rows in bf16
#include "layers/rmsnorm_row.cuh"

namespace {

using namespace rmsnorm;

// A team a row. kAdds: sum = x + added is normed in the place of x. kCentres: LayerNorm.
template <class T, int kWidth, int kTeam, bool kAdds, bool kCentres>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_forward_kernel(T* y, float* rstd, T* sum, const T* x, const T* added, const T* w, int64_t rows, int C,
                           float eps, NormKind kind) {
  const int lane = threadIdx.x % kTeam;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kTeam) + threadIdx.x / kTeam;
  if (row >= rows) return;  // all lanes of a warp alike
  const int64_t at = row * C, added_at = kAdds ? at : 0;
  const float s = row_forward<T, kWidth, kTeam, kAdds, kCentres>(y + at, x + at, w, C, eps, kind, lane,
                                                                 added + added_at, sum + added_at);
  if (lane == 0) rstd[row] = s;
}

// Blocks of contiguous rows, a team a row at a time.
// `partial` (blocks, slots): the block's dw. It is summed in shared memory, (slots of a lane, kThreads), where a thread
// touches its own column only; rows too long for that are summed in `partial` itself (a team is a block there).
template <class T, int kWidth, int kTeam, bool kInShared, bool kCentres>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    rmsnorm_backward_kernel(T* dx, float* partial, const T* dy, const T* x, const float* rstd, const T* w, int64_t rows,
                            int C, NormKind kind, const T* residual, int64_t slots_per_lane) {
  static_assert(kInShared || kTeam == kThreads);
  constexpr int kTeams = kThreads / kTeam;
  const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  float* partial_of_block = partial + blockIdx.x * slots_per_lane * kTeam;
  float* sums = (kInShared ? dynamic_shared<float>() : partial_of_block) + threadIdx.x;
  for (int64_t i = 0; i < slots_per_lane; i++) sums[i * kThreads] = 0;

  const int64_t end = (int64_t{blockIdx.x} + 1) * rows / gridDim.x;
  for (int64_t row = blockIdx.x * rows / gridDim.x + team; row < end; row += kTeams) {
    row_backward<T, kWidth, kTeam, kCentres>(dx + row * C, sums, dy + row * C, x + row * C, rstd[row], w, C, kind, lane,
                                             residual ? residual + row * C : nullptr);
  }
  if constexpr (kInShared) add_teams<kTeam>(partial_of_block, dynamic_shared<float>(), slots_per_lane);
}

constexpr int kSumColumns = 32, kSumRows = 8;

// dw += partial (partials, pitch) summed over its rows. A block sums 32 slots: thread (column, r) rows r, r + 8, ...
// in order, a warp reading 128 bytes of a row; then thread (column, 0) adds the 8 sums in order.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    rmsnorm_weight_gradient_kernel(float* dw, const float* partial, int64_t num_partials, int64_t pitch, int C,
                                   SlotLayout slots) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int64_t q = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;  // there is a multiple of 32 slots
  float sum = 0;
  for (int64_t p = threadIdx.y; p < num_partials; p += kSumRows) sum += partial[p * pitch + q];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const int64_t i = q / slots.team, lane = q % slots.team;
  const int64_t c = (i / slots.width * slots.team + lane) * slots.width + i % slots.width;
  if (threadIdx.y > 0 || c >= C) return;
  sum = 0;
  for (int r = 0; r < kSumRows; r++) sum += sums[r][threadIdx.x];
  dw[c] += sum;
}

template <class T, int kWidth>
void forward(Device& device, Tensor y, Tensor rstd, Tensor sum, ConstTensor x, ConstTensor added, ConstTensor w,
             double eps, NormKind kind) {
  const int64_t rows = x.shape.rows();
  const int C = row_length(x.shape.last());
  const auto run = [&]<int kTeam, bool kAdds>(std::integral_constant<int, kTeam>, std::bool_constant<kAdds>) {
    launch(device, {ceil_div(rows, kThreads / kTeam), kThreads},
           kind == NormKind::LayerNorm ? rmsnorm_forward_kernel<T, kWidth, kTeam, kAdds, true>
                                       : rmsnorm_forward_kernel<T, kWidth, kTeam, kAdds, false>,
           y.as<T>(), rstd.as<float>(), kAdds ? sum.as<T>() : nullptr, x.as<T>(), kAdds ? added.as<T>() : nullptr,
           w.as<T>(), rows, C, static_cast<float>(eps), kind);
  };
  const auto with_adds = [&](auto team) { added ? run(team, std::true_type()) : run(team, std::false_type()); };
  if (C <= kMaxWarpRow) return with_adds(std::integral_constant<int, kWarpSize>());
  with_adds(std::integral_constant<int, kThreads>());
}

template <class T, int kWidth>
void backward(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd, ConstTensor w,
              NormKind kind, ConstTensor residual) {
  const int64_t rows = x.shape.rows();
  const int C = row_length(x.shape.last());
  if (rows == 0 || C == 0) return;
  const auto run = [&]<int kTeam, bool kInShared>(std::integral_constant<int, kTeam>, std::bool_constant<kInShared>) {
    const SlotLayout slots = SlotLayout::of(C, kWidth, kTeam);
    const size_t partial_bytes = static_cast<size_t>(slots.size()) * sizeof(float);
    const int64_t blocks = backward_blocks(rows, kThreads / kTeam, partial_bytes);
    float* partial = static_cast<float*>(device.workspace(static_cast<size_t>(blocks) * partial_bytes));
    const size_t shared = kInShared ? static_cast<size_t>(slots.per_lane) * kThreads * sizeof(float) : 0;
    launch(device, {blocks, kThreads, shared},
           kind == NormKind::LayerNorm ? rmsnorm_backward_kernel<T, kWidth, kTeam, kInShared, true>
                                       : rmsnorm_backward_kernel<T, kWidth, kTeam, kInShared, false>,
           dx.as<T>(), partial, dy.as<T>(), x.as<T>(), rstd.as<float>(), w.as<T>(), rows, C, kind,
           residual ? residual.as<T>() : nullptr, slots.per_lane);
    add_partials(device, dw.as<float>(), partial, blocks, slots.size(), C, slots);
  };
  with_team(C, SlotLayout::of(C, kWidth, kThreads).size(), run);
}

}  // namespace

void rmsnorm::add_partials(Device& device, float* dw, const float* partial, int64_t num_partials, int64_t pitch, int C,
                           const SlotLayout& slots) {
  launch(device, {slots.size() / kSumColumns, dim3(kSumColumns, kSumRows)}, rmsnorm_weight_gradient_kernel, dw, partial,
         num_partials, pitch, C, slots);
}

void rmsnorm_forward_cuda(Device& device, Tensor y, Tensor rstd, Tensor sum, ConstTensor x, ConstTensor added,
                          ConstTensor w, double eps, NormKind kind) {
  dispatch_cuda(x.dtype, "rmsnorm", [&]<class T>(T) {
    const bool packed = is_packable<T>(x.shape.last(), {y.data, sum.data, x.data, added.data, w.data});
    packed ? forward<T, kPackWidth<T>>(device, y, rstd, sum, x, added, w, eps, kind)
           : forward<T, 1>(device, y, rstd, sum, x, added, w, eps, kind);
  });
}

void rmsnorm_backward_cuda(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd,
                           ConstTensor w, NormKind kind, ConstTensor residual) {
  dispatch_cuda(x.dtype, "rmsnorm", [&]<class T>(T) {
    const bool packed = is_packable<T>(x.shape.last(), {dx.data, dy.data, x.data, w.data, residual.data});
    packed ? backward<T, kPackWidth<T>>(device, dx, dw, dy, x, rstd, w, kind, residual)
           : backward<T, 1>(device, dx, dw, dy, x, rstd, w, kind, residual);
  });
}
