// The linear layers of experts on CUDA, by products of our own: how many rows an expert has is known on the device
// only. Contract: grouped_linear.h; the CPU loops that specify it: grouped_linear.cpp.
//
// Rows (y, dx): a block makes a tile of y: kM rows of one expert times kN columns. The grid has as many row tiles as
//   there can be, R / kM + E; a block finds its expert by a search in the offsets, and ends when the expert has no rows
//   left for it. Weights (dw): a block makes a tile of one expert's dw, walks over the expert's rows in order and adds
//   the sum to dw at the end. Every sum has one order, whatever the GPU: that of the rows, or of K.
//
// A block has 256 threads. Tiles of both operands come by cp.async, kStages - 1 of them on the way while one is
//   multiplied: on tensor cores (bf16, fp32 sums), or by FMA (fp32, for checks rather than for speed).
//                 tile of the result   step   stages   shared memory   registers, sm_90   blocks on a multiprocessor
//     bf16        128 x 128            32     3        48 KiB          124 to 128         2
//     fp32        64 x 64              16     3        24 KiB          91 to 128          2 or more
//
// Work and bytes for R rows, bf16; an expert's weights are read from DRAM once where L2 holds them (the blocks of an
//   expert are neighbours), its rows once for all columns:
//                 flops      reads                      writes
//     y           2 R N K    R K, E N K                 R N              the minimum
//     dx          2 R N K    R N, E N K                 R K              the minimum
//     dw          2 R N K    R (N + K), 4 E N K fp32    4 E N K fp32     the minimum
//   L2 serves a tile's operands again for every tile beside it: 64 flops a byte in bf16.
#include "layers/grouped_linear.h"

#include <algorithm>
#include <type_traits>

#include "layers/column_sums.h"
#include "layers/core/integer.h"
#include "layers/core/tile.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kMinBlocks = 2;  // on a multiprocessor: bounds a thread's registers to 128

// An engine multiplies tiles: sums (kM, kN) += A (kM, kK) B (kK, kN). A tile lies in shared memory as its matrix does
// in global memory: kATransposed is (kK, kM), kBTransposed (kN, kK). A thread has runs of kRun neighbours of a row.

/// mma.m16n8k16: 2 x 4 warps, 64 x 32 elements each.
template <bool kATransposed, bool kBTransposed>
struct MmaEngine {
  using T = bf16;
  static constexpr int kM = 128, kN = 128, kK = 32, kStages = 3, kRun = 2;
  static constexpr int kWarpM = 64, kWarpN = 32, kWarpsN = kN / kWarpN, kTilesM = kWarpM / 16, kTilesN = kWarpN / 8;
  using ATile = Tile<T, kATransposed ? kM : kK, kATransposed ? kK : kM>;
  using BTile = Tile<T, kBTransposed ? kK : kN, kBTransposed ? kN : kK>;
  using Sums = float[kTilesM][kTilesN][4];

  static __device__ __forceinline__ int first_row() { return warp_index() / kWarpsN * kWarpM; }
  static __device__ __forceinline__ int first_column() { return warp_index() % kWarpsN * kWarpN; }

  static __device__ __forceinline__ void add_product(Sums& sums, const ATile& a, const BTile& b) {
    const int lane = lane_index();
#pragma unroll
    for (int k = 0; k < kK; k += 16) {
      unsigned af[kTilesM][4];
#pragma unroll
      for (int m = 0; m < kTilesM; m++) load_first_operand<kATransposed>(af[m], a, first_row() + 16 * m, k, lane);
#pragma unroll
      for (int n = 0; n < kTilesN; n += 2) {
        unsigned bf[4];
        load_second_operands<kBTransposed>(bf, b, k, first_column() + 8 * n, lane);
#pragma unroll
        for (int m = 0; m < kTilesM; m++) {
          mma_bf16_16x8x16(sums[m][n], af[m], bf[0], bf[1]);
          mma_bf16_16x8x16(sums[m][n + 1], af[m], bf[2], bf[3]);
        }
      }
    }
  }
  /// op(row, column, run) for the runs of this thread.
  template <class Op>
  static __device__ __forceinline__ void for_each_run(Sums& sums, Op&& op) {
    const int row = first_row() + lane_index() / 4, column = first_column() + lane_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < kTilesN; n++) {
#pragma unroll
      for (int m = 0; m < kTilesM; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) op(row + 16 * m + 8 * half, column + 8 * n, sums[m][n] + kRun * half);
      }
    }
  }
  static __device__ __forceinline__ void put(T* to, const float* run) {
    *reinterpret_cast<unsigned*>(to) = pack_bf16(run[0], run[1]);
  }
};

/// Plain FMA: 16 x 16 threads, 4 x 4 elements each.
template <bool kATransposed, bool kBTransposed>
struct FmaEngine {
  using T = float;
  static constexpr int kM = 64, kN = 64, kK = 16, kStages = 3, kRun = 4;
  using ATile = Tile<T, kATransposed ? kM : kK, kATransposed ? kK : kM>;
  using BTile = Tile<T, kBTransposed ? kK : kN, kBTransposed ? kN : kK>;
  using Sums = float[4][kRun];

  static __device__ __forceinline__ int first_row() { return threadIdx.x / (kN / 4) * 4; }
  static __device__ __forceinline__ int first_column() { return threadIdx.x % (kN / 4) * 4; }

  /// The 4 x 4 elements at (row, column) of a tile.
  template <class AnyTile>
  static __device__ __forceinline__ void load(float (&block)[4][4], const AnyTile& tile, int row, int column) {
#pragma unroll
    for (int i = 0; i < 4; i++) load_floats(block[i], tile.chunk(row + i, column / 4));
  }
  static __device__ __forceinline__ void add_product(Sums& sums, const ATile& a, const BTile& b) {
#pragma unroll
    for (int k = 0; k < kK; k += 4) {
      float ab[4][4], bb[4][4];
      kATransposed ? load(ab, a, k, first_row()) : load(ab, a, first_row(), k);
      kBTransposed ? load(bb, b, first_column(), k) : load(bb, b, k, first_column());
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
#pragma unroll
          for (int n = 0; n < 4; n++) {
            sums[m][n] += (kATransposed ? ab[i][m] : ab[m][i]) * (kBTransposed ? bb[n][i] : bb[i][n]);
          }
        }
      }
    }
  }
  template <class Op>
  static __device__ __forceinline__ void for_each_run(Sums& sums, Op&& op) {
#pragma unroll
    for (int m = 0; m < 4; m++) op(first_row() + m, first_column(), sums[m]);
  }
  static __device__ __forceinline__ void put(T* to, const float* run) {
    store_pack<kRun>(to, Pack<T, kRun>{{run[0], run[1], run[2], run[3]}});
  }
};

template <class T, bool kATransposed, bool kBTransposed>
using EngineOf = std::conditional_t<dtype_of<T> == DType::BF16, MmaEngine<kATransposed, kBTransposed>,
                                    FmaEngine<kATransposed, kBTransposed>>;

/// Shared memory of a block: kStages times a tile of A and one of B; at the end a tile of the result lies over them.
template <class Engine>
struct SharedLayout {
  using T = typename Engine::T;
  using Result = Tile<T, Engine::kN, Engine::kM>;
  static constexpr int kStageElements = Engine::ATile::kElements + Engine::BTile::kElements;
  static constexpr size_t kBytes = Engine::kStages * kStageElements * sizeof(T);
  static_assert(Result::kElements <= Engine::kStages * kStageElements);

  static __device__ __forceinline__ typename Engine::ATile a(int stage) {
    return {dynamic_shared<T>() + stage * kStageElements};
  }
  static __device__ __forceinline__ typename Engine::BTile b(int stage) {
    return {dynamic_shared<T>() + stage * kStageElements + Engine::ATile::kElements};
  }
  static __device__ __forceinline__ Result result() { return {dynamic_shared<T>()}; }
};

/// Calls op(row, chunk) for the chunks of a tile that are this thread's.
template <class AnyTile, class Op>
__device__ __forceinline__ void for_each_chunk(Op&& op) {
  constexpr int kChunks = AnyTile::kChunks, kPerThread = AnyTile::kRows * kChunks / kThreads;
  static_assert(AnyTile::kRows * kChunks % kThreads == 0);
#pragma unroll
  for (int j = 0; j < kPerThread; j++) {
    const int i = j * kThreads + threadIdx.x;
    op(i / kChunks, i % kChunks);
  }
}

/// tile = the first rows of `rows`, see load_chunk.
template <class AnyTile, class T>
__device__ __forceinline__ void load_tile(const AnyTile& tile, const Rows<const T>& rows) {
  for_each_chunk<AnyTile>([&](int row, int c) { load_chunk(tile, row, c, rows, row); });
}

/// sums += A B over `length`, kK at a time: a_rows(k) and b_rows(k) are what is left of the operands there.
template <class Engine, class ARows, class BRows>
__device__ __forceinline__ void multiply(typename Engine::Sums& sums, int length, const ARows& a_rows,
                                         const BRows& b_rows) {
  using Shared = SharedLayout<Engine>;
  constexpr int kAhead = Engine::kStages - 1;
  const int num_steps = (length + Engine::kK - 1) / Engine::kK;
  const auto load = [&](int step) {
    const int stage = step % Engine::kStages, k = step * Engine::kK;
    if (step < num_steps) {
      load_tile(Shared::a(stage), a_rows(k));
      load_tile(Shared::b(stage), b_rows(k));
    }
    cp_async_commit();  // a group for every step, so that they can be counted
  };
  for (int step = 0; step < kAhead; step++) load(step);
  for (int step = 0; step < num_steps; step++) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();  // this step's tiles are there, and all threads have left those of the step before
    load(step + kAhead);
    const int stage = step % Engine::kStages;
    Engine::add_product(sums, Shared::a(stage), Shared::b(stage));
  }
}

/// The rows [begin, end) of one expert that are a block's: at most kM of them, none where begin == end.
struct RowTile {
  int expert, begin, end;
};

// Tile i of the grid. Expert e has the tiles from offsets[e] / kM + e on: they are enough for its rows, for
// floor(b / kM) - floor(a / kM) + 1 >= ceil((b - a) / kM). All lanes of a warp search, 32 places at a time.
template <int kM>
__device__ __forceinline__ RowTile row_tile(const int32_t* offsets, int E, int i) {
  const auto first_tile = [&](int e) { return offsets[e] / kM + e; };
  int expert = 0;  // of those from here on, `count`, one has the tile
  for (int count = E; count > 1;) {
    const int step = (count + kWarpSize - 1) / kWarpSize, place = lane_index() * step;
    const unsigned reached = __ballot_sync(kFullWarp, place < count && first_tile(expert + place) <= i);
    const int last = (__popc(reached) - 1) * step;
    expert += last;
    count = std::min(step, count - last);
  }
  const int end = offsets[expert + 1];
  const int begin = std::min(offsets[expert] + (i - first_tile(expert)) * kM, end);
  return {expert, begin, std::min(begin + kM, end)};
}

// y (R, N) <- x (R, K): y_r = x_r B_e + b_e for the rows of each expert; B_e lies in w as (K, N), or as (N, K) where
// the engine has it transposed. b (E, N) or null. Forward: B_e = W_e^T. Backward: dx = dy W_e, N and K change places. A
// block a tile of y, columns innermost: blocks side by side share rows of x.
template <class T, int kWidth, bool kBTransposed>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    grouped_rows_kernel(T* y, const T* x, const T* w, const T* b, const int32_t* offsets, int E, int N, int K,
                        int column_tiles) {
  using Engine = EngineOf<T, false, kBTransposed>;
  constexpr bool is_packed = kWidth > 1;
  const RowTile tile = row_tile<Engine::kM>(offsets, E, static_cast<int>(blockIdx.x) / column_tiles);
  const int num_rows = tile.end - tile.begin;
  if (num_rows == 0) return;  // all threads of the block alike
  const int first = static_cast<int>(blockIdx.x) % column_tiles * Engine::kN, num_columns = N - first;
  const T* x_tile = x + int64_t{tile.begin} * K;
  const T* w_tile = w + int64_t{tile.expert} * N * K + (kBTransposed ? int64_t{first} * K : first);
  const auto x_rows = [&](int k) { return Rows<const T>{x_tile + k, K, num_rows, K - k, is_packed}; };
  const auto w_rows = [&](int k) {
    if constexpr (kBTransposed) return Rows<const T>{w_tile + k, K, num_columns, K - k, is_packed};
    return Rows<const T>{w_tile + int64_t{k} * N, N, K - k, num_columns, is_packed};
  };

  typename Engine::Sums sums;
  Engine::for_each_run(sums, [&](int, int column, float* run) {
    for (int i = 0; i < Engine::kRun; i++) {
      run[i] = b && column + i < num_columns ? to_float(b[int64_t{tile.expert} * N + first + column + i]) : 0.0f;
    }
  });
  multiply<Engine>(sums, K, x_rows, w_rows);
  __syncthreads();  // the operands are read no more
  auto result = SharedLayout<Engine>::result();
  Engine::for_each_run(sums, [&](int row, int column, const float* run) { Engine::put(&result.at(row, column), run); });
  __syncthreads();
  const Rows<T> y_rows = {y + int64_t{tile.begin} * N + first, N, num_rows, num_columns, is_packed};
  for_each_chunk<decltype(result)>([&](int row, int c) { store_chunk(y_rows, row, result, row, c); });
}

// dw (E, P, Q) += A_e^T B_e for the rows of each expert, A (R, P), B (R, Q). W (N, K): dy^T x; W (K, N): x^T dy. A
// block a tile of dw.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    grouped_weights_kernel(float* dw, const T* a, const T* b, const int32_t* offsets, int P, int Q, int row_tiles,
                           int column_tiles) {
  using Engine = EngineOf<T, true, false>;
  constexpr bool is_packed = kWidth > 1;
  const int64_t line = blockIdx.x / column_tiles, expert = line / row_tiles;
  const int begin = offsets[expert], num_rows = offsets[expert + 1] - begin;
  if (num_rows == 0) return;  // all threads of the block alike
  const int p = static_cast<int>(line % row_tiles) * Engine::kM, q = blockIdx.x % column_tiles * Engine::kN;
  const T *a_tile = a + int64_t{begin} * P + p, *b_tile = b + int64_t{begin} * Q + q;
  const auto a_rows = [&](int r) { return Rows<const T>{a_tile + int64_t{r} * P, P, num_rows - r, P - p, is_packed}; };
  const auto b_rows = [&](int r) { return Rows<const T>{b_tile + int64_t{r} * Q, Q, num_rows - r, Q - q, is_packed}; };
  typename Engine::Sums sums = {};
  multiply<Engine>(sums, num_rows, a_rows, b_rows);
  float* dw_tile = dw + (expert * P + p) * Q + q;
  Engine::for_each_run(sums, [&](int row, int column, const float* run) {
    if (p + row >= P || q + column >= Q) return;
    float* to = dw_tile + int64_t{row} * Q + column;
    if (is_packed) {
      float sum[Engine::kRun];
      load_floats(sum, to);
      for (int i = 0; i < Engine::kRun; i++) sum[i] += run[i];
      store_floats(to, sum);
    } else {
      for (int i = 0; i < Engine::kRun && q + column + i < Q; i++) to[i] += run[i];
    }
  });
}

// ---- host

/// A dimension, for kernels that count columns in 32 bits; offsets of rows take 64.
int dimension(int64_t n) {
  constexpr int64_t kMax = int64_t{1} << 30;
  CHECK(n <= kMax, "grouped_linear: a dimension of {}, the CUDA kernels allow {}", n, kMax);
  return static_cast<int>(n);
}

/// y = x B + b, see grouped_rows_kernel.
template <class T, bool kBTransposed>
void multiply_rows(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b, ConstTensor offsets) {
  using Engine = EngineOf<T, false, kBTransposed>;
  const int64_t R = x.shape[0], E = w.shape[0];
  const int N = dimension(y.shape[1]), K = dimension(x.shape[1]);
  const bool packed = is_packable<T>(N, {y.data}) && is_packable<T>(K, {x.data, w.data});
  const int64_t row_tiles = dimension(R) / Engine::kM + dimension(E), column_tiles = ceil_div(N, Engine::kN);
  launch(device, {row_tiles * column_tiles, kThreads, SharedLayout<Engine>::kBytes},
         packed ? grouped_rows_kernel<T, kPackWidth<T>, kBTransposed> : grouped_rows_kernel<T, 1, kBTransposed>,
         y.as<T>(), x.as<T>(), w.as<T>(), b ? b.as<T>() : nullptr, offsets.as<int32_t>(), static_cast<int>(E), N, K,
         static_cast<int>(column_tiles));
}

/// dw += a^T b, see grouped_weights_kernel.
template <class T>
void multiply_for_weights(Device& device, Tensor dw, ConstTensor a, ConstTensor b, ConstTensor offsets) {
  using Engine = EngineOf<T, true, false>;
  const int P = dimension(a.shape[1]), Q = dimension(b.shape[1]);
  const bool packed = is_packable<T>(P, {a.data}) && is_packable<T>(Q, {b.data, dw.data});
  const int64_t row_tiles = ceil_div(P, Engine::kM), column_tiles = ceil_div(Q, Engine::kN);
  launch(device, {dw.shape[0] * row_tiles * column_tiles, kThreads, SharedLayout<Engine>::kBytes},
         packed ? grouped_weights_kernel<T, kPackWidth<T>> : grouped_weights_kernel<T, 1>, dw.as<float>(), a.as<T>(),
         b.as<T>(), offsets.as<int32_t>(), P, Q, static_cast<int>(row_tiles), static_cast<int>(column_tiles));
}

}  // namespace

void grouped_linear_forward_cuda(Device& device, Tensor y, ConstTensor x, ConstTensor w, ConstTensor b,
                                 ConstTensor offsets, WeightLayout layout) {
  dispatch_cuda(x.dtype, "grouped_linear", [&]<class T>(T) {
    layout == WeightLayout::OutIn ? multiply_rows<T, true>(device, y, x, w, b, offsets)
                                  : multiply_rows<T, false>(device, y, x, w, b, offsets);
  });
}

void grouped_linear_backward_cuda(Device& device, Tensor dx, Tensor dw, Tensor db, ConstTensor dy, ConstTensor x,
                                  ConstTensor w, ConstTensor offsets, WeightLayout layout) {
  dispatch_cuda(x.dtype, "grouped_linear", [&]<class T>(T) {
    if (layout == WeightLayout::OutIn) {
      multiply_rows<T, false>(device, dx, dy, w, {}, offsets);
      multiply_for_weights<T>(device, dw, dy, x, offsets);
    } else {
      multiply_rows<T, true>(device, dx, dy, w, {}, offsets);
      multiply_for_weights<T>(device, dw, x, dy, offsets);
    }
  });
  if (db) add_column_sums_cuda(device, db, dy, dy.shape[0], {offsets.as<int32_t>()});
}
