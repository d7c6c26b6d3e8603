// Sums over the rows of a matrix on CUDA. Contract: column_sums.h.
//
// Without atomics: a block sums some columns over a range of the rows of a group, a warp every eighth row, and adds its
//   warps' sums in order; a second kernel adds the ranges' sums in order. The number of ranges depends on the shape
//   alone: the same bits in every run and on every GPU.
//
// Bytes from DRAM: reads the rows, rows N sizeof(T): the minimum (rows of x that several groups have are read once for
//   each, or come from L2); and the ranges' sums, written and read, 8 / (64 sizeof(T)) of that at most: 6% in bf16.
#include "layers/column_sums.h"

#include <algorithm>

#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int64_t kMinRows = 64;      // of a range, where groups are of one size
constexpr int64_t kMinBlocks = 1024;  // ranges are cut until there are so many blocks: 8 an SM of an H100
constexpr int64_t kMaxRanges = 256;

// sums (ranges, groups, N) = sums over a range of rows each, or += with kAdds (one range). Block (range, group, chunk):
// chunk is kWarpSize kWidth columns, a pack a lane; warp w sums rows w, w + 8, ... of the range.
template <class T, int kWidth, bool kIsRouted, bool kAdds>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(float* sums, const T* x, RowGroups groups, int64_t rows, int64_t N, int64_t ranges,
                       int64_t num_groups, int64_t chunks) {
  __shared__ float of_warp[kWarps][kWarpSize * kWidth];
  const int lane = lane_index(), warp = warp_index();
  const int64_t line = blockIdx.x / chunks, first = blockIdx.x % chunks * (kWarpSize * kWidth);
  const int64_t range = line / num_groups, group = line % num_groups;
  const int64_t n = first + lane * kWidth;
  const int64_t begin = groups.offsets ? groups.offsets[group] : 0;
  const int64_t count = groups.offsets ? groups.offsets[group + 1] - begin : rows;
  float sum[kWidth] = {};
  if (n < N) {
    const int64_t end = begin + (range + 1) * count / ranges;
    for (int64_t r = begin + range * count / ranges + warp; r < end; r += kWarps) {
      const int64_t from = kIsRouted ? groups.slots[r] / groups.slots_per_row : r;
      const float weight = kIsRouted ? groups.row_weights[r] : 1.0f;
      const Pack<T, kWidth> pack = load_pack<kWidth>(x + from * N + n);
      for (int k = 0; k < kWidth; k++) sum[k] += weight * to_float(pack.element[k]);
    }
  }
  for (int k = 0; k < kWidth; k++) of_warp[warp][k * kWarpSize + lane] = sum[k];  // no bank conflicts
  __syncthreads();
  for (int i = threadIdx.x; i < kWarpSize * kWidth; i += kThreads) {
    const int64_t column = first + i % kWarpSize * kWidth + i / kWarpSize;
    if (column >= N) continue;
    float total = 0;
    for (int w = 0; w < kWarps; w++) total += of_warp[w][i];
    float& to = sums[line * N + column];
    to = kAdds ? to + total : total;
  }
}

// sums (n) += partial (ranges, n) summed over its rows, in order. A thread an element.
__global__ void __launch_bounds__(kThreads)
    column_sums_add_kernel(float* sums, const float* partial, int64_t ranges, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  float sum = 0;
  for (int64_t range = 0; range < ranges; range++) sum += partial[range * n + i];
  sums[i] += sum;
}

template <class T, int kWidth, bool kIsRouted>
void add_column_sums(Device& device, Tensor sums, ConstTensor x, int64_t rows, const RowGroups& groups) {
  const int64_t N = x.shape[1], n = sums.numel(), num_groups = n / N;
  const int64_t chunks = ceil_div(N, kWarpSize * kWidth), bytes = n * static_cast<int64_t>(sizeof(float));
  const int64_t fitting = std::max<int64_t>(1, static_cast<int64_t>(Device::kWorkspaceBytes) / bytes);
  const int64_t ranges = std::min({std::max<int64_t>(1, rows / (num_groups * kMinRows)),
                                   ceil_div(kMinBlocks, num_groups * chunks), kMaxRanges, fitting});
  const auto launch_sums = [&](auto kernel, float* to) {
    launch(device, {ranges * num_groups * chunks, kThreads}, kernel, to, x.as<T>(), groups, rows, N, ranges, num_groups,
           chunks);
  };
  if (ranges == 1) return launch_sums(column_sums_kernel<T, kWidth, kIsRouted, true>, sums.as<float>());
  float* partial = static_cast<float*>(device.workspace(static_cast<size_t>(ranges * bytes)));
  launch_sums(column_sums_kernel<T, kWidth, kIsRouted, false>, partial);
  launch(device, {ceil_div(n, kThreads), kThreads}, column_sums_add_kernel, sums.as<float>(), partial, ranges, n);
}

}  // namespace

void add_column_sums_cuda(Device& device, Tensor sums, ConstTensor x, int64_t rows, const RowGroups& groups) {
  if (rows == 0 || sums.numel() == 0) return;
  dispatch_cuda(x.dtype, "column_sums", [&]<class T>(T) {
    const bool packed = is_packable<T>(x.shape[1], {x.data});
    if (groups.slots) {
      packed ? add_column_sums<T, kPackWidth<T>, true>(device, sums, x, rows, groups)
             : add_column_sums<T, 1, true>(device, sums, x, rows, groups);
    } else {
      packed ? add_column_sums<T, kPackWidth<T>, false>(device, sums, x, rows, groups)
             : add_column_sums<T, 1, false>(device, sums, x, rows, groups);
    }
  });
}
