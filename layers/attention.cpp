// Front doors and the CPU side of attention. Contract and formulas: attention.h.
//
// A task is one block of queries of one document and one kv head: the G query heads that share the kv head are
// stacked, row r = (query r / G, head r % G), at most about kBlockRows of them. It walks over the blocks of kBlockKeys
// keys that the mask leaves. Rows go by strips of kTileCols, which lie across the lanes of a vector: scores are kept
// transposed, (key, row), so that the softmax needs no sums across lanes, and a strip skips the tiles of keys
// that none of its rows sees. Blocks are counted from the start of the document and every sum has a fixed order, so
// that bits depend neither on the place of a document in the batch nor on the number of threads.
#include "layers/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "layers/attention_cudnn.h"
#include "layers/core/gemm_tile.h"
#include "layers/core/integer.h"
#include "layers/core/math.h"
#include "layers/core/parallel.h"

namespace {

constexpr int64_t kBlockRows = 192;             // a multiple of every kTileCols
constexpr int64_t kBlockKeys = 96;              // a multiple of kTileRows
constexpr int64_t kStripKeys = kBlockKeys + 1;  // keys from one strip of weights to the next
constexpr size_t kAlignment = 64;

/// Everything that follows from the shape alone.
struct Geometry {
  int64_t NH, NKV, HD, G;
  int64_t qkv_stride;     ///< elements from one token to the next
  int64_t block_queries;  ///< queries of a task
  int64_t window;         ///< INT64_MAX / 4 when there is none

  explicit Geometry(const AttentionShape& s)
      : NH(s.num_heads),
        NKV(s.num_kv_heads),
        HD(s.head_dim),
        G(NH / NKV),
        qkv_stride((NH + 2 * NKV) * HD),
        block_queries(std::max<int64_t>(1, kBlockRows / G)),
        window(s.window > 0 ? s.window : std::numeric_limits<int64_t>::max() / 4) {}

  template <class T>
  int64_t padded_rows() const {
    return round_up(block_queries * G, kTileCols<T>);
  }
  template <class T>
  int64_t padded_width() const {
    return round_up(HD, kTileCols<T>);
  }
};

/// A task: queries [q_begin, q_begin + num_queries) of a document, all positions counted from its start.
struct QueryBlock {
  int64_t token;  ///< of the document's start
  int64_t length, kv_head, q_begin, num_queries;
  int64_t index;  ///< among all tasks
  bool is_last;   ///< of its document and head
  int64_t rows;   ///< num_queries * G

  int64_t first_key_block(const Geometry& g) const { return std::max<int64_t>(0, q_begin - g.window + 1) / kBlockKeys; }
  int64_t end_key_block() const { return ceil_div(q_begin + num_queries, kBlockKeys); }
};

/// Walks over the tasks in their order: documents in turn, the last block of a document (the longest) first, kv heads
/// innermost. `seek` goes forward only.
class TaskCursor {
 public:
  TaskCursor(const Geometry& g, std::span<const int64_t> cu_seqlens) : g_(g), cu_(cu_seqlens) {}

  bool seek(int64_t index, QueryBlock& task) {
    while (document_ + 1 < cu_.size() && index >= first_ + num_tasks()) first_ += num_tasks(), document_++;
    if (document_ + 1 >= cu_.size()) return false;
    const int64_t begin = cu_[document_], length = cu_[document_ + 1] - begin;
    const int64_t from_last = (index - first_) / g_.NKV;
    const int64_t q_begin = (ceil_div(length, g_.block_queries) - 1 - from_last) * g_.block_queries;
    const int64_t num_queries = std::min(g_.block_queries, length - q_begin);
    task = {begin, length, (index - first_) % g_.NKV, q_begin, num_queries, index, from_last == 0, num_queries * g_.G};
    return true;
  }

 private:
  int64_t num_tasks() const { return ceil_div(cu_[document_ + 1] - cu_[document_], g_.block_queries) * g_.NKV; }

  const Geometry& g_;
  std::span<const int64_t> cu_;
  size_t document_ = 0;
  int64_t first_ = 0;
};

/// Rows [row, row + kTileCols) of a task against one block of keys.
struct Strip {
  int64_t first_query, last_query;  ///< of its rows
  int64_t key_begin, key_end;       ///< tiles of keys, counted from the block's start, that some row sees
  bool is_masked;                   ///< some row does not see some of these keys
};

template <class T>
Strip make_strip(const Geometry& g, const QueryBlock& task, int64_t row, int64_t block_begin) {
  Strip s;
  s.first_query = task.q_begin + row / g.G;
  s.last_query = task.q_begin + (std::min(row + kTileCols<T>, task.rows) - 1) / g.G;
  const int64_t block_end = std::min(block_begin + kBlockKeys, task.length);
  const int64_t begin = std::max(block_begin, s.first_query - g.window + 1);
  const int64_t end = std::min(block_end, s.last_query + 1);
  s.key_begin = (begin - block_begin) / kTileRows * kTileRows;
  s.key_end = end > begin ? round_up(end - block_begin, kTileRows) : s.key_begin;
  s.is_masked = block_begin + s.key_end - 1 > s.first_query || block_begin + s.key_begin <= s.last_query - g.window;
  return s;
}

/// Cuts the scratch of one thread out of the workspace; only measures when there is none.
class ScratchCutter {
 public:
  explicit ScratchCutter(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t numel) {
    char* at = base_ ? base_ + size_bytes_ : nullptr;
    size_bytes_ += round_up(numel * static_cast<int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(at);
  }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  char* base_;
  int64_t size_bytes_ = 0;
};

template <class T>
struct ForwardScratch {
  T *q, *o, *max, *sum, *p, *k, *v;
  int64_t size_bytes;

  ForwardScratch(const Geometry& g, char* base) {
    const int64_t rows = g.padded_rows<T>(), width = g.padded_width<T>();
    ScratchCutter cut(base);
    q = cut.take<T>(rows * g.HD);                // strips of rows: (HD, kTileCols), times scale
    o = cut.take<T>(rows * width);               // (rows, width), not yet divided by sum
    max = cut.take<T>(rows);                     // of the scores so far
    sum = cut.take<T>(rows);                     // of exp(score - max)
    p = cut.take<T>(kBlockKeys * kTileCols<T>);  // one strip of rows: (keys, kTileCols)
    k = cut.take<T>(kBlockKeys * g.HD);          // strips of keys: (HD, kTileRows)
    v = cut.take<T>(kBlockKeys * width);         // strips of width: (keys, kTileCols)
    size_bytes = cut.size_bytes();
  }
};

template <class T>
struct BackwardScratch {
  T *q, *q_rows, *d_o, *d_o_rows, *dq, *lse, *d, *p, *ds, *k, *k_rows, *v;
  Strip* strips;
  int64_t size_bytes;

  BackwardScratch(const Geometry& g, char* base) {
    const int64_t rows = g.padded_rows<T>(), width = g.padded_width<T>();
    ScratchCutter cut(base);
    q = cut.take<T>(rows * g.HD);          // strips of rows: (HD, kTileCols), times scale
    q_rows = cut.take<T>(rows * width);    // strips of width: (rows, kTileCols)
    d_o = cut.take<T>(rows * g.HD);        // like q, without scale
    d_o_rows = cut.take<T>(rows * width);  // like q_rows
    dq = cut.take<T>(rows * width);        // (rows, width)
    lse = cut.take<T>(rows);
    d = cut.take<T>(rows);                     // do . o
    p = cut.take<T>(kStripKeys * rows);        // strips of rows: (keys, kTileCols)
    ds = cut.take<T>(kStripKeys * rows);       // like p
    k = cut.take<T>(kBlockKeys * g.HD);        // strips of keys: (HD, kTileRows)
    k_rows = cut.take<T>(kBlockKeys * width);  // strips of width: (keys, kTileCols)
    v = cut.take<T>(kBlockKeys * g.HD);        // like k
    strips = cut.take<Strip>(rows / kTileCols<T>);
    size_bytes = cut.size_bytes();
  }
};

template <class T>
int64_t scratch_bytes(const Geometry& g) {
  return std::max(ForwardScratch<T>(g, nullptr).size_bytes, BackwardScratch<T>(g, nullptr).size_bytes);
}

/// Rows of a task in a (T, heads, HD) tensor: row r is at base + (r / G) * token_stride + (r % G) * HD.
template <class T>
struct RowView {
  T* base;
  int64_t token_stride, G, HD;
  T* operator()(int64_t r) const { return base + r / G * token_stride + r % G * HD; }
};

/// to: strips of kTileCols rows, (HD, kTileCols) each, the last one filled with zeros.
template <class T>
void pack_row_strips(T* to, const RowView<const T>& rows, int64_t num_rows, int64_t HD) {
  constexpr int kCols = kTileCols<T>;
  for (int64_t r0 = 0; r0 < num_rows; r0 += kCols) {
    const int count = static_cast<int>(std::min<int64_t>(kCols, num_rows - r0));
    pack_transposed<kCols>(to + r0 * HD, HD, count, [&](int r) { return rows(r0 + r); });
  }
}

/// Asks for keys that are needed one block later: rows far apart, which the hardware does not foresee.
template <class T>
void prefetch_keys(const T* keys, int64_t stride, int64_t num_keys, int64_t HD) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t k = 0; k < num_keys; k++) {
    for (int64_t c = 0; c < HD; c += kLine) __builtin_prefetch(keys + k * stride + c, 0, 2);
  }
}

/// to: strips of kTileRows keys, (HD, kTileRows) each, the last one filled with zeros.
template <class T>
void pack_key_strips(T* to, const T* keys, int64_t stride, int64_t num_keys, int64_t HD) {
  for (int64_t k0 = 0; k0 < num_keys; k0 += kTileRows) {
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, num_keys - k0));
    pack_transposed<kTileRows>(to + k0 * HD, HD, count, [&](int r) { return keys + (k0 + r) * stride; });
  }
}

/// to (keys, kTileCols) = key strips . row strip over HD, keys [begin, end).
template <class T>
void multiply_strip(T* to, const T* key_strips, const T* row_strip, int64_t HD, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; k += kTileRows) {
    Tile<T> tile;
    tile.template multiply<1, kTileRows>(HD, key_strips + k * HD, row_strip);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; v++) store(to + (k + r) * kTileCols<T> + v * kLanes<T>, tile.sum[r][v]);
    }
  }
}

/// out (kTileCols rows, width) = decay * out + weights^T . values: weights (keys, kTileCols), values in strips of
/// `values_depth` keys. decay: one factor a row, or null for 1.
template <class T, int kRows>
void add_row_tile(T* out, int64_t width, const T* decay, const T* weights, const T* values, int64_t values_depth,
                  int64_t depth) {
  for (int64_t c = 0; c < width; c += kTileCols<T>) {
    Tile<T, kRows> tile;
    tile.template multiply<1, kTileCols<T>>(depth, weights, values + c * values_depth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; v++) {
        T* at = out + r * width + c + v * kLanes<T>;
        store(at, decay ? decay[r] * load(at) + tile.sum[r][v] : load(at) + tile.sum[r][v]);
      }
    }
  }
}
template <class T>
void add_strip(T* out, int64_t width, const T* decay, const T* weights, const T* values, int64_t values_depth,
               int64_t depth) {
  constexpr int kCols = kTileCols<T>, kRest = kCols % kTileRows;
  int r = 0;
  for (; r + kTileRows <= kCols; r += kTileRows) {
    add_row_tile<T, kTileRows>(out + r * width, width, decay ? decay + r : nullptr, weights + r, values, values_depth,
                               depth);
  }
  if constexpr (kRest > 0) {
    add_row_tile<T, kRest>(out + r * width, width, decay ? decay + r : nullptr, weights + r, values, values_depth,
                           depth);
  }
}

template <class T>
void cap_scores(T* scores, const Strip& s, T softcap) {
  constexpr int kCols = kTileCols<T>;
  for (int64_t i = s.key_begin * kCols; i < s.key_end * kCols; i++) {
    scores[i] = softcap * fast_tanh(scores[i] / softcap);
  }
}

/// Sets what the rows from `row` on do not see of a strip (keys, kTileCols).
template <class T>
void hide(T* values, const Strip& s, const Geometry& g, const QueryBlock& task, int64_t row, int64_t block_begin,
          T value) {
  constexpr int kCols = kTileCols<T>;
  if (!s.is_masked) return;
  for (int lane = 0; lane < kCols; lane++) {
    const int64_t last = task.q_begin + (row + lane) / g.G - block_begin, first = last - g.window + 1;
    for (int64_t k = s.key_begin; k < std::min(first, s.key_end); k++) values[k * kCols + lane] = value;
    for (int64_t k = std::max(s.key_begin, last + 1); k < s.key_end; k++) values[k * kCols + lane] = value;
  }
}

/// scores -> exp(score - max) with the new maximum; decay = exp(old max - new max); sum = decay * sum + weights.
/// A hidden score is -infinity; fast_exp makes a tiny weight of it, too small to count in a sum.
template <class T>
void softmax_strip(T* scores, int64_t begin, int64_t end, T* max, T* sum, T* decay) {
  constexpr int kCols = kTileCols<T>;
  Vec<T> top[kTileVecs], total[kTileVecs] = {};
  for (int v = 0; v < kTileVecs; v++) top[v] = load(max + v * kLanes<T>);
  for (int64_t k = begin; k < end; k++) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVecs; v++) {
      const Vec<T> x = load(scores + k * kCols + v * kLanes<T>);
      top[v] = x > top[v] ? x : top[v];
    }
  }
  alignas(kAlignment) T new_max[kCols];
  for (int v = 0; v < kTileVecs; v++) store(new_max + v * kLanes<T>, top[v]);
  for (int64_t k = begin; k < end; k++) {
    T* row = scores + k * kCols;
#pragma omp simd
    for (int lane = 0; lane < kCols; lane++) row[lane] = fast_exp(row[lane] - new_max[lane]);
#pragma GCC unroll 4
    for (int v = 0; v < kTileVecs; v++) total[v] += load(row + v * kLanes<T>);
  }
  alignas(kAlignment) T added[kCols];
  for (int v = 0; v < kTileVecs; v++) store(added + v * kLanes<T>, total[v]);
#pragma omp simd
  for (int lane = 0; lane < kCols; lane++) {
    decay[lane] = fast_exp(max[lane] - new_max[lane]);
    sum[lane] = decay[lane] * sum[lane] + added[lane];
    max[lane] = new_max[lane];
  }
}

/// Tensors and numbers of one call.
template <class T>
struct Forward {
  Geometry g;
  T scale, softcap;
  int64_t num_tokens;
  T *o, *lse;
  const T *qkv, *sinks;  ///< sinks: null, or (NH)

  void run(const QueryBlock& task, const ForwardScratch<T>& s) const {
    constexpr int kCols = kTileCols<T>;
    const int64_t width = g.padded_width<T>(), rows = round_up(task.rows, kCols);
    const T* document = qkv + task.token * g.qkv_stride;
    const RowView<const T> q{document + task.q_begin * g.qkv_stride + task.kv_head * g.G * g.HD, g.qkv_stride, g.G,
                             g.HD};
    pack_row_strips(s.q, q, task.rows, g.HD);
    for (int64_t i = 0; i < rows * g.HD; i++) s.q[i] *= scale;
    std::fill_n(s.o, rows * width, T(0));
    std::fill_n(s.sum, rows, sinks ? T(1) : T(0));  // the sink's weight, relative to itself
    std::fill_n(s.max, rows, std::numeric_limits<T>::lowest());
    for (int64_t r = 0; sinks && r < rows; r++) s.max[r] = sinks[task.kv_head * g.G + r % g.G];
    for (int64_t block = task.first_key_block(g); block < task.end_key_block(); block++) {
      const int64_t begin = block * kBlockKeys, num_keys = std::min(kBlockKeys, task.length - begin);
      const T* k = document + begin * g.qkv_stride + (g.NH + task.kv_head) * g.HD;
      const T* v = k + g.NKV * g.HD;
      pack_key_strips(s.k, k, g.qkv_stride, num_keys, g.HD);
      pack_rows<kCols>(s.v, num_keys, num_keys, g.HD, [&](int64_t j) { return v + j * g.qkv_stride; });
      if (block + 1 < task.end_key_block()) {
        const int64_t num_next = std::min(kBlockKeys, task.length - begin - kBlockKeys);
        prefetch_keys(k + kBlockKeys * g.qkv_stride, g.qkv_stride, num_next, g.HD);
        prefetch_keys(v + kBlockKeys * g.qkv_stride, g.qkv_stride, num_next, g.HD);
      }
      for (int64_t row = 0; row < rows; row += kCols) add_keys(task, s, row, begin, num_keys);
    }
    write(task, s);
  }

 private:
  void add_keys(const QueryBlock& task, const ForwardScratch<T>& s, int64_t row, int64_t block_begin,
                int64_t num_keys) const {
    constexpr int kCols = kTileCols<T>;
    const int64_t width = g.padded_width<T>();
    const Strip strip = make_strip<T>(g, task, row, block_begin);
    if (strip.key_begin == strip.key_end) return;
    multiply_strip(s.p, s.k, s.q + row * g.HD, g.HD, strip.key_begin, strip.key_end);
    if (softcap > 0) cap_scores(s.p, strip, softcap);
    hide(s.p, strip, g, task, row, block_begin, -std::numeric_limits<T>::infinity());
    alignas(kAlignment) T decay[kCols];
    softmax_strip(s.p, strip.key_begin, strip.key_end, s.max + row, s.sum + row, decay);
    hide(s.p, strip, g, task, row, block_begin, T(0));
    add_strip(s.o + row * width, width, decay, s.p + strip.key_begin * kCols, s.v + strip.key_begin * kCols, num_keys,
              std::min(strip.key_end, num_keys) - strip.key_begin);
  }

  void write(const QueryBlock& task, const ForwardScratch<T>& s) const {
    const int64_t width = g.padded_width<T>(), first_token = task.token + task.q_begin, first_head = task.kv_head * g.G;
    const RowView<T> out{o + (first_token * g.NH + first_head) * g.HD, g.NH * g.HD, g.G, g.HD};
    for (int64_t r = 0; r < task.rows; r++) {
      const T* from = s.o + r * width;
      T* to = out(r);
      const T inverse = T(1) / s.sum[r];
      for (int64_t c = 0; c < g.HD; c++) to[c] = from[c] * inverse;
      lse[(first_head + r % g.G) * num_tokens + first_token + r / g.G] = s.max[r] + std::log(s.sum[r]);
    }
  }
};

/// With p_ij = exp(s_ij - lse_i), the forward's softmax, and D_i = do_i . o_i:
///   dv_j += p_ij do_i     ds_ij = scale p_ij (do_i . v_j - D_i), times 1 - (s_ij / cap)^2 with a softcap
///   dq_i += ds_ij k_j     dk_j += ds_ij q_i
/// A task owns its dq. Tasks of one document and head add to dk_j and dv_j in their own order, last block first: each
/// waits at a block of keys until its predecessor has left it.
template <class T>
struct Backward {
  Geometry g;
  T scale, softcap;
  int64_t num_tokens;
  T* dqkv;
  const T *d_o, *qkv, *o, *lse;
  int32_t* progress;  ///< for each task, the number of key blocks, from the document's start, that it has left behind

  void run(const QueryBlock& task, const BackwardScratch<T>& s) const {
    constexpr int kCols = kTileCols<T>;
    const int64_t width = g.padded_width<T>(), rows = round_up(task.rows, kCols);
    prepare(task, s);
    for (int64_t block = task.first_key_block(g); block < task.end_key_block(); block++) {
      const int64_t begin = block * kBlockKeys, num_keys = std::min(kBlockKeys, task.length - begin);
      const T* k = qkv + (task.token + begin) * g.qkv_stride + (g.NH + task.kv_head) * g.HD;
      const T* v = k + g.NKV * g.HD;
      pack_key_strips(s.k, k, g.qkv_stride, num_keys, g.HD);
      pack_key_strips(s.v, v, g.qkv_stride, num_keys, g.HD);
      pack_rows<kCols>(s.k_rows, num_keys, num_keys, g.HD, [&](int64_t j) { return k + j * g.qkv_stride; });
      if (block + 1 < task.end_key_block()) {
        const int64_t num_next = std::min(kBlockKeys, task.length - begin - kBlockKeys);
        prefetch_keys(k + kBlockKeys * g.qkv_stride, g.qkv_stride, num_next, g.HD);
        prefetch_keys(v + kBlockKeys * g.qkv_stride, g.qkv_stride, num_next, g.HD);
      }
      for (int64_t row = 0; row < rows; row += kCols) add_to_dq(task, s, row, begin, num_keys);
      enter(task, block, num_keys);
      T* dk = dqkv + (k - qkv);
      T* dv = dqkv + (v - qkv);
      add_to_keys(dv, s.p, s.d_o_rows, task, s.strips, num_keys);
      add_to_keys(dk, s.ds, s.q_rows, task, s.strips, num_keys);
      std::atomic_ref(progress[task.index]).store(static_cast<int32_t>(block + 1), std::memory_order_release);
    }
    const RowView<T> dq{dqkv + (task.token + task.q_begin) * g.qkv_stride + task.kv_head * g.G * g.HD, g.qkv_stride,
                        g.G, g.HD};
    for (int64_t r = 0; r < task.rows; r++) std::copy_n(s.dq + r * width, g.HD, dq(r));
  }

 private:
  void prepare(const QueryBlock& task, const BackwardScratch<T>& s) const {
    constexpr int kCols = kTileCols<T>;
    const int64_t width = g.padded_width<T>(), rows = round_up(task.rows, kCols);
    const int64_t first_token = task.token + task.q_begin, first_head = task.kv_head * g.G;
    const RowView<const T> q_rows{qkv + first_token * g.qkv_stride + first_head * g.HD, g.qkv_stride, g.G, g.HD};
    const int64_t at = (first_token * g.NH + first_head) * g.HD;
    const RowView<const T> o_rows{o + at, g.NH * g.HD, g.G, g.HD}, d_o_rows{d_o + at, g.NH * g.HD, g.G, g.HD};
    pack_row_strips(s.q, q_rows, task.rows, g.HD);
    for (int64_t i = 0; i < rows * g.HD; i++) s.q[i] *= scale;
    pack_row_strips(s.d_o, d_o_rows, task.rows, g.HD);
    pack_rows<kCols>(s.q_rows, rows, task.rows, g.HD, q_rows);
    pack_rows<kCols>(s.d_o_rows, rows, task.rows, g.HD, d_o_rows);
    for (int64_t c = 0; c < width; c += kCols) {  // rows that fill the last strip must not count
      std::fill_n(s.q_rows + c * rows + task.rows * kCols, (rows - task.rows) * kCols, T(0));
      std::fill_n(s.d_o_rows + c * rows + task.rows * kCols, (rows - task.rows) * kCols, T(0));
    }
    std::fill_n(s.dq, rows * width, T(0));
    std::fill_n(s.lse, rows, T(0));
    std::fill_n(s.d, rows, T(0));
    for (int64_t r = 0; r < task.rows; r++) {
      const T *a = o_rows(r), *b = d_o_rows(r);
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < g.HD; c++) sum += a[c] * b[c];
      s.d[r] = sum;
      s.lse[r] = lse[(first_head + r % g.G) * num_tokens + first_token + r / g.G];
    }
  }

  void add_to_dq(const QueryBlock& task, const BackwardScratch<T>& s, int64_t row, int64_t block_begin,
                 int64_t num_keys) const {
    constexpr int kCols = kTileCols<T>;
    const int64_t width = g.padded_width<T>();
    const Strip strip = s.strips[row / kCols] = make_strip<T>(g, task, row, block_begin);
    if (strip.key_begin == strip.key_end) return;
    T* p = s.p + row * kStripKeys;
    T* ds = s.ds + row * kStripKeys;
    multiply_strip(p, s.k, s.q + row * g.HD, g.HD, strip.key_begin, strip.key_end);
    multiply_strip(ds, s.v, s.d_o + row * g.HD, g.HD, strip.key_begin, strip.key_end);
    if (softcap > 0) cap_scores(p, strip, softcap);
    weigh(p, ds, strip, s.lse + row, s.d + row);
    hide(p, strip, g, task, row, block_begin, T(0));
    hide(ds, strip, g, task, row, block_begin, T(0));
    add_strip<T>(s.dq + row * width, width, nullptr, ds + strip.key_begin * kCols, s.k_rows + strip.key_begin * kCols,
                 num_keys, std::min(strip.key_end, num_keys) - strip.key_begin);
  }

  /// p: scores -> weights. ds: do . v -> ds.
  void weigh(T* p, T* ds, const Strip& strip, const T* row_lse, const T* row_d) const {
    constexpr int kCols = kTileCols<T>;
    const T inverse_cap = softcap > 0 ? T(1) / softcap : T(0);
    for (int64_t k = strip.key_begin; k < strip.key_end; k++) {
      T* pk = p + k * kCols;
      T* dsk = ds + k * kCols;
#pragma omp simd
      for (int lane = 0; lane < kCols; lane++) {
        const T capped = pk[lane] * inverse_cap, weight = fast_exp(pk[lane] - row_lse[lane]);
        dsk[lane] = scale * weight * (dsk[lane] - row_d[lane]) * (T(1) - capped * capped);
        pk[lane] = weight;
      }
    }
  }

  /// Waits until it is this task's turn at a block of keys; the first one finds zeros.
  void enter(const QueryBlock& task, int64_t block, int64_t num_keys) const {
    QueryBlock previous = task;
    previous.q_begin += g.block_queries;
    if (task.is_last || previous.first_key_block(g) > block) {
      for (int64_t j = 0; j < num_keys; j++) {
        T* dk = dqkv + (task.token + block * kBlockKeys + j) * g.qkv_stride + (g.NH + task.kv_head) * g.HD;
        std::fill_n(dk, g.HD, T(0));
        std::fill_n(dk + g.NKV * g.HD, g.HD, T(0));
      }
      return;
    }
    const std::atomic_ref<int32_t> done(progress[task.index - g.NKV]);
    for (int spins = 0; done.load(std::memory_order_acquire) <= block;) {
      if (spins < 1000) {
        spins++;
      } else {
        std::this_thread::yield();
      }
    }
  }

  /// out (keys, HD) += weights^T . values: weights in strips of rows, (keys, kTileCols); values in strips of width,
  /// (rows, kTileCols).
  void add_to_keys(T* out, const T* weights, const T* values, const QueryBlock& task, const Strip* strips,
                   int64_t num_keys) const {
    constexpr int kCols = kTileCols<T>;
    const int64_t num_strips = ceil_div(task.rows, kCols);
    for (int64_t c = 0; c < g.HD; c += kCols) {
      const T* columns = values + c * num_strips * kCols;
      int64_t begin = 0, end = 0;  // the strips that see a tile of keys: both only grow with the key
      for (int64_t k = 0; k < num_keys; k += kTileRows) {
        while (begin < num_strips && strips[begin].key_end <= k) begin++;
        while (end < num_strips && strips[end].key_begin <= k) end++;
        if (begin >= end) continue;
        Tile<T> tile;
        for (int64_t s = begin; s < end; s++) {
          tile.template multiply<kCols, 1>(kCols, weights + (s * kStripKeys + k) * kCols, columns + s * kCols * kCols);
        }
        T* to = out + k * g.qkv_stride + c;
        tile.store_to(to, g.qkv_stride, num_keys - k, g.HD - c, to, g.qkv_stride);
      }
    }
  }
};

/// d_sinks (NH) -= sum_i exp(sink - lse_i) D_i: all that a sink does is to take from the weights of the keys. Sums in
/// fp64.
template <class T>
void add_sink_gradients(T* d_sinks, const T* sinks, const T* d_o, const T* o, const T* lse, int64_t num_tokens,
                        int64_t NH, int64_t HD) {
  parallel_for(NH, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; h++) {
      double sum = 0;
      for (int64_t t = 0; t < num_tokens; t++) {
        const T *a = d_o + (t * NH + h) * HD, *b = o + (t * NH + h) * HD;
        T D = 0;
#pragma omp simd reduction(+ : D)
        for (int64_t c = 0; c < HD; c++) D += a[c] * b[c];
        sum += double(std::exp(sinks[h] - lse[h * num_tokens + t]) * D);
      }
      d_sinks[h] -= T(sum);
    }
  });
}

void check_attention(const Device& device, const char* who, const ConstTensor& qkv, const ConstTensor& o,
                     const ConstTensor& lse, const Documents& documents, const AttentionShape& s,
                     const ConstTensor& workspace, const ConstTensor& sinks) {
  const std::span<const int64_t> cu_seqlens = documents.cu_seqlens;
  CHECK(s.num_kv_heads > 0 && s.num_heads > 0 && s.num_heads % s.num_kv_heads == 0 && s.head_dim > 0,
        "{}: {} query heads of width {} cannot share {} kv heads", who, s.num_heads, s.head_dim, s.num_kv_heads);
  CHECK(s.window >= 0 && s.softcap >= 0, "{}: window {} and softcap {} cannot be negative", who, s.window, s.softcap);
  CHECK(qkv.shape.rank() == 3, "{}: qkv ('{}') {} must be (T, NH + 2 NKV, HD)", who, qkv.name, qkv.shape.str());
  const int64_t T = qkv.shape[0];
  check_tensor(qkv, who, {T, s.num_heads + 2 * s.num_kv_heads, s.head_dim}, qkv.dtype);
  check_tensor(o, who, {T, s.num_heads, s.head_dim}, qkv.dtype);
  check_tensor(lse, who, {s.num_heads, T}, accumulator_dtype(qkv.dtype));
  CHECK(s.has_sinks == static_cast<bool>(sinks), "{}: sinks are {}", who, sinks ? "not of this shape" : "missing");
  if (sinks) check_tensor(sinks, fmt::format("{}: sinks", who).c_str(), {s.num_heads}, qkv.dtype);
  CHECK(!cu_seqlens.empty() && cu_seqlens.front() == 0 && cu_seqlens.back() == T,
        "{}: cu_seqlens must run from 0 to T = {}", who, T);
  for (size_t i = 1; i < cu_seqlens.size(); i++) {
    CHECK(cu_seqlens[i] > cu_seqlens[i - 1], "{}: cu_seqlens[{}] = {} does not exceed cu_seqlens[{}] = {}", who, i,
          cu_seqlens[i], i - 1, cu_seqlens[i - 1]);
  }
  if (device.is_cuda()) {
    check_tensor(documents.bounds, who, {T, 2}, DType::I32);
    const ConstTensor& cu = documents.cu_seqlens_device;
    if (cu) check_tensor(cu, who, {static_cast<int64_t>(cu_seqlens.size())}, DType::I64);
  }
  const size_t needed = attention_workspace_bytes(s, qkv.dtype, T, device.kind());
  CHECK(workspace.size_bytes() >= needed, "{}: the workspace ('{}') has {} bytes, {} are needed{}", who, workspace.name,
        workspace.size_bytes(), needed, device.is_cuda() ? "" : fmt::format(" for {} threads", num_threads()));
}

// The workspace: the progress of all tasks (no document cuts finer than one token), then the threads' scratch.
int64_t progress_bytes(const Geometry& g, int64_t num_tokens) {
  return round_up(num_tokens * g.NKV * static_cast<int64_t>(sizeof(int32_t)), kAlignment);
}
char* aligned(void* workspace) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(workspace) + kAlignment - 1) / kAlignment * kAlignment);
}

/// Threads take the next task as they come; `call.run(task, scratch)` does it.
template <class ThreadScratch, class Call>
void run_tasks(const Call& call, std::span<const int64_t> cu_seqlens, char* scratch, int64_t scratch_size) {
  std::atomic<int64_t> next = 0;
#pragma omp parallel
  {
    const ThreadScratch own(call.g, scratch + omp_get_thread_num() * scratch_size);
    TaskCursor cursor(call.g, cu_seqlens);
    QueryBlock task;
    while (cursor.seek(next.fetch_add(1, std::memory_order_relaxed), task)) call.run(task, own);
  }
}

}  // namespace

std::vector<int32_t> document_bounds(std::span<const int64_t> cu_seqlens) {
  std::vector<int32_t> bounds;
  for (size_t i = 0; i + 1 < cu_seqlens.size(); i++) {
    CHECK(cu_seqlens[i + 1] <= std::numeric_limits<int32_t>::max(), "document_bounds: {} tokens do not fit 32 bits",
          cu_seqlens[i + 1]);
    for (int64_t t = cu_seqlens[i]; t < cu_seqlens[i + 1]; t++) {
      bounds.push_back(static_cast<int32_t>(cu_seqlens[i]));
      bounds.push_back(static_cast<int32_t>(cu_seqlens[i + 1]));
    }
  }
  return bounds;
}

std::vector<int64_t> cut_documents(std::span<const int64_t> cu_seqlens, int64_t chunk) {
  CHECK(chunk > 0 && !cu_seqlens.empty(), "cut_documents: chunks of {} tokens", chunk);
  std::vector<int64_t> cut = {cu_seqlens.front()};
  for (const int64_t end : cu_seqlens.subspan(1)) {
    while (end - cut.back() > chunk) cut.push_back(cut.back() + chunk);
    cut.push_back(end);
  }
  return cut;
}

size_t attention_workspace_bytes(const AttentionShape& shape, DType dtype, int64_t T, DeviceKind kind) {
  if constexpr (kHasCuda) {
    if (kind == DeviceKind::Cuda) {
      return std::max(attention_workspace_bytes_cuda(shape, T), attention_cudnn_workspace_bytes(shape, dtype, T));
    }
  }
  const Geometry g(shape);
  const int64_t scratch = dtype == DType::F64 ? scratch_bytes<double>(g) : scratch_bytes<float>(g);
  return static_cast<size_t>(progress_bytes(g, T) + num_threads() * scratch) + kAlignment;
}

void attention_forward(Device& device, Tensor o, Tensor lse, ConstTensor qkv, const Documents& documents,
                       const AttentionShape& shape, Tensor workspace, ConstTensor sinks) {
  check_attention(device, "attention_forward", qkv, o, lse, documents, shape, workspace, sinks);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) {
      if (attention_cudnn_forward(device, o, lse, qkv, documents, shape, workspace)) return;
      return attention_forward_cuda(device, o, lse, qkv, documents.bounds, shape, sinks);
    }
  }
  dispatch_float(qkv.dtype, "attention_forward", [&]<class T>(T) {
    const Geometry g(shape);
    const Forward<T> call{g,         T(shape.scale), T(shape.softcap), qkv.shape[0],
                          o.as<T>(), lse.as<T>(),    qkv.as<T>(),      sinks ? sinks.as<T>() : nullptr};
    run_tasks<ForwardScratch<T>>(call, documents.cu_seqlens, aligned(workspace.data), scratch_bytes<T>(g));
  });
}

void attention_backward(Device& device, Tensor dqkv, ConstTensor d_o, ConstTensor qkv, ConstTensor o, ConstTensor lse,
                        const Documents& documents, const AttentionShape& shape, Tensor workspace, ConstTensor sinks,
                        Tensor d_sinks) {
  check_attention(device, "attention_backward", qkv, o, lse, documents, shape, workspace, sinks);
  CHECK(static_cast<bool>(sinks) == static_cast<bool>(d_sinks), "attention_backward: sinks and d_sinks come together");
  if (d_sinks) check_tensor(d_sinks, "attention_backward: d_sinks", sinks.shape, lse.dtype);
  check_tensor(dqkv, "attention_backward: dqkv", qkv.shape, qkv.dtype);
  check_tensor(d_o, "attention_backward: do", o.shape, qkv.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) {
      if (attention_cudnn_backward(device, dqkv, d_o, qkv, o, lse, documents, shape, workspace)) return;
      return attention_backward_cuda(device, dqkv, d_o, qkv, o, lse, documents.bounds, shape, workspace, sinks,
                                     d_sinks);
    }
  }
  dispatch_float(qkv.dtype, "attention_backward", [&]<class T>(T) {
    const Geometry g(shape);
    const int64_t num_tokens = qkv.shape[0];
    char* at = aligned(workspace.data);
    int32_t* progress = reinterpret_cast<int32_t*>(at);
    std::memset(progress, 0, static_cast<size_t>(progress_bytes(g, num_tokens)));
    const Backward<T> call{g,           T(shape.scale), T(shape.softcap), num_tokens,  dqkv.as<T>(),
                           d_o.as<T>(), qkv.as<T>(),    o.as<T>(),        lse.as<T>(), progress};
    run_tasks<BackwardScratch<T>>(call, documents.cu_seqlens, at + progress_bytes(g, num_tokens), scratch_bytes<T>(g));
    if (!sinks) return;
    add_sink_gradients(d_sinks.as<T>(), sinks.as<T>(), d_o.as<T>(), o.as<T>(), lse.as<T>(), num_tokens, g.NH, g.HD);
  });
}
