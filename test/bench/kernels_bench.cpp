// Speed of the two layers that do nearly all the arithmetic, as a share of the measured multiply-add peak, and of the
// packing for Ulysses, as a share of the bandwidth of memcpy:
//
//   kernels_bench [seconds for each line, default 0.3]
//
// Shapes are those of a Llama of width 384 (6 heads, 2 kv heads, ffn 1024, vocabulary 8192) on 2048 tokens, and a few
// others. Best of as many calls as fit; run it on a quiet machine, with OMP_PROC_BIND=true.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "layers/attention.h"
#include "layers/core/arena.h"
#include "layers/core/gemm_tile.h"
#include "layers/core/parallel.h"
#include "layers/core/rng.h"
#include "layers/linear.h"
#include "layers/ulysses.h"

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Seconds of the fastest call.
template <class Call>
double best_time(double seconds, Call&& call) {
  call();
  double best = INFINITY;
  for (const double end = now() + seconds; now() < end;) {
    const double start = now();
    call();
    best = std::min(best, now() - start);
  }
  return best;
}

/// Independent chains of multiply-adds in registers, as many as a tile has sums.
float multiply_adds(int64_t count, float factor, float term) {
  Tile<float> tile;
  const Vec<float> x = Vec<float>{} + factor, y = Vec<float>{} + term;
  for (int r = 0; r < kTileRows; r++) {
    for (int v = 0; v < kTileVecs; v++) tile.sum[r][v] += static_cast<float>(r * kTileVecs + v);
  }
  for (int64_t i = 0; i < count; i++) {
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) {
#pragma GCC unroll 4
      for (int v = 0; v < kTileVecs; v++) tile.sum[r][v] = tile.sum[r][v] * x + y;
    }
  }
  float sum = 0;
  for (int r = 0; r < kTileRows; r++) {
    for (int v = 0; v < kTileVecs; v++) sum += tile.sum[r][v][0];
  }
  return sum;
}

double measure_peak(double seconds) {
  constexpr int64_t kCount = 200000;
  std::vector<float> sums(static_cast<size_t>(num_threads()));
  const double time = best_time(seconds, [&] {
#pragma omp parallel
    sums[static_cast<size_t>(omp_get_thread_num())] = multiply_adds(kCount, 0.999f, 1e-3f);
  });
  const double total = std::accumulate(sums.begin(), sums.end(), 0.0);  // so that no loop is thrown away
  fmt::print("{} threads, {} lanes of fp32 (checksum {:.3g})\n", num_threads(), kLanes<float>, total);
  return 2.0 * kCount * kTileRows * kTileCols<float> * num_threads() / time * 1e-9;
}

class Bench {
 public:
  explicit Bench(double seconds) : seconds_(seconds), arena_(device_, size_t{1} << 30), peak_(measure_peak(seconds)) {
    fmt::print("multiply-add peak {:.1f} GFLOP/s\n", peak_);
  }

  void linear(const char* what, int64_t rows, int64_t N, int64_t K) {
    const size_t mark = arena_.mark();
    const Tensor x = random({rows, K}), w = random({N, K}), y = random({rows, N}), dx = random({rows, K}),
                 dw = random({N, K});
    const double flop = 2.0 * static_cast<double>(rows * N * K);
    const double forward = best_time(seconds_, [&] { linear_forward(device_, y, x, w, {}); });
    const double dw_only = best_time(seconds_, [&] { linear_backward(device_, {}, dw, {}, y, x, w); });
    const double backward = best_time(seconds_, [&] { linear_backward(device_, dx, dw, {}, y, x, w); });
    fmt::print("{:<28} y {}   dw {}   dx and dw {}\n", fmt::format("{} {}x{}x{}", what, rows, N, K),
               rate(flop, forward), rate(flop, dw_only), rate(2 * flop, backward));
    arena_.rewind(mark);
  }

  /// Counted: 4 HD operations for each query head and visible pair forward, 10 HD backward (scores computed again).
  void attention(const char* what, const std::vector<int64_t>& documents, int64_t HD, int64_t window = 0) {
    const size_t mark = arena_.mark();
    const AttentionShape shape{6, 2, HD, 1 / std::sqrt(static_cast<double>(HD)), 0, window};
    std::vector<int64_t> cu{0};
    double pairs = 0;
    for (const int64_t n : documents) {
      cu.push_back(cu.back() + n);
      for (int64_t i = 0; i < n; i++) pairs += static_cast<double>(window > 0 ? std::min(window, i + 1) : i + 1);
    }
    const int64_t T = cu.back(), heads = shape.num_heads + 2 * shape.num_kv_heads;
    const Tensor qkv = random({T, heads, HD}), o = random({T, 6, HD}), d_o = random({T, 6, HD}),
                 dqkv = random({T, heads, HD}), lse = random({6, T});
    const Tensor workspace = arena_.place(
        DType::U8, {static_cast<int64_t>(attention_workspace_bytes(shape, DType::F32, T, DeviceKind::Cpu))},
        "workspace");
    const double flop = 4.0 * static_cast<double>(6 * HD) * pairs;
    const double forward = best_time(seconds_, [&] {
      attention_forward(device_, o, lse, qkv, {cu, {}}, shape, workspace);
    });
    const double backward = best_time(seconds_, [&] {
      attention_backward(device_, dqkv, d_o, qkv, o, lse, {cu, {}}, shape, workspace);
    });
    fmt::print("attention {:<18} forward {}   backward {}   {:.2f} us a token\n", what, rate(flop, forward),
               rate(2.5 * flop, backward), (forward + backward) / static_cast<double>(T) * 1e6);
    arena_.rewind(mark);
  }

  /// Counted: every byte read once and written once.
  void ulysses(const UlyssesShape& shape, int64_t T) {
    const size_t mark = arena_.mark();
    const int64_t Ts = T / shape.parts, D = shape.head_dim;
    const Tensor qkv = random({Ts, shape.num_heads + 2 * shape.num_kv_heads, D}), o = random({Ts, shape.num_heads, D});
    const Tensor qkv_parts = random({shape.parts, Ts, shape.part_qkv_heads(), D}),
                 o_parts = random({shape.parts, Ts, shape.part_heads(), D});
    const auto line = [&](const char* what, Tensor to, ConstTensor from, auto&& call) {
      const double bytes = static_cast<double>(to.size_bytes() + from.size_bytes());
      const double copy = best_time(seconds_, [&] {
        const int64_t n = static_cast<int64_t>(std::min(to.size_bytes(), from.size_bytes()));
        parallel_for(n, 1 << 16, [&](int64_t begin, int64_t end) {
          std::memcpy(static_cast<char*>(to.data) + begin, static_cast<const char*>(from.data) + begin,
                      static_cast<size_t>(end - begin));
        });
      });
      const double copied = 2 * static_cast<double>(std::min(to.size_bytes(), from.size_bytes()));
      const double packed = best_time(seconds_, call);
      fmt::print("{:<28} {:6.1f} GB/s, memcpy {:6.1f} GB/s, {:3.0f}%\n", what, bytes / packed * 1e-9,
                 copied / copy * 1e-9, 100 * (bytes / packed) / (copied / copy));
    };
    fmt::print("Ulysses over {} ranks, {} tokens, {} and {} heads of {}\n", shape.parts, T, shape.num_heads,
               shape.num_kv_heads, D);
    line("pack q, k, v", qkv_parts, qkv, [&] { ulysses_pack_qkv(device_, qkv_parts, qkv, shape); });
    line("unpack attention", o, o_parts, [&] { ulysses_unpack_heads(device_, o, o_parts, shape); });
    line("pack its gradient", o_parts, o, [&] { ulysses_pack_heads(device_, o_parts, o, shape); });
    line("unpack that of q, k, v", qkv, qkv_parts, [&] { ulysses_unpack_dqkv(device_, qkv, qkv_parts, shape); });
    arena_.rewind(mark);
  }

 private:
  Tensor random(Shape shape) {
    const Tensor t = arena_.place(DType::F32, shape, "operand");
    const Philox rng(1, static_cast<uint64_t>(arena_.mark()));
    for (int64_t i = 0; i < t.numel(); i++) t.as<float>()[i] = static_cast<float>(rng.uniform(i) - 0.5);
    return t;
  }
  std::string rate(double flop, double seconds) const {
    return fmt::format("{:6.1f} GFLOP/s {:3.0f}%", flop / seconds * 1e-9, flop / seconds * 1e-7 / peak_);
  }

  double seconds_;
  Device device_ = Device::cpu();
  Arena arena_;
  double peak_;
};

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc > 1 ? std::atof(argv[1]) : 0.3);
  bench.linear("qkv_proj", 2048, 640, 384);
  bench.linear("o_proj", 2048, 384, 384);
  bench.linear("gate_up_proj", 2048, 2048, 384);
  bench.linear("down_proj", 2048, 384, 1024);
  bench.linear("lm_head tile", 1024, 8192, 384);
  bench.linear("narrow", 512, 768, 288);
  bench.linear("wide", 512, 2048, 2048);
  std::vector<int64_t> mixed;
  for (int64_t i = 0; i < 14; i++) mixed.push_back(250 + i * 37 % 100);
  for (const int64_t HD : {int64_t{64}, int64_t{128}}) {
    fmt::print("head width {}\n", HD);
    bench.attention("4 x 512", {512, 512, 512, 512}, HD);
    bench.attention("14 x ~300", mixed, HD);
    bench.attention("1 x 8192", {8192}, HD);
    bench.attention("8192, window 512", {8192}, HD, 512);
  }
  bench.ulysses({8, 2, 128, 2}, 16384);
  bench.ulysses({8, 2, 128, 8}, 65536);
}
