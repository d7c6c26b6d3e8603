// Speed of the layers on this GPU, in bf16: those that move memory as GB/s and as a share of a copy within the device,
// those that multiply as TFLOP/s and as a share of the maker's dense peak.
//
//   gpu_bench [--small]          --small: sizes at which the emulated GPU of test/simt gets through, to see that it
//   runs
//
// Bytes are those that have to move: every input read once, every output written once (a sum read too). Sizes are those
// of Qwen2.5-1.5B and, for experts, of Qwen3-30B-A3B, on 16384 tokens.
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "layers/adamw.h"
#include "layers/attention.h"
#include "layers/core/rng.h"
#include "layers/embedding.h"
#include "layers/gated_act.h"
#include "layers/grouped_linear.h"
#include "layers/linear.h"
#include "layers/loss.h"
#include "layers/moe.h"
#include "layers/qk_norm.h"
#include "layers/reduce.h"
#include "layers/rmsnorm.h"
#include "layers/rope.h"
#include "layers/ulysses.h"

namespace {

struct Sizes {
  int64_t T, C, F, V, NH, NKV, HD;
  int64_t experts, top_k, expert_C, expert_F;
  int64_t document;      // tokens of the many, the one is T long
  double seconds = 0.1;  // of a measurement
};
constexpr Sizes kReal = {16384, 1536, 8960, 151936, 12, 2, 128, 128, 8, 2048, 768, 1024};
constexpr Sizes kSmall = {64, 64, 96, 256, 4, 2, 32, 4, 2, 64, 32, 16, 0};

/// Owns what it places until it ends.
class Bench {
 public:
  explicit Bench(const Sizes& sizes) : s(sizes), device_(Device::cuda(0)) {
    const int64_t n = s.T * s.F;
    const Tensor from = bf16s({n}), to = bf16s({n});
    copy_ = bytes_of({from, to}) / time([&] { device_.copy(to.data, from.data, to.size_bytes()); });
    fmt::print("{:<58}{:.1f} GB/s\n", "copy within the device", copy_ * 1e-9);
    release();
  }
  Bench(const Bench&) = delete;
  ~Bench() { release(); }

  void norms() {
    const Tensor x = bf16s({s.T, s.C}), y = bf16s({s.T, s.C}), sum = bf16s({s.T, s.C}), w = bf16s({s.C}),
                 rstd = fp32s({s.T}), dw = fp32s({s.C});
    const NormKind kind = NormKind::LateCast;
    moves("rmsnorm", {x, y, rstd}, [&] { rmsnorm_forward(device_, y, rstd, x, w, 1e-6, kind); });
    moves("rmsnorm and residual add", {x, y, sum, sum, rstd},
          [&] { add_rmsnorm_forward(device_, sum, y, rstd, x, sum, w, 1e-6, kind); });
    moves("rmsnorm backward", {x, y, sum, rstd}, [&] { rmsnorm_backward(device_, sum, dw, y, x, rstd, w, kind); });
    moves("residual add", {x, y, sum}, [&] { residual_add(device_, sum, x, y); });
    release();
  }

  void heads() {
    const int64_t H = s.NH + 2 * s.NKV;
    const QkNormShape shape = {s.NH, s.NKV, s.HD, true};
    const Tensor qkv = bf16s({s.T, H, s.HD}), y = bf16s({s.T, H, s.HD}), dqkv = bf16s({s.T, H, s.HD}),
                 w = bf16s({s.HD}), rstd = fp32s({s.T, shape.num_norms()}), dqw = fp32s({s.HD}), dkw = fp32s({s.HD}),
                 cos = fp32s({s.T, s.HD / 2}), sin = fp32s({s.T, s.HD / 2});
    const Rotation rotation = {cos, sin, false};
    moves("norm of q and k, RoPE", {qkv, y, rstd, cos, sin},
          [&] { qk_norm_forward(device_, y, rstd, qkv, w, w, shape, 1e-6, NormKind::LateCast, rotation); });
    moves("norm of q and k, RoPE backward", {qkv, y, dqkv, rstd, cos, sin},
          [&] { qk_norm_backward(device_, dqkv, dqw, dkw, y, qkv, rstd, w, w, shape, NormKind::LateCast, rotation); });
    const Tensor rotates = bf16s({s.T, s.NH + s.NKV, s.HD});
    moves("RoPE", {rotates, rotates, cos, sin}, [&] { rope_forward(device_, rotates, cos, sin, s.NH + s.NKV, false); });
    const UlyssesShape ulysses = {s.NH, s.NKV, s.HD, 2};
    const Tensor sent = bf16s({2, s.T, ulysses.part_qkv_heads(), s.HD});
    moves("Ulysses pack", {qkv, sent}, [&] { ulysses_pack_qkv(device_, sent, qkv, ulysses); });
    moves("Ulysses unpack", {qkv, sent}, [&] { ulysses_unpack_dqkv(device_, qkv, sent, ulysses); });
    release();
  }

  void elementwise() {
    const Tensor gate_up = bf16s({s.T, 2 * s.F}), d_gate_up = bf16s({s.T, 2 * s.F}), y = bf16s({s.T, s.F});
    moves("SwiGLU", {gate_up, y}, [&] { gated_act_forward(device_, y, gate_up, GateKind::Silu); });
    moves("SwiGLU backward", {gate_up, y, d_gate_up},
          [&] { gated_act_backward(device_, d_gate_up, y, gate_up, GateKind::Silu); });
    release();
    const int64_t n = s.T * s.C;
    const Tensor p = fp32s({n}), m = fp32s({n}), v = fp32s({n}), g = fp32s({n}), weights = bf16s({n}),
                 sum = place(DType::F64, {1});
    moves("AdamW", {p, p, m, m, v, v, g, weights}, [&] { adamw_update(device_, p, m, v, g, {1e-4}, weights); });
    moves("sum of squares", {g}, [&] { add_sum_of_squares(device_, sum, g); });
    moves("fp32 to bf16", {g, weights}, [&] { convert(device_, weights, g); });
    release();
  }

  void lookup() {
    std::vector<int32_t> host;
    const Philox rng(1, 2);
    for (int64_t t = 0; t < s.T; t++)
      host.push_back(static_cast<int32_t>(rng.uniform(static_cast<uint64_t>(t)) * static_cast<double>(s.V)));
    const Tensor tokens = ints(host), order = ints(embedding_order(host, s.V)), w = bf16s({s.V, s.C}),
                 y = bf16s({s.T, s.C}), dw = fp32s({s.V, s.C}), touched = fp32s({s.T, s.C});
    moves("embedding", {y, y}, [&] { embedding_forward(device_, y, tokens, w, 1.0); });
    moves("embedding backward", {y, touched, touched},
          [&] { embedding_backward(device_, dw, y, tokens, order, 1.0, -1); });
    // Its head, tied: three products of (T, C) and (V, C).
    LossRows rows;
    rows.rows = ints(loss_rows(host, s.V, rows.num_targets));
    const LossShape shape;
    const Tensor nll = place(DType::F64, {1}), dx = bf16s({s.T, s.C}),
                 workspace =
                     place(DType::U8, {static_cast<int64_t>(loss_workspace_bytes(shape, DType::BF16, s.T, s.C, s.V))});
    multiplies("LM head and loss", 6.0 * product(s.T, s.V, s.C),
               [&] { loss_forward_backward(device_, nll, dx, dw, y, w, tokens, rows, 1e-5, shape, workspace); });
    release();
  }

  void linear(const char* what, int64_t N, int64_t K) {
    const Tensor x = bf16s({s.T, K}), w = bf16s({N, K}), y = bf16s({s.T, N}), dx = bf16s({s.T, K}), dw = fp32s({N, K});
    const std::string name = fmt::format("{} {} x {} x {}", what, s.T, N, K);
    multiplies(name, 2 * product(s.T, N, K), [&] { linear_forward(device_, y, x, w, {}); });
    multiplies(name + ", backward", 4 * product(s.T, N, K), [&] { linear_backward(device_, dx, dw, {}, y, x, w); });
    release();
  }

  /// Flops: 4 HD for each head and visible pair forward, 10 HD backward. With and without cuDNN, where it has a plan.
  void attention(const char* what, int64_t document) {
    std::vector<int64_t> cu = {0};
    while (cu.back() < s.T) cu.push_back(std::min(s.T, cu.back() + document));
    const double pairs = static_cast<double>(s.T) * static_cast<double>(document + 1) / 2;
    const AttentionShape shape = {s.NH, s.NKV, s.HD, 1 / std::sqrt(static_cast<double>(s.HD))};
    const int64_t H = s.NH + 2 * s.NKV;
    const Tensor qkv = bf16s({s.T, H, s.HD}), dqkv = bf16s({s.T, H, s.HD}), o = bf16s({s.T, s.NH, s.HD}),
                 d_o = bf16s({s.T, s.NH, s.HD}), lse = fp32s({s.NH, s.T}),
                 workspace = place(
                     DType::U8,
                     {static_cast<int64_t>(attention_workspace_bytes(shape, DType::BF16, s.T, DeviceKind::Cuda))}),
                 cu_device = place(DType::I64, {static_cast<int64_t>(cu.size())});
    device_.copy_from_host(cu_device.data, cu.data(), cu_device.size_bytes());
    const Tensor bounds = ints(document_bounds(cu)).reshaped({s.T, 2});
    for (const bool is_own : {false, true}) {
      const Documents documents = {cu, bounds, is_own ? ConstTensor() : ConstTensor(cu_device)};
      const std::string name = fmt::format("attention, {}{}", what, is_own ? ", our own kernels" : "");
      const double flops = 4 * pairs * static_cast<double>(s.NH * s.HD);
      multiplies(name, flops, [&] { attention_forward(device_, o, lse, qkv, documents, shape, workspace); });
      multiplies(name + ", backward", 2.5 * flops,
                 [&] { attention_backward(device_, dqkv, d_o, qkv, o, lse, documents, shape, workspace); });
    }
    release();
  }

  void experts() {
    const int64_t E = s.experts, k = s.top_k, R = s.T * k, C = s.expert_C, F = s.expert_F;
    const Tensor logits = fp32s({s.T, E}), x = bf16s({s.T, C}), y = bf16s({s.T, C}), rows = bf16s({R, C}),
                 gate_up = bf16s({R, 2 * F}), d_rows = bf16s({R, C}), w = bf16s({E, 2 * F, C}),
                 dw = fp32s({E, 2 * F, C});
    const Routing routing = {place(DType::I32, {s.T, k}), place(DType::I32, {s.T, k}), place(DType::I32, {R}),
                             fp32s({R}), place(DType::I32, {E + 1})};
    moves("route", {logits, routing.experts, routing.rows, routing.slots, routing.row_weights}, [&] {
      route_forward(device_, routing, logits, {}, {E, k});
    });
    moves("rows to the experts", {x, rows}, [&] { route_gather(device_, rows, x, routing); });
    moves("rows from the experts", {y, rows}, [&] { route_combine(device_, y, rows, routing, {}); });
    const double flops = 2 * product(R, 2 * F, C);
    const std::string name = fmt::format("{} experts {} x {} x {}", E, R, 2 * F, C);
    multiplies(name, flops,
               [&] { grouped_linear_forward(device_, gate_up, rows, w, {}, routing.offsets, WeightLayout::OutIn); });
    multiplies(name + ", backward", 2 * flops, [&] {
      grouped_linear_backward(device_, d_rows, dw, {}, gate_up, rows, w, routing.offsets, WeightLayout::OutIn);
    });
    release();
  }

  const Sizes s;

 private:
  static double product(int64_t a, int64_t b, int64_t c) {
    return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
  }
  static double bytes_of(std::initializer_list<ConstTensor> tensors) {
    double bytes = 0;
    for (const ConstTensor& t : tensors) bytes += static_cast<double>(t.size_bytes());
    return bytes;
  }

  /// Seconds of a call, of as many in a row as take s.seconds.
  template <class Call>
  double time(Call&& call) {
    const auto run = [&](int64_t calls) {
      device_.synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < calls; i++) call();
      device_.synchronize();
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() /
             static_cast<double>(calls);
    };
    run(1);  // chooses algorithms
    const double once = run(1);
    return run(static_cast<int64_t>(s.seconds / once) + 1);
  }
  template <class Call>
  void moves(const std::string& what, std::initializer_list<ConstTensor> tensors, Call&& call) {
    const double rate = bytes_of(tensors) / time(call);
    fmt::print("{:<58}{:.1f} GB/s  {:.0f}% of a copy\n", what, rate * 1e-9, 100 * rate / copy_);
  }
  template <class Call>
  void multiplies(const std::string& what, double flops, Call&& call) {
    const double rate = flops / time(call);
    fmt::print("{:<58}{:.1f} TFLOP/s  {:.0f}% of the peak\n", what, rate * 1e-12,
               100 * rate / device_.peak_flops(DType::BF16));
  }

  Tensor place(DType dtype, Shape shape) {
    Tensor t = {nullptr, dtype, shape, "operand"};
    t.data = device_.allocate(t.size_bytes());
    placed_.push_back(t);
    return t;
  }
  /// Numbers in [-1, 1): zeros would multiply with less power than a model's.
  Tensor filled(DType dtype, Shape shape) {
    const Tensor t = place(dtype, shape);
    constexpr size_t kBlock = 1 << 20;
    const Philox rng(7, placed_.size());
    std::vector<char> block(std::min(kBlock, t.size_bytes()));
    for (size_t i = 0; i * size_of(dtype) < block.size(); i++) {
      const auto value = static_cast<float>(2 * rng.uniform(i) - 1);
      if (dtype == DType::F32) std::memcpy(&block[4 * i], &value, 4);
      const bf16 rounded(value);
      if (dtype == DType::BF16) std::memcpy(&block[2 * i], &rounded, 2);
    }
    for (size_t at = 0; at < t.size_bytes(); at += kBlock) {
      device_.copy_from_host(static_cast<char*>(t.data) + at, block.data(), std::min(kBlock, t.size_bytes() - at));
    }
    return t;
  }
  Tensor bf16s(Shape shape) { return filled(DType::BF16, shape); }
  Tensor fp32s(Shape shape) { return filled(DType::F32, shape); }
  Tensor ints(const std::vector<int32_t>& values) {
    const Tensor t = place(DType::I32, {static_cast<int64_t>(values.size())});
    device_.copy_from_host(t.data, values.data(), t.size_bytes());
    return t;
  }
  void release() {
    for (const Tensor& t : placed_) device_.deallocate(t.data, t.size_bytes());
    placed_.clear();
  }

  Device device_;
  std::vector<Tensor> placed_;
  double copy_ = 0;  // bytes a second, read and written
};

void run(const Sizes& sizes) {
  Bench bench(sizes);
  bench.norms();
  bench.heads();
  bench.elementwise();
  bench.lookup();
  const int64_t C = sizes.C, q = sizes.NH * sizes.HD, kv = sizes.NKV * sizes.HD;
  bench.linear("qkv", q + 2 * kv, C);
  bench.linear("gate_up", 2 * sizes.F, C);
  bench.linear("down", C, sizes.F);
  bench.attention(fmt::format("documents of {}", sizes.document).c_str(), sizes.document);
  bench.attention(fmt::format("one of {}", sizes.T).c_str(), sizes.T);
  bench.experts();
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_small = argc > 1 && std::strcmp(argv[1], "--small") == 0;
  try {
    run(is_small ? kSmall : kReal);
  } catch (const std::exception& error) {
    fmt::print(stderr, "gpu_bench: {}\n", error.what());
    return 1;
  }
}
