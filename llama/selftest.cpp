#include "llama/selftest.h"

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "layers/adamw.h"
#include "layers/attention.h"
#include "layers/core/rng.h"
#include "layers/core/tensor_core.h"
#include "layers/embedding.h"
#include "layers/gated_act.h"
#include "layers/grouped_linear.h"
#include "layers/linear.h"
#include "layers/loss.h"
#include "layers/mla.h"
#include "layers/moe.h"
#include "layers/qk_norm.h"
#include "layers/reduce.h"
#include "layers/rope.h"
#include "layers/ulysses.h"

namespace {

// ||gpu - cpu|| / ||cpu|| of an output: sums of some hundreds of fp32 terms in another order; a few roundings to 8
// bits.
constexpr double kFp32Bound = 2e-5, kBf16Bound = 1e-2;

// Tails of everything: no size is a multiple of a tile or of a vector.
constexpr int64_t T = 203, C = 264, V = 1003, F = 328, NH = 6, NKV = 2, E = 44;

struct Output {
  const char* name;
  std::vector<double> values;
};

/// A place for a layer to run: random inputs, the same everywhere, and zeros to write to.
class Bed {
 public:
  Bed(Device& on, DType of, bool rounds) : device(on), dtype(of), rounds_(rounds) {}
  Bed(const Bed&) = delete;
  ~Bed() {
    for (const Tensor& t : tensors_) device.deallocate(t.data, t.size_bytes());
  }

  /// N(0, stddev), rounded to bf16 when the GPU computes in bf16.
  Tensor random(Shape shape, const char* name, double stddev = 1) {
    const Philox rng(7, hash_name(name));
    std::vector<float> values(static_cast<size_t>(shape.numel()));
    for (size_t i = 0; i < values.size(); i++) {
      values[i] = static_cast<float>(stddev * rng.normal(i));
      if (rounds_) values[i] = static_cast<float>(bf16(values[i]));
    }
    if (dtype == DType::F32) return upload(values.data(), dtype, shape, name);
    std::vector<bf16> rounded;
    for (const float value : values) rounded.push_back(bf16(value));
    return upload(rounded.data(), dtype, shape, name);
  }
  Tensor zeros(Shape shape, const char* name) { return zeros(dtype, shape, name); }
  Tensor zeros(DType of, Shape shape, const char* name) {
    Tensor t = {nullptr, of, shape, name};
    t.data = device.allocate(t.size_bytes());
    tensors_.push_back(t);
    return t;
  }
  Tensor ints(const std::vector<int32_t>& values, Shape shape, const char* name) {
    return upload(values.data(), DType::I32, shape, name);
  }
  Output output(Tensor t) {
    std::vector<char> bytes(t.size_bytes());
    device.copy_to_host(bytes.data(), t.data, bytes.size());
    std::vector<double> values;
    for (int64_t i = 0; i < t.numel(); i++) {
      switch (t.dtype) {
        case DType::BF16:
          values.push_back(static_cast<float>(reinterpret_cast<const bf16*>(bytes.data())[i]));
          break;
        case DType::I32:
          values.push_back(reinterpret_cast<const int32_t*>(bytes.data())[i]);
          break;
        case DType::F64:
          values.push_back(reinterpret_cast<const double*>(bytes.data())[i]);
          break;
        default:
          values.push_back(reinterpret_cast<const float*>(bytes.data())[i]);
      }
    }
    return {t.name, std::move(values)};
  }

  Device& device;
  DType dtype;

 private:
  Tensor upload(const void* data, DType of, Shape shape, const char* name) {
    const Tensor t = zeros(of, shape, name);
    device.copy_from_host(t.data, data, t.size_bytes());
    return t;
  }

  bool rounds_;
  std::vector<Tensor> tensors_;
};

using Outputs = std::vector<Output>;

std::vector<int32_t> some_tokens() {
  std::vector<int32_t> tokens;
  const Philox rng(3, 0);
  for (int64_t t = 0; t < T; t++) {
    tokens.push_back(t % 3 == 0 ? 5 : static_cast<int32_t>(rng.uniform(static_cast<uint64_t>(t)) * V));
  }
  return tokens;
}

/// The instructions that kernels for matrices are made of.
Outputs run_tensor_core(Bed& bed) {
  Bed bf16_bed(bed.device, DType::BF16, true), fp32(bed.device, DType::F32, false);
  const Tensor fragments = bed.zeros(DType::I32, {3, 32, 4}, "fragments"), sums = fp32.random({32, 2, 4}, "sums");
  tensor_core_check(bed.device, fragments, sums, bf16_bed.random({16, 16}, "a"), bf16_bed.random({16, 16}, "b"));
  return {bed.output(fragments), bed.output(sums)};
}

Outputs run_embedding(Bed& bed) {
  const std::vector<int32_t> host = some_tokens();
  const Tensor tokens = bed.ints(host, {T}, "tokens"), order = bed.ints(embedding_order(host, V), {T}, "order");
  const Tensor y = bed.zeros({T, C}, "y"), dw = bed.zeros(DType::F32, {V, C}, "dw");
  embedding_forward(bed.device, y, tokens, bed.random({V, C}, "w"), 1.5);
  embedding_backward(bed.device, dw, bed.random({T, C}, "dy"), tokens, order, 1.5, -1);
  return {bed.output(y), bed.output(dw)};
}

Outputs run_rmsnorm(Bed& bed, NormKind kind) {
  const Tensor x = bed.random({T, C}, "x"), w = bed.random({C}, "w"), y = bed.zeros({T, C}, "y"),
               rstd = bed.zeros(DType::F32, {T}, "rstd"), dx = bed.zeros({T, C}, "dx"),
               dw = bed.zeros(DType::F32, {C}, "dw");
  rmsnorm_forward(bed.device, y, rstd, x, w, 1e-5, kind);
  rmsnorm_backward(bed.device, dx, dw, bed.random({T, C}, "dy"), x, rstd, w, kind);
  // With the residual adds next to it.
  const Tensor sum = bed.zeros({T, C}, "sum"), y_of_sum = bed.zeros({T, C}, "y of the sum"),
               d_sum = bed.random({T, C}, "d_sum");
  add_rmsnorm_forward(bed.device, sum, y_of_sum, rstd, x, bed.random({T, C}, "branch"), w, 1e-5, kind);
  rmsnorm_backward(bed.device, d_sum, dw, bed.random({T, C}, "dy"), sum, rstd, w, kind, d_sum);
  return {bed.output(y), bed.output(dx), bed.output(sum), bed.output(y_of_sum), bed.output(d_sum), bed.output(dw)};
}

Outputs run_linear(Bed& bed) {
  const Tensor x = bed.random({T, C}, "x"), w = bed.random({F, C}, "w"), y = bed.zeros({T, F}, "y"),
               dx = bed.zeros({T, C}, "dx"), dw = bed.zeros(DType::F32, {F, C}, "dw"),
               db = bed.zeros(DType::F32, {F}, "db");
  linear_forward(bed.device, y, x, w, bed.random({F}, "b"));
  linear_backward(bed.device, dx, dw, db, bed.random({T, F}, "dy"), x, w);
  const Tensor logits = bed.zeros(DType::F32, {T, E}, "logits");  // of a router
  linear_forward(bed.device, logits, x, bed.random({E, C}, "router"), bed.random({E}, "router_bias"));
  return {bed.output(y), bed.output(dx), bed.output(dw), bed.output(db), bed.output(logits)};
}

Outputs run_rope_and_qk_norm(Bed& bed) {
  constexpr int64_t HD = 48, H = NH + 2 * NKV;
  const QkNormShape shape = {NH, NKV, HD, true};
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < T; t++) positions.push_back(static_cast<int32_t>(31 * t));
  std::vector<float> inv_freq;
  for (int m = 0; m < HD / 2; m++) inv_freq.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(m) / HD));
  Tensor frequencies = bed.zeros(DType::F32, {HD / 2}, "inv_freq");
  bed.device.copy_from_host(frequencies.data, inv_freq.data(), inv_freq.size() * sizeof(float));
  const Tensor cos = bed.zeros(DType::F32, {T, HD / 2}, "cos"), sin = bed.zeros(DType::F32, {T, HD / 2}, "sin");
  rope_table(bed.device, cos, sin, bed.ints(positions, {T}, "positions"), frequencies, 1.0);

  const Tensor qkv = bed.random({T, H, HD}, "qkv"), qw = bed.random({HD}, "qw"), kw = bed.random({HD}, "kw"),
               y = bed.zeros({T, H, HD}, "y"), rstd = bed.zeros(DType::F32, {T, shape.num_norms()}, "rstd"),
               dqkv = bed.zeros({T, H, HD}, "dqkv"), dy = bed.random({T, H, HD}, "dy"), x = bed.random({T, H, HD}, "x"),
               dqw = bed.zeros(DType::F32, {HD}, "dq_weight"), dkw = bed.zeros(DType::F32, {HD}, "dk_weight");
  const Rotation rotation = {cos, sin, false};
  qk_norm_forward(bed.device, y, rstd, qkv, qw, kw, shape, 1e-6, NormKind::LateCast, rotation);
  qk_norm_backward(bed.device, dqkv, dqw, dkw, dy, qkv, rstd, qw, kw, shape, NormKind::LateCast, rotation);
  rope_forward(bed.device, x, cos, sin, NH + NKV, false);
  rope_backward(bed.device, dy, cos, sin, NH + NKV, false);
  return {bed.output(y), bed.output(dqkv), bed.output(dqw), bed.output(dkw), bed.output(x), bed.output(dy)};
}

Outputs run_attention(Bed& bed, int64_t HD, int64_t window, double softcap, bool has_sinks = false) {
  const AttentionShape shape = {NH, NKV, HD, 1 / std::sqrt(static_cast<double>(HD)), softcap, window, has_sinks};
  const std::vector<int64_t> cu = {0, 1, 90, 97, T};
  const Documents documents = {cu, bed.ints(document_bounds(cu), {T, 2}, "bounds")};
  const Tensor qkv = bed.random({T, NH + 2 * NKV, HD}, "qkv"), o = bed.zeros({T, NH, HD}, "o"),
               lse = bed.zeros(DType::F32, {NH, T}, "lse"), dqkv = bed.zeros({T, NH + 2 * NKV, HD}, "dqkv");
  const auto size = static_cast<int64_t>(attention_workspace_bytes(shape, bed.dtype, T, bed.device.kind()));
  const Tensor workspace = bed.zeros(DType::U8, {size}, "workspace");
  const Tensor sinks = has_sinks ? bed.random({NH}, "sinks") : Tensor(),
               d_sinks = has_sinks ? bed.zeros(DType::F32, {NH}, "d_sinks") : Tensor();
  attention_forward(bed.device, o, lse, qkv, documents, shape, workspace, sinks);
  attention_backward(bed.device, dqkv, bed.random({T, NH, HD}, "do"), qkv, o, lse, documents, shape, workspace, sinks,
                     d_sinks);
  Outputs outputs = {bed.output(o), bed.output(dqkv)};
  if (has_sinks) outputs.push_back(bed.output(d_sinks));
  return outputs;
}

Outputs run_mla(Bed& bed) {
  const MlaShape shape = {NH, 40, 16, 24};
  const int64_t HD = shape.head_dim(), of_kv = NH * (shape.nope + shape.v);
  const Tensor qkv = bed.zeros({T, 3 * NH, HD}, "qkv"), dq = bed.zeros({T, NH * HD}, "dq"),
               dkv = bed.zeros({T, of_kv}, "dkv"), dk_rope = bed.zeros({T, shape.rope}, "dk_rope"),
               narrow = bed.zeros({T, NH * shape.v}, "narrow"), wide = bed.zeros({T, NH, HD}, "wide");
  mla_assemble(bed.device, qkv, bed.random({T, NH * HD}, "q"), bed.random({T, of_kv}, "kv"),
               bed.random({T, shape.rope}, "k_rope"), shape);
  mla_assemble_backward(bed.device, dq, dkv, dk_rope, bed.random({T, 3 * NH, HD}, "dqkv"), shape);
  mla_narrow(bed.device, narrow, bed.random({T, NH, HD}, "o"), shape);
  mla_widen(bed.device, wide, narrow, shape);
  return {bed.output(qkv), bed.output(dq), bed.output(dkv), bed.output(dk_rope), bed.output(narrow), bed.output(wide)};
}

Outputs run_gated_act(Bed& bed) {
  const Tensor gate_up = bed.random({T, 2 * F}, "gate_up"), y = bed.zeros({T, F}, "y"),
               d = bed.zeros({T, 2 * F}, "d_gate_up");
  gated_act_forward(bed.device, y, gate_up, GateKind::Silu);
  gated_act_backward(bed.device, d, bed.random({T, F}, "dy"), gate_up, GateKind::Silu);
  // In an expert of gpt-oss.
  Bed fp32(bed.device, DType::F32, false);
  const Gate clamped = {GateKind::Clamped, 1.702, 1.5};
  const Tensor weights = fp32.random({T}, "row_weights"), d_weights = fp32.zeros({T}, "d_row_weights"),
               z = bed.zeros({T, F}, "y, clamped"), d_clamped = bed.zeros({T, 2 * F}, "d_gate_up, clamped");
  gated_act_forward(bed.device, z, gate_up, clamped, weights);
  gated_act_backward(bed.device, d_clamped, bed.random({T, F}, "dy"), gate_up, clamped, weights, d_weights);
  return {bed.output(y), bed.output(d), bed.output(z), bed.output(d_clamped), fp32.output(d_weights)};
}

/// Rows are in the order of their experts: a token that goes elsewhere shows in every output.
Outputs run_moe(Bed& bed, const RouterShape& shape) {
  const int64_t k = shape.top_k, R = T * k;
  Bed fp32(bed.device, DType::F32, false);
  const auto ints = [&](Shape s, const char* name) { return bed.zeros(DType::I32, s, name); };
  const Routing r = {ints({T, k}, "experts"), ints({T, k}, "rows"), ints({R}, "slots"), fp32.zeros({R}, "row_weights"),
                     ints({E + 1}, "offsets")};
  std::vector<int32_t> tokens;
  for (int64_t t = 0; t < T; t++) tokens.push_back(t % 5 != 0);
  const Tensor logits = fp32.random({T, E}, "logits"), slope = fp32.random({E}, "slope"),
               is_token = bed.ints(tokens, {T}, "is_token"), counts = bed.zeros(DType::F64, {E}, "counts"),
               probabilities = bed.zeros(DType::F64, {E}, "probabilities"), d_logits = bed.zeros({T, E}, "d_logits");
  const bool has_bias = shape.score == RouterScore::Sigmoid;
  route_forward(bed.device, r, logits, has_bias ? fp32.random({E}, "select_bias", 0.5) : Tensor(), shape);
  route_statistics(bed.device, counts, probabilities, logits, r, is_token);
  route_backward(bed.device, d_logits, fp32.random({R}, "dw"), logits, r, shape, slope, is_token);
  const Tensor balance = fp32.zeros({E}, "balance slope"), loss = bed.zeros(DType::F64, {1}, "balance loss");
  route_balance(bed.device, balance, loss, counts.reshaped({1, E}), probabilities, 0.1, T);

  const Tensor x = bed.random({T, C}, "x"), rows = bed.zeros({R, C}, "rows of x"), y = bed.zeros({T, C}, "y"),
               bias = bed.random({E, C}, "bias"), shared = bed.random({T, C}, "shared"),
               gate = bed.random({T, 1}, "gate"), d_bias = fp32.zeros({E, C}, "d_bias"),
               d_weights = fp32.zeros({R}, "d_row_weights"), d_shared = bed.zeros({T, C}, "d_shared"),
               d_gate = bed.zeros({T, 1}, "d_gate");
  route_gather(bed.device, rows, x, r);
  route_combine(bed.device, y, rows, r, {bias, shared, gate, x});
  route_bias_backward(bed.device, d_bias, d_weights, x, bias, r);
  shared_gate_backward(bed.device, d_shared, d_gate, x, shared, gate);
  return {fp32.output(r.row_weights), bed.output(counts), bed.output(probabilities), bed.output(d_logits),
          bed.output(rows),           bed.output(y),      fp32.output(d_bias),       fp32.output(d_weights),
          bed.output(d_shared),       bed.output(d_gate), fp32.output(balance),      bed.output(loss)};
}

Outputs run_grouped_linear(Bed& bed, WeightLayout layout) {
  const std::vector<int32_t> offsets = {0, 0, 130, 131, T, T};
  constexpr int64_t kExperts = 5;
  const Shape shape = layout == WeightLayout::OutIn ? Shape{kExperts, F, C} : Shape{kExperts, C, F};
  const Tensor groups = bed.ints(offsets, {kExperts + 1}, "offsets"), x = bed.random({T, C}, "x"),
               w = bed.random(shape, "w"), y = bed.zeros({T, F}, "y"), dx = bed.zeros({T, C}, "dx"),
               dw = bed.zeros(DType::F32, shape, "dw"), db = bed.zeros(DType::F32, {kExperts, F}, "db");
  grouped_linear_forward(bed.device, y, x, w, bed.random({kExperts, F}, "b"), groups, layout);
  grouped_linear_backward(bed.device, dx, dw, db, bed.random({T, F}, "dy"), x, w, groups, layout);
  return {bed.output(y), bed.output(dx), bed.output(dw), bed.output(db)};
}

Outputs run_loss(Bed& bed, double softcap, double logit_scale) {
  std::vector<int32_t> host = some_tokens();
  for (size_t t = 0; t < host.size(); t += 4) host[t] = -100;
  LossRows rows;
  rows.rows = bed.ints(loss_rows(host, V, rows.num_targets), {T}, "rows");
  const LossShape shape = {softcap, 64, logit_scale};
  const Tensor nll = bed.zeros(DType::F64, {1}, "nll"), dx = bed.zeros({T, C}, "dx"),
               dw = bed.zeros(DType::F32, {V, C}, "dw");
  const auto size = static_cast<int64_t>(loss_workspace_bytes(shape, bed.dtype, T, C, V));
  loss_forward_backward(bed.device, nll, dx, dw, bed.random({T, C}, "x"), bed.random({V, C}, "w", 0.1),
                        bed.ints(host, {T}, "targets"), rows, 1.0, shape, bed.zeros(DType::U8, {size}, "workspace"));
  return {bed.output(nll), bed.output(dx), bed.output(dw)};
}

Outputs run_ulysses(Bed& bed) {
  constexpr int64_t HD = 40, H = NH + 2 * NKV;
  const UlyssesShape shape = {NH, NKV, HD, 6};
  const Tensor sent = bed.zeros({6, T, shape.part_qkv_heads(), HD}, "sent"), dqkv = bed.zeros({T, H, HD}, "dqkv"),
               o = bed.zeros({T, NH, HD}, "o"), d_sent = bed.zeros({6, T, 1, HD}, "d_sent");
  ulysses_pack_qkv(bed.device, sent, bed.random({T, H, HD}, "qkv"), shape);
  ulysses_unpack_dqkv(bed.device, dqkv, bed.random({6, T, shape.part_qkv_heads(), HD}, "received"), shape);
  ulysses_unpack_heads(bed.device, o, bed.random({6, T, 1, HD}, "heads"), shape);
  ulysses_pack_heads(bed.device, d_sent, bed.random({T, NH, HD}, "d_o"), shape);
  return {bed.output(sent), bed.output(dqkv), bed.output(o), bed.output(d_sent)};
}

/// fp32 on either side, whatever the weights: masters and moments are.
Outputs run_adamw_and_sums(Bed& bed) {
  Bed fp32(bed.device, DType::F32, false);
  const Tensor p = fp32.random({5003}, "p"), m = fp32.random({5003}, "m"), v = fp32.random({5003}, "v"),
               g = fp32.random({5003}, "g");
  fill_zero(bed.device, v);
  AdamWStep step;
  step.lr = 1e-2, step.weight_decay = 0.1, step.step = 3;
  adamw_update(bed.device, p, m, v, g, step);
  const Tensor sum = fp32.zeros(DType::F64, {1}, "sum of squares"), parts = fp32.zeros({1000}, "parts");
  add_sum_of_squares(bed.device, sum, g);
  add_parts(bed.device, parts, g.rows(0, 5000), 5);
  return {fp32.output(p), fp32.output(m), fp32.output(v), fp32.output(sum), fp32.output(parts)};
}

double relative_error(const std::vector<double>& found, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); i++) {
    error += (found[i] - expected[i]) * (found[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

struct Layer {
  const char* name;
  std::function<Outputs(Bed&)> run;
};

const Layer kLayers[] = {
    {"ldmatrix, mma, cp.async", run_tensor_core},
    {"embedding", run_embedding},
    {"rmsnorm", [](Bed& bed) { return run_rmsnorm(bed, NormKind::LateCast); }},
    {"layernorm", [](Bed& bed) { return run_rmsnorm(bed, NormKind::LayerNorm); }},
    {"linear", run_linear},
    {"qk_norm, rope", run_rope_and_qk_norm},
    {"attention, heads of 64", [](Bed& bed) { return run_attention(bed, 64, 0, 0); }},
    {"attention, heads of 128", [](Bed& bed) { return run_attention(bed, 128, 0, 0); }},
    {"attention, window 33", [](Bed& bed) { return run_attention(bed, 64, 33, 0); }},
    {"attention, softcap", [](Bed& bed) { return run_attention(bed, 80, 0, 5); }},
    {"attention, sinks", [](Bed& bed) { return run_attention(bed, 64, 33, 0, true); }},
    {"mla", run_mla},
    {"gated_act", run_gated_act},
    {"moe, softmax",
     [](Bed& bed) {
       return run_moe(bed, {E, 6});
     }},
    {"moe, sigmoid and groups",
     [](Bed& bed) {
       return run_moe(bed, {E, 6, RouterScore::Sigmoid, true, 4, 2, 2.5});
     }},
    {"grouped_linear (N, K)", [](Bed& bed) { return run_grouped_linear(bed, WeightLayout::OutIn); }},
    {"grouped_linear (K, N)", [](Bed& bed) { return run_grouped_linear(bed, WeightLayout::InOut); }},
    {"loss", [](Bed& bed) { return run_loss(bed, 0, 1); }},
    {"loss, scaled and capped", [](Bed& bed) { return run_loss(bed, 3, 0.5); }},
    {"ulysses", run_ulysses},
    {"adamw, sums", run_adamw_and_sums},
};

}  // namespace

bool selftest(Device& gpu, Console& console) {
  Device cpu = Device::cpu();
  console.heading("Self-test: this GPU against the CPU");
  Table table({{"layer"}, {"output"}, {"fp32", Table::Align::Right}, {"bf16", Table::Align::Right}, {""}});
  bool is_right = true;
  for (const Layer& layer : kLayers) {
    Outputs expected[2], found[2];
    for (const int rounds : {0, 1}) {
      Bed reference(cpu, DType::F32, rounds == 1), bed(gpu, rounds == 1 ? DType::BF16 : DType::F32, rounds == 1);
      expected[rounds] = layer.run(reference), found[rounds] = layer.run(bed);
    }
    for (size_t i = 0; i < expected[0].size(); i++) {
      const double fp32 = relative_error(found[0][i].values, expected[0][i].values);
      const double bf16 = relative_error(found[1][i].values, expected[1][i].values);
      const bool passes = fp32 <= kFp32Bound && bf16 <= kBf16Bound;  // not for NaN
      is_right = is_right && passes;
      table.row({i == 0 ? layer.name : "", expected[0][i].name, fmt::format("{:.1e}", fp32),
                 fmt::format("{:.1e}", bf16), passes ? "ok" : "WRONG"});
    }
  }
  console.table(table);
  console.info("bounds: fp32 {:.0e}, bf16 {:.0e}; {}", kFp32Bound, kBf16Bound,
               is_right ? "all layers are right" : "some layers are WRONG: do not train on this machine");
  return is_right;
}
