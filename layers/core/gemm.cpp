// GotoBLAS' loops (Goto & van de Geijn, 2008) around the register tile of gemm_tile.h.
//
//   for each panel of kPanelCols columns of B, for each block of kDepth of K:
//     all threads pack that part of B                                    (shared, L3)
//     threads take blocks of kBlockRows rows of A as they come:          pack them (own, L2)
//       for each strip of kTileCols columns, for each strip of kTileRows rows: one tile of C
#include "layers/core/gemm.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>

#include "layers/core/gemm_tile.h"
#include "layers/core/integer.h"
#include "layers/core/parallel.h"

namespace {

constexpr int64_t kDepth = 384;          // a strip of B (24 KiB in fp32) stays in L1 while A streams past
constexpr int64_t kBlockRows = 96;       // a multiple of kTileRows; a block of A and the next one share a 512 KiB L2
constexpr int64_t kPanelCols = 1024;     // a multiple of every kTileCols; a panel of B is 1.5 MiB
constexpr int64_t kSmallWork = 1 << 20;  // multiply-adds below which threads cost more than they save

template <class T>
constexpr size_t panel_bytes() {
  return kPanelCols * kDepth * sizeof(T);
}
template <class T>
constexpr size_t block_bytes() {
  return kBlockRows * kDepth * sizeof(T);
}

// Memory for packing that lives as long as its thread and grows with the number of OpenMP threads only.
char* pack_buffer(size_t size_bytes) {
  constexpr size_t kPage = 4096;
  thread_local std::unique_ptr<void, decltype(&std::free)> data(nullptr, &std::free);
  thread_local size_t capacity = 0;
  if (size_bytes > capacity) {
    const size_t pages = (size_bytes + kPage - 1) / kPage * kPage;
    data.reset(std::aligned_alloc(kPage, pages));
    capacity = data ? pages : 0;
    CHECK(data, "cannot allocate {} KiB for packing matrices", pages >> 10);
  }
  return static_cast<char*>(data.get());
}

template <class T>
struct Product {
  T* c;
  int64_t M, N, K;
  MatrixView<T> a, b;
  const T* addend;
  int64_t addend_ld;
};

struct Range {
  int64_t begin, end;
};

// Piece `index` of `count` of [0, n), in whole multiples of `unit`.
Range piece_of(int64_t n, int64_t unit, int64_t index, int64_t count) {
  const int64_t units = ceil_div(n, unit);
  return {std::min(n, units * index / count * unit), std::min(n, units * (index + 1) / count * unit)};
}

// Rows [i, i + rows) and depth [k, k + depth) of A in strips of kTileRows: strip s at to + s * kTileRows * depth.
template <class T>
void pack_a(T* to, const MatrixView<T>& a, int64_t i, int64_t rows, int64_t k, int64_t depth) {
  if (a.transposed) {
    const T* from = a.data + k * a.ld + i;
    return pack_rows<kTileRows>(to, depth, depth, rows, [&](int64_t d) { return from + d * a.ld; });
  }
  const T* from = a.data + i * a.ld + k;
  for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, rows - r0));
    for (int64_t r = r0 + kTileRows; r < std::min(rows, r0 + 2 * kTileRows); r++) prefetch_row(from + r * a.ld, depth);
    pack_transposed<kTileRows>(to + r0 * depth, depth, count, [&](int r) { return from + (r0 + r) * a.ld; });
  }
}

// Columns [j, j + cols) and depth [k, k + depth) of B in strips of kTileCols.
template <class T>
void pack_b(T* to, const MatrixView<T>& b, int64_t j, int64_t cols, int64_t k, int64_t depth) {
  constexpr int kCols = kTileCols<T>;
  if (!b.transposed) {
    const T* from = b.data + k * b.ld + j;
    return pack_rows<kCols>(to, depth, depth, cols, [&](int64_t d) { return from + d * b.ld; });
  }
  const T* from = b.data + j * b.ld + k;
  for (int64_t c0 = 0; c0 < cols; c0 += kCols) {
    const int count = static_cast<int>(std::min<int64_t>(kCols, cols - c0));
    for (int64_t c = c0 + kCols; c < std::min(cols, c0 + 2 * kCols); c++) prefetch_row(from + c * b.ld, depth);
    pack_transposed<kCols>(to + c0 * depth, depth, count, [&](int c) { return from + (c0 + c) * b.ld; });
  }
}

// A rectangle of an operand that will be packed next. Between tiles a thread asks for a few of its cache lines at a
// time, so that memory works while the multipliers do and packing does not wait.
template <class T>
class Prefetch {
 public:
  // Rows [i, i + rows) and columns [j, j + cols) of m, spread over `calls` calls of `some`.
  Prefetch(const MatrixView<T>& m, int64_t i, int64_t rows, int64_t j, int64_t cols, int64_t calls)
      : at_(m.transposed ? m.data + j * m.ld + i : m.data + i * m.ld + j),
        ld_(m.ld),
        width_(m.transposed ? rows : cols),
        rows_left_(rows > 0 && cols > 0 ? (m.transposed ? cols : rows) : 0),
        lines_a_call_(calls > 0 ? ceil_div(rows_left_ * ceil_div(width_, kLine), calls) : 0) {}

  void some() {
    for (int64_t n = 0; n < lines_a_call_ && rows_left_ > 0; n++) {
      __builtin_prefetch(at_ + column_, 0, 2);
      column_ += kLine;
      if (column_ >= width_) column_ = 0, at_ += ld_, rows_left_--;
    }
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
  const T* at_;
  int64_t ld_, width_, rows_left_, lines_a_call_, column_ = 0;
};

// C tile at (i, j) = packed A strip x packed B strip + addend.
template <class T>
void multiply_tile(const Product<T>& p, int64_t i, int64_t j, int64_t depth, const T* a, const T* b, const T* addend,
                   int64_t addend_ld) {
  constexpr int kCols = kTileCols<T>;
  const int64_t rows = std::min<int64_t>(kTileRows, p.M - i), cols = std::min<int64_t>(kCols, p.N - j);
  T* c = p.c + i * p.N + j;
  const T* d = addend ? addend + i * addend_ld + j : nullptr;
  for (int64_t r = 0; r < rows; r++) {
    __builtin_prefetch(c + r * p.N, 1);
    __builtin_prefetch(c + r * p.N + kCols - 1, 1);
  }
  Tile<T> tile;
  tile.template multiply<1, kTileRows>(depth, a, b);
  tile.store_to(c, p.N, rows, cols, d, addend_ld);
}

// How `threads` split C: `row_parts` x `col_parts`, the split whose largest part is smallest.
struct Grid {
  int row_parts, col_parts;
};
template <class T>
Grid choose_grid(int64_t M, int64_t N, int threads) {
  const int64_t row_tiles = ceil_div(M, kTileRows), col_tiles = ceil_div(std::min(N, kPanelCols), kTileCols<T>);
  Grid best{threads, 1};
  int64_t best_tiles = INT64_MAX;
  for (int cols = 1; cols <= threads; cols++) {
    if (threads % cols != 0) continue;
    const int64_t tiles = ceil_div(row_tiles, threads / cols) * ceil_div(col_tiles, cols);
    if (tiles < best_tiles) best = {threads / cols, cols}, best_tiles = tiles;
  }
  return best;
}

// One panel of B and one block of its depth. Past the last one all sizes are 0.
struct Step {
  int64_t panel = 0, width = 0, k = 0, depth = 0;
};
template <class T>
Step step_at(const Product<T>& p, int64_t index) {
  const int64_t depth_blocks = std::max<int64_t>(1, ceil_div(p.K, kDepth));  // K = 0: C = D
  const int64_t panel = index / depth_blocks * kPanelCols, block = index % depth_blocks;
  if (panel >= p.N) return {};
  const int64_t k = block * p.K / depth_blocks;
  return {panel, std::min(kPanelCols, p.N - panel), k, (block + 1) * p.K / depth_blocks - k};
}

// C is cut into row_blocks x col_parts blocks. Every block is summed in the same order whoever takes it, so threads
// take the next one as they come: a slow core (it shares its clock or its caches with others) does less and holds up
// nobody.
struct Blocks {
  int64_t row_blocks;
  int col_parts;

  template <class T>
  static Blocks of(const Product<T>& p, int threads) {
    constexpr int64_t kBlocksAThread = 4;
    const Grid grid = choose_grid<T>(p.M, p.N, threads);
    const int64_t wanted = std::max(ceil_div(p.M, kBlockRows), kBlocksAThread * grid.row_parts);
    return {ceil_div(wanted, grid.row_parts) * grid.row_parts, grid.col_parts};
  }
  int64_t count() const { return row_blocks * col_parts; }
  Range rows(int64_t M, int64_t block) const { return piece_of(M, kTileRows, block / col_parts, row_blocks); }
  template <class T>
  Range cols(int64_t width, int64_t block) const {
    return piece_of(width, kTileCols<T>, block % col_parts, col_parts);
  }
};

// One block of C in one step, B packed.
template <class T>
void multiply_block(const Product<T>& p, const Step& step, Range rows, Range cols, T* a_block, const T* b_panel,
                    Prefetch<T> next_a, Prefetch<T>& next_b) {
  const T* addend = step.k == 0 ? p.addend : p.c;
  const int64_t addend_ld = step.k == 0 ? p.addend_ld : p.N;
  pack_a(a_block, p.a, rows.begin, rows.end - rows.begin, step.k, step.depth);
  for (int64_t j = cols.begin; j < cols.end; j += kTileCols<T>) {
    for (int64_t i = rows.begin; i < rows.end; i += kTileRows) {
      next_a.some();
      next_b.some();
      multiply_tile(p, i, step.panel + j, step.depth, a_block + (i - rows.begin) * step.depth, b_panel + j * step.depth,
                    addend, addend_ld);
    }
  }
}

// One thread's part of a step: the block of its own number, then what `next_block` gives.
template <class T>
void multiply_blocks(const Product<T>& p, const Blocks& blocks, const Step& step, const Step& next, int thread,
                     int threads, std::atomic<int64_t>& next_block, T* a_block, const T* b_panel) {
  const auto tiles = [](Range rows, Range cols) {
    return ceil_div(rows.end - rows.begin, kTileRows) * ceil_div(cols.end - cols.begin, kTileCols<T>);
  };
  const Range packs = piece_of(next.width, kTileCols<T>, thread, threads);
  Prefetch<T> next_b(p.b, next.k, next.depth, next.panel + packs.begin, packs.end - packs.begin,
                     tiles({0, p.M}, {0, step.width}) / threads);
  for (int64_t block = thread; block < blocks.count();) {
    const int64_t following = next_block.fetch_add(1, std::memory_order_relaxed);
    const bool last = following >= blocks.count();
    const Step& its_step = last ? next : step;
    const Range its_rows = blocks.rows(p.M, last ? thread : following);
    const Range rows = blocks.rows(p.M, block), cols = blocks.cols<T>(step.width, block);
    const Prefetch<T> next_a(p.a, its_rows.begin, its_rows.end - its_rows.begin, its_step.k, its_step.depth,
                             tiles(rows, cols));
    multiply_block(p, step, rows, cols, a_block, b_panel, next_a, next_b);
    block = following;
  }
}

template <class T>
void multiply_all(const Product<T>& p, int thread, int threads, char* buffer, std::atomic<int64_t>& next_block) {
  const Blocks blocks = Blocks::of(p, threads);
  T* b_panel = reinterpret_cast<T*>(buffer);
  T* a_block = reinterpret_cast<T*>(buffer + panel_bytes<T>() + static_cast<size_t>(thread) * block_bytes<T>());
  for (int64_t index = 0; step_at(p, index).width > 0; index++) {
    const Step step = step_at(p, index);
    const Range packs = piece_of(step.width, kTileCols<T>, thread, threads);
    if (index > 0) {
#pragma omp barrier  // nobody reads the previous panel or takes blocks any more
    }
    if (thread == 0) next_block = threads;
    pack_b(b_panel + packs.begin * step.depth, p.b, step.panel + packs.begin, packs.end - packs.begin, step.k,
           step.depth);
#pragma omp barrier
    multiply_blocks(p, blocks, step, step_at(p, index + 1), thread, threads, next_block, a_block, b_panel);
  }
}

template <class T>
size_t buffer_bytes(int threads) {
  return panel_bytes<T>() + static_cast<size_t>(threads) * block_bytes<T>();
}

}  // namespace

template <class T>
void gemm(T* c, int64_t M, int64_t N, int64_t K, MatrixView<T> a, MatrixView<T> b, const T* addend, int64_t addend_ld) {
  const Product<T> p{c, M, N, K, a, b, addend, addend_ld};
  if (M == 0 || N == 0) return;
  const int threads = omp_in_parallel() || M * N * K < kSmallWork ? 1 : num_threads();
  char* buffer = pack_buffer(buffer_bytes<T>(threads));
  std::atomic<int64_t> next_block;
#pragma omp parallel num_threads(threads)
  multiply_all(p, omp_get_thread_num(), omp_get_num_threads(), buffer, next_block);
}

template void gemm(float*, int64_t, int64_t, int64_t, MatrixView<float>, MatrixView<float>, const float*, int64_t);
template void gemm(double*, int64_t, int64_t, int64_t, MatrixView<double>, MatrixView<double>, const double*, int64_t);

size_t gemm_buffer_bytes(DType dtype, bool in_parallel_regions) {
  const auto bytes = [&]<class T>(T) {
    // The calling thread's own is also that of the products that all threads share.
    const size_t of_others = static_cast<size_t>(num_threads() - 1) * buffer_bytes<T>(1);
    return buffer_bytes<T>(num_threads()) + (in_parallel_regions ? of_others : 0);
  };
  return dtype == DType::F64 ? bytes(double{}) : bytes(float{});
}
