#include "llama/block.h"

#include <string_view>

#include "layers/gated_act.h"
#include "layers/linear.h"
#include "layers/qk_norm.h"
#include "layers/reduce.h"
#include "layers/rmsnorm.h"
#include "layers/rope.h"
#include "llama/mla_block.h"
#include "llama/moe_block.h"

Tensor at_size(Tensor buffer, Shape shape) {
  if (!buffer) return buffer;
  return buffer.reshaped({buffer.numel()}).rows(0, shape.numel()).reshaped(shape);
}

namespace {

/// The saved tensors of a block at the T of this batch.
BlockActivations at_size(const BlockActivations& a, const ModelConfig& c, const BlockInputs& in) {
  const UlyssesShape heads = ulysses_shape(c, in.parts());
  const int64_t T = in.T, all_T = T * in.parts(), C = c.hidden_size, F = c.intermediate_size;
  BlockActivations v;
  v.attn_in = at_size(a.attn_in, {T, C}), v.attn_in_rstd = at_size(a.attn_in_rstd, {T});
  v.qkv_raw = at_size(a.qkv_raw, {T, c.num_heads + 2 * c.num_kv_heads, c.head_dim});
  if (a.qk_rstd) v.qk_rstd = at_size(a.qk_rstd, {T, a.qk_rstd.shape[1]});
  v.qkv = at_size(a.qkv, {all_T, heads.part_qkv_heads(), c.head_dim});
  v.attn = at_size(a.attn, {all_T, heads.part_heads(), c.head_dim}),
  v.lse = at_size(a.lse, {heads.part_heads(), all_T});
  v.attn_mine = at_size(in.ulysses ? a.attn_mine : a.attn, {T, c.num_heads, c.head_dim});
  v.attn_out = at_size(a.attn_out, {T, C}), v.attn_out_rstd = at_size(a.attn_out_rstd, {T});
  v.mid = at_size(a.mid, {T, C});
  v.mlp_in = at_size(a.mlp_in, {T, C}), v.mlp_in_rstd = at_size(a.mlp_in_rstd, {T});
  v.gate_up = at_size(a.gate_up, {T, 2 * F}), v.act = at_size(a.act, {T, F});
  v.mlp_out = at_size(a.mlp_out, {T, C}), v.mlp_out_rstd = at_size(a.mlp_out_rstd, {T});
  v.mla = a.mla, v.moe = a.moe;
  return v;
}

BlockScratch at_size(const BlockScratch& s, const ModelConfig& c, const BlockInputs& in) {
  const UlyssesShape heads = ulysses_shape(c, in.parts());
  const int64_t T = in.T, all_T = T * in.parts();
  BlockScratch v;
  v.branch = at_size(s.branch, {T, c.hidden_size}), v.d_branch = at_size(s.d_branch, {T, c.hidden_size});
  v.d_act = at_size(s.d_act, {T, c.intermediate_size});
  v.d_attn = at_size(s.d_attn, {T, c.num_heads, c.head_dim});
  v.dqkv = at_size(s.dqkv, {T, c.num_heads + 2 * c.num_kv_heads, c.head_dim});
  v.attention_workspace = s.attention_workspace;
  v.mla = s.mla, v.moe = s.moe;
  v.d_attn_all = at_size(in.ulysses ? s.d_attn_all : s.d_attn, {all_T, heads.part_heads(), c.head_dim});
  v.dqkv_all = at_size(in.ulysses ? s.dqkv_all : s.dqkv, {all_T, heads.part_qkv_heads(), c.head_dim});
  return v;
}

/// Of the heads of one of P ranks.
AttentionShape attention_shape(const ModelConfig& c, int layer, int64_t P) {
  const UlyssesShape heads = ulysses_shape(c, P);
  return {heads.part_heads(), heads.part_kv_heads(), c.head_dim,
          c.attention_scale,  c.attention_softcap,   c.layers[static_cast<size_t>(layer)].window,
          c.has_sinks};
}

/// Those of this rank's heads.
Tensor my_sinks(Tensor sinks, const BlockInputs& in) {
  if (!sinks || !in.ulysses) return sinks;
  const int64_t heads = in.ulysses->shape().part_heads();
  return sinks.rows(in.ulysses->part() * heads, heads);
}

QkNormShape qk_norm_shape(const ModelConfig& c) {
  return {c.num_heads, c.num_kv_heads, c.head_dim, c.qk_norm == QkNorm::PerHead};
}

GateKind gate_kind(const ModelConfig& c) {
  return c.activation == Activation::SwiGlu ? GateKind::Silu : GateKind::GeluTanh;
}

/// Of a layer; nothing rotates in one without position embedding.
Rotation rotation_of(const ModelConfig& c, int layer, const BlockInputs& in) {
  const int index = c.layers[static_cast<size_t>(layer)].rope;
  if (index < 0) return {};
  const auto& rope = in.ropes[static_cast<size_t>(index)];
  return {rope.cos, rope.sin, c.ropes[static_cast<size_t>(index)].pairing == RopePairing::Interleaved};
}

/// What a token of this layer sees no further than.
const Documents& documents_of(const ModelConfig& c, int layer, const BlockInputs& in) {
  return c.layers[static_cast<size_t>(layer)].chunk > 0 ? in.chunks : in.documents;
}

}  // namespace

UlyssesShape ulysses_shape(const ModelConfig& c, int64_t P) {
  return {c.num_heads, c.num_kv_heads, c.head_dim, P};
}

BlockParams block_params(const ParamUnit& unit, std::span<const Tensor> views) {
  const auto find = [&](std::string_view name) {
    for (size_t i = 0; i < unit.params.size(); i++) {
      if (unit.params[i].name == name) return views[i];
    }
    return Tensor{};
  };
  BlockParams p;
  p.attn_in_norm = find(param_name::kAttnInNorm);
  p.qkv = find(param_name::kQkv), p.qkv_bias = find(param_name::kQkvBias);
  p.q_norm = find(param_name::kQNorm), p.k_norm = find(param_name::kKNorm);
  p.sinks = find(param_name::kSinks);
  p.q_a = find(param_name::kQA), p.q_a_bias = find(param_name::kQABias), p.q_a_norm = find(param_name::kQANorm);
  p.q_b = find(param_name::kQB), p.kv_a = find(param_name::kKvA), p.kv_a_bias = find(param_name::kKvABias);
  p.kv_a_norm = find(param_name::kKvANorm), p.kv_b = find(param_name::kKvB);
  p.o = find(param_name::kO), p.o_bias = find(param_name::kOBias);
  p.attn_out_norm = find(param_name::kAttnOutNorm), p.mlp_in_norm = find(param_name::kMlpInNorm);
  p.gate_up = find(param_name::kGateUp), p.gate_up_bias = find(param_name::kGateUpBias);
  p.down = find(param_name::kDown), p.down_bias = find(param_name::kDownBias);
  p.mlp_out_norm = find(param_name::kMlpOutNorm);
  p.router = find(param_name::kRouter), p.router_bias = find(param_name::kRouterBias);
  p.experts_gate_up = find(param_name::kExpertsGateUp), p.experts_gate_up_bias = find(param_name::kExpertsGateUpBias);
  p.experts_down = find(param_name::kExpertsDown), p.experts_down_bias = find(param_name::kExpertsDownBias);
  p.shared_gate = find(param_name::kSharedGate);
  return p;
}

BlockActivations place_block_activations(Arena& arena, const ModelConfig& c, int layer, DType dtype, int64_t T,
                                         int64_t P) {
  const auto has = [&](bool is_moe) {
    if (layer >= 0) return c.layers[static_cast<size_t>(layer)].is_moe == is_moe;
    return std::any_of(c.layers.begin(), c.layers.end(), [&](const LayerConfig& l) { return l.is_moe == is_moe; });
  };
  const UlyssesShape heads = ulysses_shape(c, P);
  const int64_t all_T = T * P, C = c.hidden_size, F = c.intermediate_size;
  const DType sums = accumulator_dtype(dtype);
  BlockActivations a;
  if (!c.norms.attn_in.empty()) {
    a.attn_in = arena.place(dtype, {T, C}, "attn_in");
    a.attn_in_rstd = arena.place(sums, {T}, "attn_in_rstd");
  }
  if (c.qk_norm != QkNorm::None) {
    a.qkv_raw = arena.place(dtype, {T, c.qkv_dim()}, "qkv_raw");
    a.qk_rstd = arena.place(sums, {T, qk_norm_shape(c).num_norms()}, "qk_rstd");
  }
  a.qkv = arena.place(dtype, {all_T, heads.part_qkv_heads() * c.head_dim}, "qkv");
  a.attn = arena.place(dtype, {all_T, heads.part_heads() * c.head_dim}, "attn");
  a.lse = arena.place(sums, {heads.part_heads(), all_T}, "lse");
  if (P > 1) a.attn_mine = arena.place(dtype, {T, c.q_dim()}, "attn of my tokens");
  if (!c.norms.attn_out.empty()) {
    a.attn_out = arena.place(dtype, {T, C}, "attn_out");
    a.attn_out_rstd = arena.place(sums, {T}, "attn_out_rstd");
  }
  if (!c.parallel_block) a.mid = arena.place(dtype, {T, C}, "mid");
  if (!c.norms.mlp_in.empty()) {
    a.mlp_in = arena.place(dtype, {T, C}, "mlp_in");
    a.mlp_in_rstd = arena.place(sums, {T}, "mlp_in_rstd");
  }
  if (has(false)) {
    a.gate_up = arena.place(dtype, {T, 2 * F}, "gate_up");
    a.act = arena.place(dtype, {T, F}, "act");
  }
  if (c.mla) a.mla = place_mla_activations(arena, c, dtype, T);
  if (has(true)) a.moe = place_moe_activations(arena, c, dtype, T);
  if (!c.norms.mlp_out.empty()) {
    a.mlp_out = arena.place(dtype, {T, C}, "mlp_out");
    a.mlp_out_rstd = arena.place(sums, {T}, "mlp_out_rstd");
  }
  return a;
}

BlockScratch place_block_scratch(Arena& arena, const ModelConfig& c, DType dtype, int64_t T, int64_t P,
                                 DeviceKind kind) {
  const UlyssesShape heads = ulysses_shape(c, P);
  size_t attention_bytes = 0;
  for (int layer = 0; layer < c.num_layers; layer++) {
    attention_bytes =
        std::max(attention_bytes, attention_workspace_bytes(attention_shape(c, layer, P), dtype, T * P, kind));
  }
  BlockScratch s;
  s.branch = arena.place(dtype, {T, c.hidden_size}, "branch");
  s.d_branch = arena.place(dtype, {T, c.hidden_size}, "d_branch");
  const auto is_moe = [](const LayerConfig& l) { return l.is_moe; };
  if (!std::all_of(c.layers.begin(), c.layers.end(), is_moe)) {
    s.d_act = arena.place(dtype, {T, c.intermediate_size}, "d_act");
  }
  if (c.mla) s.mla = place_mla_scratch(arena, c, dtype, T);
  if (c.moe) s.moe = place_moe_scratch(arena, c, dtype, T);
  s.d_attn = arena.place(dtype, {T, c.q_dim()}, "d_attn");
  s.dqkv = arena.place(dtype, {T, c.qkv_dim()}, "dqkv");
  s.attention_workspace = arena.place(DType::U8, {static_cast<int64_t>(attention_bytes)}, "attention workspace");
  if (P > 1) {
    s.d_attn_all = arena.place(dtype, {T * P, heads.part_heads() * c.head_dim}, "d_attn of my heads");
    s.dqkv_all = arena.place(dtype, {T * P, heads.part_qkv_heads() * c.head_dim}, "dqkv of my heads");
  }
  return s;
}

void block_forward(Device& device, const ModelConfig& c, int layer, Tensor out, ConstTensor h, const BlockParams& p,
                   const BlockInputs& in, BlockActivations& saved, BlockScratch& scratch) {
  const int64_t T = in.T;
  const BlockActivations a = at_size(saved, c, in);
  const BlockScratch s = at_size(scratch, c, in);

  // Attention branch
  ConstTensor attn_in = h;
  if (p.attn_in_norm) {
    rmsnorm_forward(device, a.attn_in, a.attn_in_rstd, h, p.attn_in_norm, c.stream_eps(), c.norm);
    attn_in = a.attn_in;
  }
  const bool has_qk_norm = c.qk_norm != QkNorm::None;
  const Tensor qkv = in.ulysses ? s.dqkv : a.qkv;  // of my tokens; the gradient's buffer is free in the forward
  const Tensor projected = has_qk_norm ? a.qkv_raw : qkv;
  if (c.mla) {
    mla_forward(device, c, projected, attn_in, p, a.mla, s.mla);
  } else {
    linear_forward(device, projected.reshaped({T, c.qkv_dim()}), attn_in, p.qkv, p.qkv_bias);
  }
  const Rotation rotation = rotation_of(c, layer, in);
  if (has_qk_norm) {
    qk_norm_forward(device, qkv, a.qk_rstd, a.qkv_raw, p.q_norm, p.k_norm, qk_norm_shape(c), c.norm_eps, c.norm,
                    rotation);
  } else if (rotation) {
    rope_forward(device, qkv, rotation.cos, rotation.sin, c.num_heads + c.num_kv_heads, rotation.interleaved);
  }
  if (in.ulysses) in.ulysses->scatter_heads(device, a.qkv, qkv);
  attention_forward(device, a.attn, a.lse, a.qkv, documents_of(c, layer, in), attention_shape(c, layer, in.parts()),
                    s.attention_workspace, my_sinks(p.sinks, in));
  if (in.ulysses) in.ulysses->gather_heads(device, a.attn_mine, a.attn);
  // A parallel block adds to `out`; where that is null nobody needs this branch, for the backward does not.
  const Tensor mid = c.parallel_block ? out : a.mid;
  if (mid) {
    const Tensor attn_out = p.attn_out_norm ? a.attn_out : s.branch;
    const Tensor o_in = c.mla ? a.mla.attn.rows(0, T) : a.attn_mine.reshaped({T, c.q_dim()});
    if (c.mla) mla_narrow(device, o_in, a.attn_mine, mla_shape(c));
    linear_forward(device, attn_out, o_in, p.o, p.o_bias);
    if (p.attn_out_norm) {
      rmsnorm_forward(device, s.branch, a.attn_out_rstd, attn_out, p.attn_out_norm, c.norm_eps, c.norm);
    }
  }

  // MLP branch. The add at its end is not fused with the next block's first norm, which is recomputed with that block:
  // it would save one of some hundred passes over (T, C).
  ConstTensor mlp_in = c.parallel_block ? attn_in : mid;
  if (p.mlp_in_norm) {
    add_rmsnorm_forward(device, mid, a.mlp_in, a.mlp_in_rstd, h, s.branch, p.mlp_in_norm, c.stream_eps(), c.norm);
    mlp_in = a.mlp_in;
  } else if (mid) {
    residual_add(device, mid, h, s.branch);
  }
  const Tensor mlp_out = p.mlp_out_norm ? a.mlp_out : out ? s.branch : Tensor{};
  if (p.router) {
    moe_forward(device, c, layer, mlp_out, mlp_in, p, in, a.moe, s.moe);
  } else {
    linear_forward(device, a.gate_up, mlp_in, p.gate_up, p.gate_up_bias);
    gated_act_forward(device, a.act, a.gate_up, gate_kind(c));
    if (mlp_out) linear_forward(device, mlp_out, a.act, p.down, p.down_bias);
  }
  if (!mlp_out) return;
  if (p.mlp_out_norm) {
    rmsnorm_forward(device, s.branch, a.mlp_out_rstd, mlp_out, p.mlp_out_norm, c.norm_eps, c.norm);
  }
  if (out) residual_add(device, out, mid, s.branch);
}

void block_backward(Device& device, const ModelConfig& c, int layer, Tensor dh, ConstTensor h, const BlockParams& p,
                    const BlockParams& g, const BlockInputs& in, BlockActivations& saved, BlockScratch& scratch) {
  const int64_t T = in.T;
  const BlockActivations a = at_size(saved, c, in);
  const BlockScratch s = at_size(scratch, c, in);

  // out = mid + mlp_out_norm(mlp_out): dh reaches both mid and the branch
  ConstTensor d_mlp_out = dh;
  if (p.mlp_out_norm) {
    rmsnorm_backward(device, s.d_branch, g.mlp_out_norm, dh, a.mlp_out, a.mlp_out_rstd, p.mlp_out_norm, c.norm);
    d_mlp_out = s.d_branch;
  }
  // mlp_out = act W_down^T + b,  act = gated_act(gate_up),  gate_up = mlp_in W_gate_up^T + b
  const ConstTensor attn_in = p.attn_in_norm ? ConstTensor(a.attn_in) : h;
  const ConstTensor mlp_in = c.parallel_block ? attn_in : p.mlp_in_norm ? ConstTensor(a.mlp_in) : a.mid;
  if (p.router) {
    moe_backward(device, c, s.branch, d_mlp_out, mlp_in, p, g, in, a.moe, s.moe);
  } else {
    linear_backward(device, s.d_act, g.down, g.down_bias, d_mlp_out, a.act, p.down);
    gated_act_backward(device, a.gate_up, s.d_act, a.gate_up, gate_kind(c));  // a.gate_up now holds its gradient
    linear_backward(device, s.branch, g.gate_up, g.gate_up_bias, a.gate_up, mlp_in, p.gate_up);
  }
  if (p.mlp_in_norm) {
    rmsnorm_backward(device, dh, g.mlp_in_norm, s.branch, a.mid, a.mlp_in_rstd, p.mlp_in_norm, c.norm, dh);
  } else if (!c.parallel_block) {
    residual_add(device, dh, dh, s.branch);
  }

  // mid = h + attn_out_norm(attn_out)
  ConstTensor d_attn_out = dh;
  if (p.attn_out_norm) {
    rmsnorm_backward(device, s.d_branch, g.attn_out_norm, dh, a.attn_out, a.attn_out_rstd, p.attn_out_norm, c.norm);
    d_attn_out = s.d_branch;
  }
  // attn_out = attn W_o^T + b,  attn = attention(rope(qk_norm(qkv_raw)))
  if (c.mla) {
    const Tensor d_narrow = s.mla.d_attn.rows(0, T);
    linear_backward(device, d_narrow, g.o, g.o_bias, d_attn_out, a.mla.attn.rows(0, T), p.o);
    mla_widen(device, s.d_attn, d_narrow, mla_shape(c));
  } else {
    linear_backward(device, s.d_attn.reshaped({T, c.q_dim()}), g.o, g.o_bias, d_attn_out,
                    a.attn_mine.reshaped({T, c.q_dim()}), p.o);
  }
  if (in.ulysses) in.ulysses->gather_heads_backward(device, s.d_attn_all, s.d_attn);
  attention_backward(device, s.dqkv_all, s.d_attn_all, a.qkv, a.attn, a.lse, documents_of(c, layer, in),
                     attention_shape(c, layer, in.parts()), s.attention_workspace, my_sinks(p.sinks, in),
                     my_sinks(g.sinks, in));
  if (in.ulysses) in.ulysses->scatter_heads_backward(device, s.dqkv, s.dqkv_all);
  const Rotation rotation = rotation_of(c, layer, in);
  Tensor dqkv = s.dqkv;
  if (c.qk_norm != QkNorm::None) {
    dqkv = a.qkv_raw;  // which now holds its gradient
    qk_norm_backward(device, dqkv, g.q_norm, g.k_norm, s.dqkv, a.qkv_raw, a.qk_rstd, p.q_norm, p.k_norm,
                     qk_norm_shape(c), c.norm, rotation);
  } else if (rotation) {
    rope_backward(device, dqkv, rotation.cos, rotation.sin, c.num_heads + c.num_kv_heads, rotation.interleaved);
  }
  const Tensor d_attn_in = c.parallel_block ? s.d_branch : s.branch;
  if (c.mla) {
    mla_backward(device, c, d_attn_in, dqkv, attn_in, p, g, a.mla, s.mla);
  } else {
    linear_backward(device, d_attn_in, g.qkv, g.qkv_bias, dqkv.reshaped({T, c.qkv_dim()}), attn_in, p.qkv);
  }
  if (c.parallel_block) residual_add(device, s.branch, s.d_branch, s.branch);  // attn_in fed the MLP as well
  if (p.attn_in_norm) {
    rmsnorm_backward(device, dh, g.attn_in_norm, s.branch, h, a.attn_in_rstd, p.attn_in_norm, c.norm, dh);
  } else {
    residual_add(device, dh, dh, s.branch);
  }
}
