// Attention on CUDA. Contract and formulas: attention.h; the CPU loops that specify it: attention.cpp; products of
// tiles: attention_tile.cuh.
//
// FlashAttention-2 (Dao 2023): a block owns a tile of queries of one head and walks over the tiles of keys that its
//   rows see, with the online softmax in registers; the next tiles of K and V are copied while it works on these.
//   Backward without atomics: dq by blocks that own queries, dk and dv by blocks that own keys and walk over the query
//   heads of their kv head and the tiles of queries that see them. Every sum has a fixed order, whatever the GPU.
//
// Tiles are counted from the batch's first token, not from a document's: a tile may hold many documents, and what a row
//   does not see counts for exactly nothing. With first_key(i) = max(document's first, i - window + 1), which only
//   grows with i, the queries [a, b) see the keys [first_key(a), b) between them and no tile that is wholly hidden is
//   touched: time is linear in the documents.
//
// Work for n pairs that the masks of all heads leave, width d, and bytes from DRAM for T tokens where K and V of a head
//   stay in L2; with X = T (NH + 2 NKV) d and Y = T NH d elements, S = T NH fp32:
//                 flops    reads           writes
//     forward     4 n d    X               Y, S              the minimum
//     D           2 Y      2 Y (o, do)     S
//     dk, dv      8 n d    X, Y, 2 S       X - Y
//     dq          6 n d    X, Y, 2 S       Y
//     d_sinks     4 S      2 S             NH
//   A backward with atomics has 10 n d flops, not 14 n d, and reads X + 2 Y, not 2 X + 4 Y: the price of one order. On
//   a mask's edge half of the pairs of a tile are computed in vain; tiles are 64 x 64, 64 x 32 (d > 64), 64 x 16 (d >
//   128).
//
// A block has 128 threads. bf16 on sm_90: registers of a thread, KiB of shared memory, blocks on a multiprocessor
//                HD 64               HD 128
//     forward    123   40   4        168   80   2
//     dk, dv     218   49   2        234   64.5 2
//     dq         166   48   3        168   64   3
//   Widths between are padded with zeros in shared memory to 32, 64, 96, 128 or 256 (fp32: not to 96).
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "layers/attention.h"
#include "layers/attention_tile.cuh"
#include "layers/core/integer.h"

namespace {

using attention::kThreads;

constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
constexpr int kNever = std::numeric_limits<int>::max();  // the first key of a row that is no token
constexpr float kHidden = -std::numeric_limits<float>::infinity();

/// A score in units of log 2, and its derivative by the score before the cap.
struct Logit {
  float value, slope;
};

/// What all kernels are told.
template <class T>
struct Problem {
  const T* qkv;       ///< (num_tokens, NH + 2 NKV, HD)
  const int* bounds;  ///< (num_tokens, 2)
  int num_tokens, NH, NKV, HD;
  int window;  ///< kNever when there is none
  float scale, softcap;
  bool is_packed;

  /// Head `head` of a tensor (num_tokens, num_heads, HD).
  template <class U>
  __device__ __forceinline__ Rows<U> head_of(U* data, int num_heads, int head) const {
    return {data + int64_t{head} * HD, int64_t{num_heads} * HD, num_tokens, HD, is_packed};
  }
  __device__ __forceinline__ Rows<const T> head_of_qkv(int head) const { return head_of(qkv, NH + 2 * NKV, head); }

  __device__ __forceinline__ int first_key(int query) const {
    return std::max(bounds[2 * int64_t{query}], query - window + 1);
  }
  __device__ __forceinline__ int end_query(int key) const {
    return key + std::min(bounds[2 * int64_t{key} + 1] - key, window);
  }
  __device__ __forceinline__ Logit logit(float product) const {
    const float score = product * scale;
    if (softcap == 0) return {score * kLog2e, 1};
    const float t = tanhf(score / softcap);
    return {softcap * t * kLog2e, 1 - t * t};
  }
};

/// exp(s - lse), both in units of log 2. At most 1: huge scores round by more than 1.
__device__ __forceinline__ float softmax_weight(float logit, float lse) {
  return exp2f(fminf(logit - lse, 0.0f));
}

/// Shared memory of a block: `row_tiles` tiles of rows, then two stages of two tiles of columns, then the engine's
/// scratch, then fp32 of the kernel's own.
template <class Engine>
struct SharedLayout {
  using T = typename Engine::T;
  using RowTile = typename Engine::RowTile;
  using ColumnTile = typename Engine::ColumnTile;
  int row_tiles;

  constexpr int elements() const { return row_tiles * RowTile::kElements + 4 * ColumnTile::kElements; }
  constexpr size_t size_bytes(int own = 0) const {
    return elements() * sizeof(T) + Engine::kScratchBytes + own * sizeof(float);
  }
  __device__ __forceinline__ RowTile rows(int i) const { return {dynamic_shared<T>() + i * RowTile::kElements}; }
  __device__ __forceinline__ ColumnTile columns(int stage, int i) const {
    return {dynamic_shared<T>() + row_tiles * RowTile::kElements + (2 * stage + i) * ColumnTile::kElements};
  }
  __device__ __forceinline__ float* scratch() const {
    return reinterpret_cast<float*>(dynamic_shared<T>() + row_tiles * RowTile::kElements + 4 * ColumnTile::kElements);
  }
  __device__ __forceinline__ float* own() const { return scratch() + Engine::kScratchBytes / sizeof(float); }
};

/// The block's tile of queries and the keys that it walks over.
template <class Engine>
struct QueryTile {
  int head, begin;  ///< of the queries
  int key_begin, key_end, last_first_key;

  /// Long tiles first, heads innermost: those of one kv head run side by side.
  template <class T>
  static __device__ __forceinline__ QueryTile of_block(const Problem<T>& p) {
    QueryTile tile;
    tile.head = blockIdx.x % p.NH;
    tile.begin = (gridDim.x / p.NH - 1 - blockIdx.x / p.NH) * Engine::kRows;
    tile.key_end = std::min(tile.begin + Engine::kRows, p.num_tokens);
    tile.key_begin = p.first_key(tile.begin) / Engine::kN * Engine::kN;
    tile.last_first_key = p.first_key(tile.key_end - 1);
    return tile;
  }
  /// Whether some row does not see some key of [key, key + kN).
  __device__ __forceinline__ bool is_masked(int key) const {
    return key + Engine::kN - 1 > begin || key < last_first_key;
  }
};

// s_ij = logit(q_i . k_j);  m = max over the keys so far;  w_ij = 2^(s_ij - m), in the dtype for the second product
//   o_i = sum_j w_ij v_j / sum_j w_ij       lse_i = ln 2 (m + log2 sum_j w_ij)
// A new maximum scales what was summed by 2^(old m - m). A sink is a key that comes first and has no value.
template <class Engine>
__global__ void __launch_bounds__(kThreads)
    attention_forward_kernel(typename Engine::T* o, float* lse, const typename Engine::T* sinks,
                             Problem<typename Engine::T> p) {
  constexpr SharedLayout<Engine> shared{1};
  constexpr int kSlots = Engine::kRowSlots;
  const auto tile = QueryTile<Engine>::of_block(p);
  const int k_head = p.NH + tile.head / (p.NH / p.NKV);
  const auto load_keys = [&](int key, int stage) {
    attention::load_tile(shared.columns(stage, 0), p.head_of_qkv(k_head), key);
    attention::load_tile(shared.columns(stage, 1), p.head_of_qkv(k_head + p.NKV), key);
    cp_async_commit();
  };
  attention::load_tile(shared.rows(0), p.head_of_qkv(tile.head), tile.begin);
  load_keys(tile.key_begin, 0);

  int first_key[kSlots];
  float max[kSlots], sum[kSlots];  // sum: this lane's part
  typename Engine::Sums out = {};
  const float sink = sinks ? to_float(sinks[tile.head]) * kLog2e : kHidden;
  const float sink_weight = sinks && threadIdx.x % Engine::kRowLanes == 0 ? 1.0f : 0.0f;
#pragma unroll
  for (int r = 0; r < kSlots; r++) {
    const int query = tile.begin + Engine::row(r);
    first_key[r] = query < p.num_tokens ? p.first_key(query) : kNever;
    max[r] = sink, sum[r] = sink_weight;
  }
  int stage = 0;
  for (int key = tile.key_begin; key < tile.key_end; key += Engine::kN, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this stage is there, and all threads have left the other one
    if (key + Engine::kN < tile.key_end) load_keys(key + Engine::kN, stage ^ 1);

    typename Engine::Scores s;
    Engine::multiply(s, shared.rows(0), shared.columns(stage, 0));
    const bool is_masked = tile.is_masked(key);
    float new_max[kSlots], base[kSlots], decay[kSlots];
#pragma unroll
    for (int r = 0; r < kSlots; r++) new_max[r] = max[r];
#pragma unroll
    for (int n = 0; n < Engine::kScoreTiles; n++) {
#pragma unroll
      for (int e = 0; e < Engine::kPerTile; e++) {
        const int r = Engine::row_slot(e), j = key + Engine::column(n, e);
        s[n][e] = p.logit(s[n][e]).value;
        if (is_masked && (j < first_key[r] || j > tile.begin + Engine::row(r))) s[n][e] = kHidden;
        new_max[r] = fmaxf(new_max[r], s[n][e]);
      }
    }
#pragma unroll
    for (int r = 0; r < kSlots; r++) {
      new_max[r] = attention::row_max<Engine>(new_max[r]);
      base[r] = new_max[r] == kHidden ? 0.0f : new_max[r];  // nothing seen yet: all weights are 2^-infinity
      decay[r] = exp2f(max[r] - base[r]);
      max[r] = new_max[r];
      sum[r] *= decay[r];
    }
#pragma unroll
    for (int n = 0; n < Engine::kScoreTiles; n++) {
#pragma unroll
      for (int e = 0; e < Engine::kPerTile; e++) {
        const int r = Engine::row_slot(e);
        s[n][e] = exp2f(s[n][e] - base[r]);
        sum[r] += s[n][e];
      }
    }
#pragma unroll
    for (int n = 0; n < Engine::kSumTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) out[n][e] *= decay[Engine::row_slot(e)];
    }
    Engine::add_product(out, s, shared.columns(stage, 1), shared.scratch());
  }

  float inverse[kSlots];
#pragma unroll
  for (int r = 0; r < kSlots; r++) {
    const float total = attention::row_sum<Engine>(sum[r]);
    inverse[r] = 1.0f / total;
    const int query = tile.begin + Engine::row(r);
    if (query < p.num_tokens && threadIdx.x % Engine::kRowLanes == 0) {
      lse[int64_t{tile.head} * p.num_tokens + query] = max[r] * kLn2 + logf(total);
    }
  }
  __syncthreads();  // q is read no more
  attention::put_sums<Engine>(shared.rows(0), out, inverse);
  __syncthreads();
  attention::store_tile(p.head_of(o, p.NH, tile.head), tile.begin, shared.rows(0));
}

constexpr int kDotLanes = 8;  // of a row

// D (NH, T) = do_i . o_i, both (T, NH, HD): 8 lanes a row. With w_ij = exp(s_ij - lse_i) the kernels below have
//   dv_j = sum_i w_ij do_i     ds_ij = scale w_ij (do_i . v_j - D_i) d s_ij / d (scale q_i . k_j)
//   dq_i = sum_j ds_ij k_j     dk_j = sum_i ds_ij q_i
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_row_dot_kernel(float* D, const T* d_o, const T* o, int num_tokens, int NH, int HD, bool is_packed) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kDotLanes;
  const bool exists = row < int64_t{num_tokens} * NH;
  float sum = 0;
  for (int c = threadIdx.x % kDotLanes * kWidth; exists && c < HD; c += kDotLanes * kWidth) {
    const T *a = d_o + row * HD + c, *b = o + row * HD + c;
    if (is_packed) {
      const Pack<T, kWidth> ap = load_pack<kWidth>(a), bp = load_pack<kWidth>(b);
      for (int k = 0; k < kWidth; k++) sum += to_float(ap.element[k]) * to_float(bp.element[k]);
    } else {
      for (int k = 0; k < kWidth && c + k < HD; k++) sum += to_float(a[k]) * to_float(b[k]);
    }
  }
#pragma unroll
  for (int distance = kDotLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
  if (exists && threadIdx.x % kDotLanes == 0) D[row % NH * num_tokens + row / NH] = sum;
}

constexpr int kSinkThreads = 256;

// d_sinks (NH) -= sum_i exp(sink - lse_i) D_i: a head a block. lse, D (NH, T); packs of kWidth tokens.
template <class T, int kWidth>
__global__ void __launch_bounds__(kSinkThreads)
    attention_sink_gradient_kernel(float* d_sinks, const T* sinks, const float* lse, const float* D, int num_tokens) {
  const float sink = to_float(sinks[blockIdx.x]);
  const int64_t row = int64_t{blockIdx.x} * num_tokens;
  float sum = 0;
  for (int64_t t = threadIdx.x * kWidth; t < num_tokens; t += kSinkThreads * kWidth) {
    const Pack<float, kWidth> lp = load_pack<kWidth>(lse + row + t), dp = load_pack<kWidth>(D + row + t);
    for (int k = 0; k < kWidth; k++) sum += softmax_weight(sink * kLog2e, lp.element[k] * kLog2e) * dp.element[k];
  }
  sum = block_sum<kSinkThreads>(sum);
  if (threadIdx.x == 0) d_sinks[blockIdx.x] -= sum;
}

// dq of a tile of queries.
template <class Engine>
__global__ void __launch_bounds__(kThreads)
    attention_backward_queries_kernel(typename Engine::T* dqkv, const typename Engine::T* d_o, const float* lse,
                                      const float* D, Problem<typename Engine::T> p) {
  constexpr SharedLayout<Engine> shared{2};
  constexpr int kSlots = Engine::kRowSlots;
  const auto tile = QueryTile<Engine>::of_block(p);
  const int k_head = p.NH + tile.head / (p.NH / p.NKV);
  const auto load_keys = [&](int key, int stage) {
    attention::load_tile(shared.columns(stage, 0), p.head_of_qkv(k_head), key);
    attention::load_tile(shared.columns(stage, 1), p.head_of_qkv(k_head + p.NKV), key);
    cp_async_commit();
  };
  attention::load_tile(shared.rows(0), p.head_of_qkv(tile.head), tile.begin);
  attention::load_tile(shared.rows(1), p.head_of(d_o, p.NH, tile.head), tile.begin);
  load_keys(tile.key_begin, 0);

  int first_key[kSlots];
  float row_lse[kSlots], row_D[kSlots], scale[kSlots];
  typename Engine::Sums dq = {};
#pragma unroll
  for (int r = 0; r < kSlots; r++) {
    const int query = tile.begin + Engine::row(r);
    const int64_t at = int64_t{tile.head} * p.num_tokens + query;
    const bool exists = query < p.num_tokens;
    first_key[r] = exists ? p.first_key(query) : kNever;
    row_lse[r] = exists ? lse[at] * kLog2e : 0.0f;
    row_D[r] = exists ? D[at] : 0.0f;
    scale[r] = p.scale;
  }
  int stage = 0;
  for (int key = tile.key_begin; key < tile.key_end; key += Engine::kN, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this stage is there, and all threads have left the other one
    if (key + Engine::kN < tile.key_end) load_keys(key + Engine::kN, stage ^ 1);

    typename Engine::Scores s, dw;
    Engine::multiply(s, shared.rows(0), shared.columns(stage, 0));
    Engine::multiply(dw, shared.rows(1), shared.columns(stage, 1));
    const bool is_masked = tile.is_masked(key);
#pragma unroll
    for (int n = 0; n < Engine::kScoreTiles; n++) {
#pragma unroll
      for (int e = 0; e < Engine::kPerTile; e++) {
        const int r = Engine::row_slot(e), j = key + Engine::column(n, e);
        const Logit logit = p.logit(s[n][e]);
        const bool is_hidden = is_masked && (j < first_key[r] || j > tile.begin + Engine::row(r));
        const float w = is_hidden ? 0.0f : softmax_weight(logit.value, row_lse[r]);
        s[n][e] = w * (dw[n][e] - row_D[r]) * logit.slope;
      }
    }
    Engine::add_product(dq, s, shared.columns(stage, 0), shared.scratch());
  }
  __syncthreads();  // q is read no more
  attention::put_sums<Engine>(shared.rows(0), dq, scale);
  __syncthreads();
  attention::store_tile(p.head_of(dqkv, p.NH + 2 * p.NKV, tile.head), tile.begin, shared.rows(0));
}

// dk and dv of a tile of keys of one kv head. Rows are keys and columns queries: s and ds are transposed. The query
// heads of the kv head come in turn, each with the tiles of queries that see these keys.
template <class Engine>
__global__ void __launch_bounds__(kThreads)
    attention_backward_keys_kernel(typename Engine::T* dqkv, const typename Engine::T* d_o, const float* lse,
                                   const float* D, Problem<typename Engine::T> p) {
  constexpr SharedLayout<Engine> shared{2};
  constexpr int kSlots = Engine::kRowSlots, kN = Engine::kN;
  static_assert(Engine::kRows % kN == 0);
  const int kv = blockIdx.x % p.NKV, group = p.NH / p.NKV, begin = blockIdx.x / p.NKV * Engine::kRows;
  const int num_heads = p.NH + 2 * p.NKV, k_head = p.NH + kv, v_head = k_head + p.NKV;
  const int last = std::min(begin + Engine::kRows, p.num_tokens) - 1;
  const int first_end_query = p.end_query(begin);  // end_query only grows with the key
  const int num_query_tiles = (p.end_query(last) - begin + kN - 1) / kN, num_tiles = group * num_query_tiles;
  // lse and D of the queries of a stage: (2, 2, kN)
  const auto column_lse = [&](int stage) { return shared.own() + stage * 2 * kN; };
  const auto column_D = [&](int stage) { return shared.own() + (stage * 2 + 1) * kN; };
  const auto first_query = [&](int i) { return begin + i % num_query_tiles * kN; };
  const auto load_queries = [&](int i, int stage) {
    const int head = kv * group + i / num_query_tiles;
    attention::load_tile(shared.columns(stage, 0), p.head_of_qkv(head), first_query(i));
    attention::load_tile(shared.columns(stage, 1), p.head_of(d_o, p.NH, head), first_query(i));
    cp_async_commit();
    if (threadIdx.x < kN) {
      const int c = threadIdx.x, query = first_query(i) + c;
      const int64_t at = int64_t{head} * p.num_tokens + query;
      column_lse(stage)[c] = query < p.num_tokens ? lse[at] * kLog2e : 0.0f;
      column_D(stage)[c] = query < p.num_tokens ? D[at] : 0.0f;
    }
  };
  attention::load_tile(shared.rows(0), p.head_of_qkv(k_head), begin);
  attention::load_tile(shared.rows(1), p.head_of_qkv(v_head), begin);
  load_queries(0, 0);

  int end_query[kSlots];
  float k_scale[kSlots], v_scale[kSlots];
  typename Engine::Sums dk = {}, dv = {};
#pragma unroll
  for (int r = 0; r < kSlots; r++) {
    const int key = begin + Engine::row(r);
    end_query[r] = key < p.num_tokens ? p.end_query(key) : 0;
    k_scale[r] = p.scale, v_scale[r] = 1;
  }
  for (int i = 0; i < num_tiles; i++) {
    const int stage = i % 2, query = first_query(i);
    cp_async_wait<0>();
    __syncthreads();  // this stage is there, and all threads have left the other one
    if (i + 1 < num_tiles) load_queries(i + 1, stage ^ 1);

    typename Engine::Scores w, ds;
    Engine::multiply(w, shared.rows(0), shared.columns(stage, 0));
    Engine::multiply(ds, shared.rows(1), shared.columns(stage, 1));
    const bool is_masked = query <= last || query + kN > first_end_query;
#pragma unroll
    for (int n = 0; n < Engine::kScoreTiles; n++) {
#pragma unroll
      for (int e = 0; e < Engine::kPerTile; e++) {
        const int r = Engine::row_slot(e), c = Engine::column(n, e);
        const Logit logit = p.logit(w[n][e]);
        const bool is_hidden = is_masked && (query + c < begin + Engine::row(r) || query + c >= end_query[r]);
        w[n][e] = is_hidden ? 0.0f : softmax_weight(logit.value, column_lse(stage)[c]);
        ds[n][e] = w[n][e] * (ds[n][e] - column_D(stage)[c]) * logit.slope;
      }
    }
    Engine::add_product(dv, w, shared.columns(stage, 1), shared.scratch());
    Engine::add_product(dk, ds, shared.columns(stage, 0), shared.scratch());
  }
  __syncthreads();  // k and v are read no more
  attention::put_sums<Engine>(shared.rows(0), dk, k_scale);
  attention::put_sums<Engine>(shared.rows(1), dv, v_scale);
  __syncthreads();
  attention::store_tile(p.head_of(dqkv, num_heads, k_head), begin, shared.rows(0));
  attention::store_tile(p.head_of(dqkv, num_heads, v_head), begin, shared.rows(1));
}

// ---- tile sizes: no more registers than a thread has, at most 96 KiB of shared memory

template <class T, int kHD>
struct Engines;

template <int kHD>
struct Engines<bf16, kHD> {
  static constexpr int kBackwardColumns = kHD <= 64 ? 64 : kHD <= 128 ? 32 : 16;
  using Forward = attention::MmaEngine<kHD, kHD <= 128 ? 64 : 32, 1>;
  using Queries = attention::MmaEngine<kHD, kBackwardColumns, 1>;
  using Keys = attention::MmaEngine<kHD, kBackwardColumns, kHD <= 128 ? 1 : 2>;
};

template <int kHD>
struct Engines<float, kHD> {
  using Forward = attention::FmaEngine<kHD, kHD <= 128 ? 16 : 8>;
  using Queries = Forward;
  using Keys = Forward;
};

constexpr size_t kMaxShared = 96 << 10;
constexpr int kMaxHeadDim = 256;

/// Calls `op(Engines<T, kHD>())` with the narrowest kHD that holds the head.
template <class Op>
void dispatch(DType dtype, int64_t head_dim, Op&& op) {
  CHECK(head_dim <= kMaxHeadDim, "attention: heads of width {}, the CUDA kernels allow {}", head_dim, kMaxHeadDim);
  switch (dtype) {
    case DType::F32:
      if (head_dim <= 32) return op(Engines<float, 32>());
      if (head_dim <= 64) return op(Engines<float, 64>());
      if (head_dim <= 128) return op(Engines<float, 128>());
      return op(Engines<float, 256>());
    case DType::BF16:
      if (head_dim <= 32) return op(Engines<bf16, 32>());
      if (head_dim <= 64) return op(Engines<bf16, 64>());
      if (head_dim <= 96) return op(Engines<bf16, 96>());
      if (head_dim <= 128) return op(Engines<bf16, 128>());
      return op(Engines<bf16, 256>());
    default:
      fail("attention: dtype {} is not supported on the CUDA device, use F32 or BF16", name_of(dtype));
  }
}

template <class T>
Problem<T> make_problem(ConstTensor qkv, ConstTensor bounds, const AttentionShape& s, bool is_packed) {
  constexpr int64_t kMaxTokens = int64_t{1} << 30;  // counted in 32 bits; offsets of rows take 64
  CHECK(qkv.shape[0] <= kMaxTokens, "attention: {} tokens, the CUDA kernels allow {}", qkv.shape[0], kMaxTokens);
  return {qkv.as<T>(),
          bounds.as<int32_t>(),
          static_cast<int>(qkv.shape[0]),
          static_cast<int>(s.num_heads),
          static_cast<int>(s.num_kv_heads),
          static_cast<int>(s.head_dim),
          s.window > 0 ? static_cast<int>(std::min<int64_t>(s.window, kNever)) : kNever,
          static_cast<float>(s.scale),
          static_cast<float>(s.softcap),
          is_packed};
}

template <class Engine>
int64_t num_row_tiles(int64_t num_tokens) {
  return ceil_div(num_tokens, int64_t{Engine::kRows});
}

template <class Engine, class Kernel, class... Arguments>
void launch_on_tiles(Device& device, int64_t num_blocks, int row_tiles, int own_floats, Kernel kernel,
                     Arguments... arguments) {
  const size_t shared_bytes = SharedLayout<Engine>{row_tiles}.size_bytes(own_floats);
  CHECK(shared_bytes <= kMaxShared, "attention: {} bytes of shared memory", shared_bytes);
  launch(device, {num_blocks, kThreads, shared_bytes}, kernel, arguments...);
}

template <class T>
void row_dot(Device& device, float* D, ConstTensor d_o, ConstTensor o, const Problem<T>& p) {
  const int64_t blocks = ceil_div(int64_t{p.num_tokens} * p.NH, int64_t{kThreads / kDotLanes});
  launch(device, {blocks, kThreads}, attention_row_dot_kernel<T>, D, d_o.as<T>(), o.as<T>(), p.num_tokens, p.NH, p.HD,
         p.is_packed);
}

}  // namespace

size_t attention_workspace_bytes_cuda(const AttentionShape& shape, int64_t T) {
  return static_cast<size_t>(shape.num_heads * T) * sizeof(float);  // D
}

void attention_forward_cuda(Device& device, Tensor o, Tensor lse, ConstTensor qkv, ConstTensor bounds,
                            const AttentionShape& shape, ConstTensor sinks) {
  dispatch(qkv.dtype, shape.head_dim, [&]<class T, int kHD>(Engines<T, kHD>) {
    using Engine = typename Engines<T, kHD>::Forward;
    const auto p = make_problem<T>(qkv, bounds, shape, is_packable<T>(shape.head_dim, {o.data, qkv.data}));
    launch_on_tiles<Engine>(device, num_row_tiles<Engine>(p.num_tokens) * p.NH, 1, 0, attention_forward_kernel<Engine>,
                            o.as<T>(), lse.as<float>(), sinks ? sinks.as<T>() : nullptr, p);
  });
}

void attention_backward_cuda(Device& device, Tensor dqkv, ConstTensor d_o, ConstTensor qkv, ConstTensor o,
                             ConstTensor lse, ConstTensor bounds, const AttentionShape& shape, Tensor workspace,
                             ConstTensor sinks, Tensor d_sinks) {
  dispatch(qkv.dtype, shape.head_dim, [&]<class T, int kHD>(Engines<T, kHD>) {
    using Queries = typename Engines<T, kHD>::Queries;
    using Keys = typename Engines<T, kHD>::Keys;
    const bool is_packed = is_packable<T>(shape.head_dim, {dqkv.data, d_o.data, qkv.data, o.data});
    const auto p = make_problem<T>(qkv, bounds, shape, is_packed);
    float* D = static_cast<float*>(workspace.data);
    row_dot<T>(device, D, d_o, o, p);
    if (sinks) {
      const bool is_packed_row = is_packable<float>(p.num_tokens, {lse.data, D});
      launch(
          device, {p.num_tokens > 0 ? p.NH : 0, kSinkThreads},
          is_packed_row ? attention_sink_gradient_kernel<T, kPackWidth<float>> : attention_sink_gradient_kernel<T, 1>,
          d_sinks.as<float>(), sinks.as<T>(), lse.as<float>(), D, p.num_tokens);
    }
    launch_on_tiles<Keys>(device, num_row_tiles<Keys>(p.num_tokens) * p.NKV, 2, 4 * Keys::kN,
                          attention_backward_keys_kernel<Keys>, dqkv.as<T>(), d_o.as<T>(), lse.as<float>(), D, p);
    launch_on_tiles<Queries>(device, num_row_tiles<Queries>(p.num_tokens) * p.NH, 2, 0,
                             attention_backward_queries_kernel<Queries>, dqkv.as<T>(), d_o.as<T>(), lse.as<float>(), D,
                             p);
  });
}
