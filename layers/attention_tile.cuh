// Tiles of attention on CUDA: the two ways to multiply them. Tiles: core/tile.cuh; kernels: attention.cu.
//
// An engine says how a block multiplies tiles: MmaEngine (bf16, tensor cores) or FmaEngine (fp32, plain FMA). The
// kernels are written once over either. A block has kRows rows (queries, or keys) against kN columns at a time:
//
//   Scores  (kRows, kN) fp32 in registers: element [tile][e] is row(row_slot(e)), column(tile, e)
//   Sums    (kRows, kHD) fp32 in registers: element [tile][e] is row(row_slot(e)), sum_column(tile, e)
//   multiply(scores, a, b)            scores = a b^T                    a (kRows, kHD), b (kN, kHD)
//   add_product(sums, scores, b)      sums += scores b                  scores rounded to T
//
// A row belongs to kRowLanes neighbouring lanes of one warp. Every sum has a fixed order.
#pragma once

#include "layers/core/tile.cuh"

namespace attention {

constexpr int kThreads = 128, kWarps = kThreads / kWarpSize;  // of a block

/// tile = the rows of tokens [first, first + kRows), see load_chunk. Not unrolled: registers are scarce here.
template <class AnyTile, class T>
__device__ __forceinline__ void load_tile(const AnyTile& tile, const Rows<const T>& rows, int first) {
#pragma unroll 1
  for (int i = threadIdx.x; i < AnyTile::kRows * AnyTile::kChunks; i += kThreads) {
    const int row = i / AnyTile::kChunks;
    load_chunk(tile, row, i % AnyTile::kChunks, rows, first + row);
  }
}

/// The rows of tokens [first, first + kRows), as far as there are any, = tile.
template <class AnyTile, class T>
__device__ __forceinline__ void store_tile(const Rows<T>& rows, int first, const AnyTile& tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < AnyTile::kRows * AnyTile::kChunks; i += kThreads) {
    const int row = i / AnyTile::kChunks;
    store_chunk(rows, first + row, tile, row, i % AnyTile::kChunks);
  }
}

/// mma.m16n8k16: a warp owns 16 rows. With kSplit = 2 two warps share 16 rows: both make all their scores, each half
/// of the columns of their sums (rows too long for the registers of one warp).
template <int kHD, int kN_, int kSplit>
struct MmaEngine {
  using T = bf16;
  static constexpr int kN = kN_, kRowWarps = kWarps / kSplit, kRows = 16 * kRowWarps, kSumWidth = kHD / kSplit;
  static constexpr int kScoreTiles = kN / 8, kSumTiles = kSumWidth / 8, kPerTile = 4;
  static constexpr int kRowSlots = 2, kRowLanes = 4;
  static constexpr size_t kScratchBytes = 0;
  static_assert(kHD % 16 == 0 && kN % 16 == 0 && kSumWidth % 16 == 0);
  using RowTile = Tile<T, kHD, kRows>;
  using ColumnTile = Tile<T, kHD, kN>;
  using Scores = float[kScoreTiles][4];
  using Sums = float[kSumTiles][4];

  static __device__ __forceinline__ int first_row() { return warp_index() % kRowWarps * 16; }
  static __device__ __forceinline__ int first_sum_column() { return warp_index() / kRowWarps * kSumWidth; }
  static constexpr __device__ __forceinline__ int row_slot(int e) { return e / 2; }
  static __device__ __forceinline__ int row(int slot) { return first_row() + lane_index() / 4 + slot * 8; }
  static __device__ __forceinline__ int column(int tile, int e) { return tile * 8 + lane_index() % 4 * 2 + e % 2; }
  static __device__ __forceinline__ int sum_column(int tile, int e) { return first_sum_column() + column(tile, e); }

  static __device__ __forceinline__ void multiply(Scores& scores, const RowTile& a, const ColumnTile& b) {
    const int lane = lane_index();
#pragma unroll
    for (int n = 0; n < kScoreTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) scores[n][e] = 0;
    }
#pragma unroll 4  // all of it would take more registers than there are at kHD = 256
    for (int k = 0; k < kHD / 16; k++) {
      unsigned af[4];
      load_first_operand<false>(af, a, first_row(), 16 * k, lane);
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        unsigned bf[4];
        load_second_operands<true>(bf, b, 16 * k, 8 * n, lane);
        mma_bf16_16x8x16(scores[n], af, bf[0], bf[1]);
        mma_bf16_16x8x16(scores[n + 1], af, bf[2], bf[3]);
      }
    }
  }

  /// Scores lie in the registers where the first operand of a product wants them.
  static __device__ __forceinline__ void add_product(Sums& sums, const Scores& scores, const ColumnTile& b, float*) {
    const int lane = lane_index();
#pragma unroll
    for (int k = 0; k < kN / 16; k++) {
      const auto &left = scores[2 * k], &right = scores[2 * k + 1];
      const unsigned af[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
                              pack_bf16(right[2], right[3])};
#pragma unroll
      for (int n = 0; n < kSumTiles; n += 2) {
        unsigned bf[4];
        load_second_operands<false>(bf, b, 16 * k, first_sum_column() + 8 * n, lane);
        mma_bf16_16x8x16(sums[n], af, bf[0], bf[1]);
        mma_bf16_16x8x16(sums[n + 1], af, bf[2], bf[3]);
      }
    }
  }
};

/// Plain FMA: a row belongs to 8 lanes. Scores go through `scratch`, (kRows, kN + 1) fp32, on their way to add_product.
template <int kHD, int kN_>
struct FmaEngine {
  using T = float;
  static constexpr int kN = kN_, kRowLanes = 8, kRows = kThreads / kRowLanes;
  static constexpr int kScoreTiles = kN / kRowLanes, kPerTile = 1, kSumTiles = kHD / (4 * kRowLanes);
  static constexpr int kRowSlots = 1;
  static constexpr size_t kScratchBytes = kRows * (kN + 1) * sizeof(float);
  static_assert(kHD % (4 * kRowLanes) == 0 && kN % kRowLanes == 0);
  using RowTile = Tile<T, kHD, kRows>;
  using ColumnTile = Tile<T, kHD, kN>;
  using Scores = float[kScoreTiles][1];
  using Sums = float[kSumTiles][4];

  static __device__ __forceinline__ int row_lane() { return threadIdx.x % kRowLanes; }
  static constexpr __device__ __forceinline__ int row_slot(int) { return 0; }
  static __device__ __forceinline__ int row(int) { return threadIdx.x / kRowLanes; }
  static __device__ __forceinline__ int column(int tile, int) { return tile * kRowLanes + row_lane(); }
  static __device__ __forceinline__ int sum_column(int tile, int e) { return (tile * kRowLanes + row_lane()) * 4 + e; }

  static __device__ __forceinline__ void multiply(Scores& scores, const RowTile& a, const ColumnTile& b) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; n++) scores[n][0] = 0;
#pragma unroll 4
    for (int c = 0; c < RowTile::kChunks; c++) {
      const Pack<float, 4> ap = load_pack<4>(a.chunk(row(0), c));
#pragma unroll
      for (int n = 0; n < kScoreTiles; n++) {
        const Pack<float, 4> bp = load_pack<4>(b.chunk(column(n, 0), c));
        for (int e = 0; e < 4; e++) scores[n][0] += ap.element[e] * bp.element[e];
      }
    }
  }

  static __device__ __forceinline__ void add_product(Sums& sums, const Scores& scores, const ColumnTile& b,
                                                     float* scratch) {
    float* of_row = scratch + row(0) * (kN + 1);
#pragma unroll
    for (int n = 0; n < kScoreTiles; n++) of_row[column(n, 0)] = scores[n][0];
    __syncwarp();
#pragma unroll 4
    for (int k = 0; k < kN; k++) {
      const float weight = of_row[k];
#pragma unroll
      for (int n = 0; n < kSumTiles; n++) {
        const Pack<float, 4> bp = load_pack<4>(b.chunk(k, n * kRowLanes + row_lane()));
        for (int e = 0; e < 4; e++) sums[n][e] += weight * bp.element[e];
      }
    }
    __syncwarp();  // scratch is free for the next call
  }
};

/// The largest `value` of, and the sum over, the lanes of a row.
template <class Engine>
__device__ __forceinline__ float row_max(float value) {
#pragma unroll
  for (int distance = Engine::kRowLanes / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, distance));
  }
  return value;
}
template <class Engine>
__device__ __forceinline__ float row_sum(float value) {
#pragma unroll
  for (int distance = Engine::kRowLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, distance);
  }
  return value;
}

/// tile = sums, row slot r times scale[r]. Barriers around it are the caller's.
template <class Engine>
__device__ __forceinline__ void put_sums(const typename Engine::RowTile& tile, const typename Engine::Sums& sums,
                                         const float (&scale)[Engine::kRowSlots]) {
#pragma unroll
  for (int n = 0; n < Engine::kSumTiles; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int slot = Engine::row_slot(e);
      tile.at(Engine::row(slot), Engine::sum_column(n, e)) = from_float<typename Engine::T>(sums[n][e] * scale[slot]);
    }
  }
}

}  // namespace attention
