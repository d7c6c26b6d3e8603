// Routing of tokens to experts on CUDA. Contract and formulas: moe.h; the CPU loops that specify it: moe.cpp. What
// moves the rows: moe_rows.cu.
//
// Choice: a warp a token, its logits in registers. The best expert of the warp is found k times, by a number of 64 bits
//   that orders score and expert at once. A logit that is NaN counts as infinity: it is chosen, and shows in its
//   weight. Experts are those of the CPU for the same logits; with Sigmoid but for scores that differ by roundings of
//   expf.
//
// Rows by a counting sort that is stable: a warp has a range of slots and counts its experts (1), the counts of an
//   expert are added up over the blocks (2), and the warp walks over its slots again, 32 at a time, and gives each its
//   row (3). There are integer sums only, and a slot's row does not depend on how the slots are cut.
//
// Statistics without atomics on floats: a warp sums p over every so-manieth token of its block's range in fp64, a block
//   adds its warps in order, and a second kernel the blocks. Ranges depend on the number of tokens alone.
//
// Bytes from DRAM, for T tokens, R = T k slots:
//   choose      reads logits 4 T E, writes experts and weights 8 R       the minimum
//   sort        reads experts twice and weights 12 R, writes 12 R; counts of 512 blocks at most; the minimum is 20 R.
//               The writes are in runs, one an expert for 32 slots: small beside what the experts' layers move
//   backward    reads logits 4 T E and 12 R, writes d_logits             the minimum
//   statistics  reads logits 4 T E and 4 R                               the minimum
#include <algorithm>
#include <bit>
#include <limits>

#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/moe.h"

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpSize;  // of a block whose warps have a token each
constexpr int kSortThreads = 256, kSortWarps = kSortThreads / kWarpSize;
constexpr int64_t kMaxSortBlocks = 512, kMinWarpSlots = 128;
constexpr int64_t kMaxStatisticsBlocks = 512, kMinTokensOfWarp = 4;
constexpr int64_t kMaxExperts = 512;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// RouterShape as kernels want it.
struct Router {
  int E, k, num_groups, top_groups;
  RouterScore score;
  bool renormalize;
  float scale;
};

/// E numbers of a token in the registers of a warp: entry i of a lane is of expert(i). There are none beyond E.
template <int kWidth, int kEntries>
struct WarpRow {
  float value[kEntries];

  static __device__ __forceinline__ int expert(int i) {
    return (i / kWidth * kWarpSize + lane_index()) * kWidth + i % kWidth;
  }
  /// `row` (E); E is a multiple of kWidth. `beyond` where there is no expert.
  __device__ __forceinline__ void load(const float* row, int E, float beyond) {
#pragma unroll
    for (int i = 0; i < kEntries; i += kWidth) {
      float pack[kWidth];
      for (int j = 0; j < kWidth; j++) pack[j] = beyond;
      if (expert(i) < E) load_floats(pack, row + expert(i));
      for (int j = 0; j < kWidth; j++) value[i + j] = pack[j];
    }
  }
  /// Of exp(value - max), value by value; 0 beyond E.
  __device__ __forceinline__ float exponentials(float max) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kEntries; i++) sum += value[i] = expf(value[i] - max);
    return warp_sum(sum);
  }
  __device__ __forceinline__ float max() const {
    float largest = value[0];
#pragma unroll
    for (int i = 1; i < kEntries; i++) largest = fmaxf(largest, value[i]);
    return warp_max(largest);
  }
  /// value = softmax(value).
  __device__ __forceinline__ void softmax() {
    const float inverse_of = exponentials(max());
#pragma unroll
    for (int i = 0; i < kEntries; i++) value[i] /= inverse_of;
  }
};

// ---- the choice of experts

/// Grows with x, equal for 0 and -0; above 0, which stands for nothing.
__device__ __forceinline__ unsigned sort_key(float x) {
  const unsigned bits = __float_as_uint(x == x ? x + 0.0f : kInfinity);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// key of the experts outside the best groups = that of -infinity. `shared` has E + num_groups places of the warp.
template <int kWidth, int kEntries>
__device__ __forceinline__ void limit_to_groups(unsigned (&key)[kEntries], const WarpRow<kWidth, kEntries>& scores,
                                                float* shared, const Router& router) {
  const int E = router.E, width = E / router.num_groups;
  unsigned* group_key = reinterpret_cast<unsigned*>(shared + E);
#pragma unroll
  for (int i = 0; i < kEntries; i++) {
    const int e = scores.expert(i);
    if (e < E) shared[e] = scores.value[i] == scores.value[i] ? scores.value[i] : kInfinity;
  }
  __syncwarp();
  for (int g = lane_index(); g < router.num_groups; g += kWarpSize) {
    float best = -kInfinity, second = -kInfinity;
    for (int e = g * width; e < (g + 1) * width; e++) {
      second = fmaxf(second, fminf(best, shared[e]));
      best = fmaxf(best, shared[e]);
    }
    group_key[g] = sort_key(best + second);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kEntries; i++) {
    const int e = scores.expert(i);
    if (e >= E) continue;
    const int group = e / width;
    int num_better = 0;
    for (int g = 0; g < router.num_groups; g++) {
      num_better += group_key[g] > group_key[group] || (group_key[g] == group_key[group] && g < group);
    }
    if (num_better >= router.top_groups) key[i] = sort_key(-kInfinity);
  }
}

/// The expert with the largest key, of equal keys the first; its key becomes 0. All lanes get it.
template <int kWidth, int kEntries>
__device__ __forceinline__ int take_best(unsigned (&key)[kEntries]) {
  uint64_t best = 0;
#pragma unroll
  for (int i = 0; i < kEntries; i++) {
    const unsigned before = ~static_cast<unsigned>(WarpRow<kWidth, kEntries>::expert(i));
    best = std::max(best, uint64_t{key[i]} << 32 | before);
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    best = std::max(best, __shfl_xor_sync(kFullWarp, best, distance));
  }
  const int expert = static_cast<int>(~static_cast<unsigned>(best));
#pragma unroll
  for (int i = 0; i < kEntries; i++) key[i] = WarpRow<kWidth, kEntries>::expert(i) == expert ? 0 : key[i];
  return expert;
}

/// Softmax over the lanes that have a logit; -infinity where there is none.
__device__ __forceinline__ float warp_softmax(float logit) {
  const float exponential = expf(logit - warp_max(logit));
  return exponential / warp_sum(exponential);
}

// A warp a token. experts (T, k), weights (T, k): the bits of w, which wait in `rows` until the sort.
template <int kWidth, int kEntries>
__global__ void __launch_bounds__(kThreads)
    route_choose_kernel(int32_t* experts, int32_t* weights, const float* logits, const float* select_bias,
                        int64_t num_tokens, Router router) {
  const int lane = lane_index(), warp = warp_index();
  const int64_t t = int64_t{blockIdx.x} * kWarps + warp;
  if (t >= num_tokens) return;  // all lanes of a warp alike
  const float* z = logits + t * router.E;
  WarpRow<kWidth, kEntries> scores;
  scores.load(z, router.E, -kInfinity);
  if (router.score == RouterScore::Sigmoid) {
#pragma unroll
    for (int i = 0; i < kEntries; i++) {
      const int e = scores.expert(i);
      if (e < router.E) scores.value[i] = sigmoid(scores.value[i]) + (select_bias ? select_bias[e] : 0.0f);
    }
  }
  unsigned key[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; i++) key[i] = scores.expert(i) < router.E ? sort_key(scores.value[i]) : 0;
  if (router.num_groups > 1) {
    limit_to_groups(key, scores, dynamic_shared<float>() + warp * (router.E + router.num_groups), router);
  }
  int expert = 0;  // lane i: the i-th best
  for (int i = 0; i < router.k; i++) {
    const int best = take_best<kWidth>(key);
    if (lane == i) expert = best;
  }
  const bool is_chosen = lane < router.k;
  const float logit = is_chosen ? z[expert] : -kInfinity;
  float weight = 0;
  if (router.score == RouterScore::SoftmaxSelected) {
    weight = warp_softmax(logit);
  } else if (router.score == RouterScore::SoftmaxAll) {
    const float max = scores.max();
    weight = expf(logit - max) / scores.exponentials(max);
  } else {
    const float s = is_chosen ? sigmoid(logit) : 0.0f, sum = warp_sum(s);
    weight = s * (router.scale / (router.renormalize ? sum + 1e-20f : 1.0f));
  }
  if (!is_chosen) return;
  experts[t * router.k + lane] = expert;
  weights[t * router.k + lane] = std::bit_cast<int32_t>(weight);
}

// ---- the sort of slots by expert

/// How R slots are cut: a warp has `of_warp` of them, a block kSortWarps times that.
struct SortRanges {
  int64_t of_warp, num_blocks;

  static SortRanges of(int64_t R) {
    const int64_t of_warp =
        std::max(kMinWarpSlots, round_up(ceil_div(R, kMaxSortBlocks * kSortWarps), int64_t{kWarpSize}));
    return {of_warp, std::max<int64_t>(1, ceil_div(R, of_warp * kSortWarps))};
  }
};

/// The lanes that have the value of this lane, among those where `exists`. All lanes call it.
__device__ __forceinline__ unsigned lanes_alike(int value, int num_bits, bool exists) {
  unsigned alike = __ballot_sync(kFullWarp, exists);
  for (int bit = 0; bit < num_bits; bit++) {
    const bool is_set = value >> bit & 1;
    const unsigned set = __ballot_sync(kFullWarp, is_set);
    alike &= is_set ? set : ~set;
  }
  return alike;
}

/// Goes over the slots of this warp in order: `visit(slot, next[expert])`, and next[expert]++. next (E) is the warp's
/// own in shared memory.
template <class Visit>
__device__ __forceinline__ void walk_slots(int* next, const int32_t* experts, int64_t R, int64_t of_warp, int num_bits,
                                           Visit&& visit) {
  const int lane = lane_index();
  const int64_t begin = (int64_t{blockIdx.x} * kSortWarps + warp_index()) * of_warp;
  const int64_t end = begin + of_warp < R ? begin + of_warp : R;
  for (int64_t first = begin; first < end; first += kWarpSize) {
    const int64_t slot = first + lane;
    const bool exists = slot < end;
    const int expert = exists ? experts[slot] : 0;
    const unsigned alike = lanes_alike(expert, num_bits, exists);
    const int before = __popc(alike & ((1u << lane) - 1));
    const int at = exists ? next[expert] + before : 0;
    __syncwarp();  // next is read
    if (exists && before == 0) next[expert] = at + __popc(alike);
    __syncwarp();  // next is written
    if (exists) visit(slot, at);
  }
}

/// Of all threads of a block: the sum of `value` over the threads before, and `total` over all.
template <int kBlock>
__device__ __forceinline__ int block_scan(int value, int& total) {
  __shared__ int of_warp[kBlock / kWarpSize];
  const int lane = lane_index(), warp = warp_index();
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_up_sync(kFullWarp, sum, static_cast<unsigned>(distance));
    if (lane >= distance) sum += other;
  }
  if (lane == kWarpSize - 1) of_warp[warp] = sum;
  __syncthreads();
  int before = sum - value;
  total = 0;
  for (int w = 0; w < kBlock / kWarpSize; w++) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  __syncthreads();  // of_warp is free for the next call
  return before;
}

/// next (kSortWarps, E) = how often each warp's slots have each expert. A barrier is the caller's.
__device__ __forceinline__ void count_experts(int* next, const int32_t* experts, int64_t R, int64_t of_warp, int E,
                                              int num_bits) {
  int* of_this_warp = next + warp_index() * E;
  for (int e = lane_index(); e < E; e += kWarpSize) of_this_warp[e] = 0;
  __syncwarp();
  walk_slots(of_this_warp, experts, R, of_warp, num_bits, [](int64_t, int) {});
}

// (1) counts (E, blocks): how often each block's slots have each expert.
__global__ void __launch_bounds__(kSortThreads)
    route_count_kernel(int* counts, const int32_t* experts, int64_t R, int64_t of_warp, int E, int num_bits) {
  int* next = dynamic_shared<int>();
  count_experts(next, experts, R, of_warp, E, num_bits);
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kSortThreads) {
    int sum = 0;
    for (int w = 0; w < kSortWarps; w++) sum += next[w * E + e];
    counts[int64_t{e} * gridDim.x + blockIdx.x] = sum;
  }
}

// (2) counts (E, blocks) = the sum over the blocks before; totals (E). A block an expert.
__global__ void __launch_bounds__(kSortThreads) route_scan_kernel(int* counts, int* totals, int num_blocks) {
  constexpr int kPerThread = kMaxSortBlocks / kSortThreads;
  int* of_expert = counts + int64_t{blockIdx.x} * num_blocks + threadIdx.x * kPerThread;
  const int left = num_blocks - static_cast<int>(threadIdx.x) * kPerThread;
  int count[kPerThread], sum = 0, total;
  for (int i = 0; i < kPerThread; i++) sum += count[i] = i < left ? of_expert[i] : 0;
  int before = block_scan<kSortThreads>(sum, total);
  for (int i = 0; i < kPerThread && i < left; before += count[i], i++) of_expert[i] = before;
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// (3) rows, slots, row_weights and offsets of the contract. rows comes with the bits of the weights.
__global__ void __launch_bounds__(kSortThreads)
    route_scatter_kernel(int32_t* rows, int32_t* slots, float* row_weights, int32_t* offsets, const int32_t* experts,
                         const int* counts, const int* totals, int64_t R, int64_t of_warp, int E, int num_bits) {
  constexpr int kPerThread = kMaxExperts / kSortThreads;
  int* next = dynamic_shared<int>();
  count_experts(next, experts, R, of_warp, E, num_bits);
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  int of_thread = 0, total;
  for (int e = first; e < first + kPerThread && e < E; e++) of_thread += totals[e];
  int offset = block_scan<kSortThreads>(of_thread, total);  // its barrier ends the count too
  for (int e = first; e < first + kPerThread && e < E; offset += totals[e], e++) {
    if (blockIdx.x == 0) offsets[e] = offset;
    int row = offset + counts[int64_t{e} * gridDim.x + blockIdx.x];
    for (int w = 0; w < kSortWarps; w++) {
      const int count = next[w * E + e];
      next[w * E + e] = row;
      row += count;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) offsets[E] = total;
  __syncthreads();
  walk_slots(next + warp_index() * E, experts, R, of_warp, num_bits, [&](int64_t slot, int row) {
    const float weight = std::bit_cast<float>(rows[slot]);
    rows[slot] = row;
    slots[row] = static_cast<int32_t>(slot);
    row_weights[row] = weight;
  });
}

// ---- gradients

// A warp a token. See route_token_backward and add_balance of moe.cpp. balance_slope (E) and is_token (T), or null.
template <class T, int kWidth, int kEntries>
__global__ void __launch_bounds__(kThreads)
    route_backward_kernel(T* d_logits, const float* d_row_weights, const float* logits, const int32_t* experts,
                          const int32_t* rows, const float* balance_slope, const int32_t* is_token, int64_t num_tokens,
                          Router router) {
  const int lane = lane_index(), warp = warp_index();
  const int64_t t = int64_t{blockIdx.x} * kWarps + warp;
  if (t >= num_tokens) return;  // all lanes of a warp alike
  const bool is_over_all = router.score == RouterScore::SoftmaxAll, has_balance = balance_slope && is_token[t];
  const bool is_chosen = lane < router.k;
  const int expert = is_chosen ? experts[t * router.k + lane] : 0;
  const float d_weight = is_chosen ? d_row_weights[rows[t * router.k + lane]] : 0.0f;
  const float logit = is_chosen ? logits[t * router.E + expert] : -kInfinity;

  float* of_chosen =
      dynamic_shared<float>() + warp * router.E;  // dw for SoftmaxAll, else the gradient; 0 of the others
  for (int e = lane; e < router.E; e += kWarpSize) of_chosen[e] = 0;
  __syncwarp();
  float gradient = d_weight;
  if (router.score == RouterScore::SoftmaxSelected) {
    const float w = warp_softmax(logit);
    gradient = w * (d_weight - warp_sum(w * d_weight));
  } else if (router.score == RouterScore::Sigmoid) {
    const float s = is_chosen ? sigmoid(logit) : 0.0f, sum = warp_sum(s) + 1e-20f;
    const float product = warp_sum(s * d_weight);
    const float ds = router.scale * (router.renormalize ? (d_weight - product / sum) / sum : d_weight);
    gradient = ds * s * (1.0f - s);
  }
  if (is_chosen) of_chosen[expert] = gradient;
  __syncwarp();

  WarpRow<kWidth, kEntries> p, d, slope;
  d.load(of_chosen, router.E, 0);
  if (is_over_all || has_balance) {
    p.load(logits + t * router.E, router.E, -kInfinity);
    p.softmax();
  }
  if (is_over_all) {
    float product = 0;
#pragma unroll
    for (int i = 0; i < kEntries; i++) product += p.value[i] * d.value[i];
    product = warp_sum(product);
#pragma unroll
    for (int i = 0; i < kEntries; i++) d.value[i] = p.value[i] * (d.value[i] - product);
  }
  if (has_balance) {
    slope.load(balance_slope, router.E, 0);
    float product = 0;
#pragma unroll
    for (int i = 0; i < kEntries; i++) product += p.value[i] * slope.value[i];
    product = warp_sum(product);
#pragma unroll
    for (int i = 0; i < kEntries; i++) d.value[i] += p.value[i] * (slope.value[i] - product);
  }
#pragma unroll
  for (int i = 0; i < kEntries; i += kWidth) {
    const int e = d.expert(i);
    float pack[kWidth];
    for (int j = 0; j < kWidth; j++) pack[j] = d.value[i + j];
    if (e < router.E) store_floats(d_logits + t * router.E + e, pack);
  }
}

// ---- statistics

// partial (blocks, 2, E) = the rows of each expert, and sums of p, of the tokens of this block that are one. The sums
// are left out when `sums_p` is not set.
template <int kWidth, int kEntries>
__global__ void __launch_bounds__(kThreads)
    route_statistics_kernel(double* partial, const float* logits, const int32_t* experts, const int32_t* is_token,
                            int64_t num_tokens, int E, int k, bool sums_p) {
  double* of_warp = dynamic_shared<double>();  // (kWarps, E)
  int* counts = reinterpret_cast<int*>(of_warp + kWarps * E);
  const int lane = lane_index(), warp = warp_index();
  for (int e = threadIdx.x; e < E; e += kThreads) counts[e] = 0;
  __syncthreads();
  double sum[kEntries] = {};
  const int64_t end = (int64_t{blockIdx.x} + 1) * num_tokens / gridDim.x;
  for (int64_t t = blockIdx.x * num_tokens / gridDim.x + warp; t < end; t += kWarps) {
    if (!is_token[t]) continue;
    if (lane < k) atomicAdd(&counts[experts[t * k + lane]], 1);
    if (!sums_p) continue;
    WarpRow<kWidth, kEntries> p;
    p.load(logits + t * E, E, -kInfinity);
    p.softmax();
#pragma unroll
    for (int i = 0; i < kEntries; i++) sum[i] += static_cast<double>(p.value[i]);
  }
#pragma unroll
  for (int i = 0; i < kEntries; i++) {
    const int e = WarpRow<kWidth, kEntries>::expert(i);
    if (e < E) of_warp[warp * E + e] = sum[i];
  }
  __syncthreads();
  double* of_block = partial + int64_t{blockIdx.x} * 2 * E;
  for (int e = threadIdx.x; e < E; e += kThreads) {
    of_block[e] = counts[e];
    if (!sums_p) continue;
    double total = 0;
    for (int w = 0; w < kWarps; w++) total += of_warp[w * E + e];
    of_block[E + e] = total;
  }
}

constexpr int kSumColumns = 32, kSumRows = 8;

// counts, probabilities (E) += partial (blocks, 2, E) summed over the blocks: thread (column, r) sums blocks r, r + 8,
// ... in order, then thread (column, 0) adds the 8 sums in order. `n`: E, or 2 E with probabilities.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    route_statistics_sum_kernel(double* counts, double* probabilities, const double* partial, int64_t num_blocks, int E,
                                int n) {
  __shared__ double sums[kSumRows][kSumColumns];
  const int i = static_cast<int>(blockIdx.x) * kSumColumns + static_cast<int>(threadIdx.x);
  double sum = 0;
  for (int64_t b = threadIdx.y; i < n && b < num_blocks; b += kSumRows) sum += partial[b * 2 * E + i];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || i >= n) return;
  sum = 0;
  for (int r = 0; r < kSumRows; r++) sum += sums[r][threadIdx.x];
  double& to = i < E ? counts[i] : probabilities[i - E];
  to += sum;
}

// slope (E) = factor times the sum of counts (layers, E) over the layers; loss += slope . probabilities. One block.
__global__ void __launch_bounds__(kThreads)
    route_balance_kernel(float* slope, double* loss, const double* counts, const double* probabilities, double factor,
                         int layers, int E) {
  double sum = 0;
  for (int e = threadIdx.x; e < E; e += kThreads) {
    double count = 0;
    for (int l = 0; l < layers; l++) count += counts[int64_t{l} * E + e];
    slope[e] = static_cast<float>(factor * count);
    sum += factor * count * probabilities[e];
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *loss += sum;
}

// ---- host

const float* logits_of(ConstTensor logits) {
  CHECK(logits.dtype == DType::F32, "moe: dtype {} is not supported on the CUDA device, use F32",
        name_of(logits.dtype));
  CHECK(logits.shape[1] <= kMaxExperts, "moe: {} experts, the CUDA kernels allow {}", logits.shape[1], kMaxExperts);
  return logits.as<float>();
}

Router router_of(const RouterShape& s) {
  return {static_cast<int>(s.num_experts),
          static_cast<int>(s.top_k),
          s.score == RouterScore::Sigmoid ? static_cast<int>(s.num_groups) : 1,
          static_cast<int>(s.top_groups),
          s.score,
          s.renormalize,
          static_cast<float>(s.scale)};
}

/// Calls `op` with the width of a pack of logits and the entries that a lane has of E, as constants.
template <class Op>
void with_entries(bool packed, int64_t E, Op&& op) {
  const auto with_width = [&]<int kWidth>() {
    if (E <= 4 * kWarpSize) return op.template operator()<kWidth, 4>();
    if (E <= 8 * kWarpSize) return op.template operator()<kWidth, 8>();
    op.template operator()<kWidth, 16>();
  };
  packed ? with_width.template operator()<kPackWidth<float>>() : with_width.template operator()<1>();
}

void sort_slots(Device& device, const Routing& routing, int64_t E) {
  const int64_t R = routing.experts.numel();
  const auto [of_warp, num_blocks] = SortRanges::of(R);
  const int num_bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(E - 1))),
            num_experts = static_cast<int>(E);
  const size_t num_counts = static_cast<size_t>(E * num_blocks);
  int* counts = static_cast<int*>(device.workspace((num_counts + static_cast<size_t>(E)) * sizeof(int)));
  int* totals = counts + num_counts;
  const LaunchShape on_slots = {num_blocks, kSortThreads, static_cast<size_t>(kSortWarps * E) * sizeof(int)};
  const int32_t* experts = routing.experts.as<int32_t>();
  launch(device, on_slots, route_count_kernel, counts, experts, R, of_warp, num_experts, num_bits);
  launch(device, {E, kSortThreads}, route_scan_kernel, counts, totals, static_cast<int>(num_blocks));
  launch(device, on_slots, route_scatter_kernel, routing.rows.as<int32_t>(), routing.slots.as<int32_t>(),
         routing.row_weights.as<float>(), routing.offsets.as<int32_t>(), experts, counts, totals, R, of_warp,
         num_experts, num_bits);
}

}  // namespace

void route_forward_cuda(Device& device, const Routing& routing, ConstTensor logits, ConstTensor select_bias,
                        const RouterShape& shape) {
  const float* z = logits_of(logits);
  const int64_t T = logits.shape[0], E = logits.shape[1];
  const Router router = router_of(shape);
  const size_t shared =
      router.num_groups > 1 ? static_cast<size_t>(kWarps * (E + router.num_groups)) * sizeof(float) : 0;
  with_entries(is_packable<float>(E, {z}), E, [&]<int kWidth, int kEntries>() {
    launch(device, {ceil_div(T, kWarps), kThreads, shared}, route_choose_kernel<kWidth, kEntries>,
           routing.experts.as<int32_t>(), routing.rows.as<int32_t>(), z,
           select_bias ? select_bias.as<float>() : nullptr, T, router);
  });
  sort_slots(device, routing, E);
}

void route_backward_cuda(Device& device, Tensor d_logits, ConstTensor d_row_weights, ConstTensor logits,
                         const Routing& routing, const RouterShape& shape, ConstTensor balance_slope,
                         ConstTensor is_token) {
  const float* z = logits_of(logits);
  const int64_t T = logits.shape[0], E = logits.shape[1];
  const bool packed = is_packable<float>(E, {z, d_logits.data, balance_slope.data});
  dispatch_cuda(d_logits.dtype, "route_backward", [&]<class D>(D) {
    with_entries(packed, E, [&]<int kWidth, int kEntries>() {
      const size_t shared = static_cast<size_t>(kWarps * E) * sizeof(float);
      launch(device, {ceil_div(T, kWarps), kThreads, shared}, route_backward_kernel<D, kWidth, kEntries>,
             d_logits.as<D>(), d_row_weights.as<float>(), z, routing.experts.as<int32_t>(), routing.rows.as<int32_t>(),
             balance_slope ? balance_slope.as<float>() : nullptr, is_token ? is_token.as<int32_t>() : nullptr, T,
             router_of(shape));
    });
  });
}

void route_statistics_cuda(Device& device, Tensor counts, Tensor probabilities, ConstTensor logits,
                           const Routing& routing, ConstTensor is_token) {
  const float* z = logits_of(logits);
  const int64_t T = logits.shape[0], E = logits.shape[1], k = routing.experts.shape[1];
  const int64_t blocks = std::min(kMaxStatisticsBlocks, ceil_div(T, kWarps * kMinTokensOfWarp));
  if (blocks == 0) return;
  double* partial = static_cast<double*>(device.workspace(static_cast<size_t>(blocks * 2 * E) * sizeof(double)));
  const size_t shared = static_cast<size_t>(E) * (kWarps * sizeof(double) + sizeof(int));
  with_entries(is_packable<float>(E, {z}), E, [&]<int kWidth, int kEntries>() {
    launch(device, {blocks, kThreads, shared}, route_statistics_kernel<kWidth, kEntries>, partial, z,
           routing.experts.as<int32_t>(), is_token.as<int32_t>(), T, static_cast<int>(E), static_cast<int>(k),
           static_cast<bool>(probabilities));
  });
  const int64_t n = probabilities ? 2 * E : E;
  launch(device, {ceil_div(n, kSumColumns), dim3(kSumColumns, kSumRows)}, route_statistics_sum_kernel,
         counts.as<double>(), probabilities ? probabilities.as<double>() : nullptr, partial, blocks,
         static_cast<int>(E), static_cast<int>(n));
}

void route_balance_cuda(Device& device, Tensor slope, Tensor loss, ConstTensor counts, ConstTensor probabilities,
                        double factor) {
  CHECK(slope.dtype == DType::F32, "route_balance: dtype {} is not supported on the CUDA device, use F32",
        name_of(slope.dtype));
  launch(device, {1, kThreads}, route_balance_kernel, slope.as<float>(), loss.as<double>(), counts.as<double>(),
         probabilities.as<double>(), factor, static_cast<int>(counts.shape[0]), static_cast<int>(counts.shape[1]));
}
