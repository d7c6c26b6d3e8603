#include "llama/mla_block.h"

#include <algorithm>

#include "layers/linear.h"
#include "layers/reduce.h"
#include "layers/rmsnorm.h"

namespace {

constexpr double kLatentEps = 1e-6;  // transformers' own, not rms_norm_eps

Tensor at_tokens(Tensor buffer, int64_t T) {
  return buffer ? buffer.rows(0, T) : buffer;
}

MlaActivations at_size(const MlaActivations& a, int64_t T) {
  MlaActivations v;
  v.q_raw = at_tokens(a.q_raw, T), v.q = at_tokens(a.q, T), v.q_rstd = at_tokens(a.q_rstd, T);
  v.kv_raw = at_tokens(a.kv_raw, T), v.kv = at_tokens(a.kv, T), v.kv_rstd = at_tokens(a.kv_rstd, T);
  return v;
}

MlaScratch at_size(const MlaScratch& s, int64_t T) {
  MlaScratch v;
  v.q = at_tokens(s.q, T), v.kv = at_tokens(s.kv, T), v.k_rope = at_tokens(s.k_rope, T);
  v.d_q_latent = at_tokens(s.d_q_latent, T), v.d_kv_latent = at_tokens(s.d_kv_latent, T), v.dx = at_tokens(s.dx, T);
  return v;
}

/// The rows of W_kv_a, or of its bias, that make the latent, and those that make k_rope.
Tensor latent_rows(Tensor kv_a, const ModelConfig& c) {
  return kv_a ? kv_a.rows(0, c.mla.kv_lora_rank) : kv_a;
}
Tensor rope_rows(Tensor kv_a, const ModelConfig& c) {
  return kv_a ? kv_a.rows(c.mla.kv_lora_rank, c.mla.rope) : kv_a;
}

}  // namespace

MlaShape mla_shape(const ModelConfig& c) {
  return {c.num_heads, c.mla.nope, c.mla.rope, c.mla.v};
}

MlaActivations place_mla_activations(Arena& arena, const ModelConfig& c, DType dtype, int64_t T) {
  const DType sums = accumulator_dtype(dtype);
  MlaActivations a;
  if (c.mla.q_lora_rank > 0) {
    a.q_raw = arena.place(dtype, {T, c.mla.q_lora_rank}, "q latent before its norm");
    a.q = arena.place(dtype, {T, c.mla.q_lora_rank}, "q latent");
    a.q_rstd = arena.place(sums, {T}, "q latent rstd");
  }
  a.kv_raw = arena.place(dtype, {T, c.mla.kv_lora_rank}, "kv latent before its norm");
  a.kv = arena.place(dtype, {T, c.mla.kv_lora_rank}, "kv latent");
  a.kv_rstd = arena.place(sums, {T}, "kv latent rstd");
  a.attn = arena.place(dtype, {T, c.o_dim()}, "attn without padding");
  return a;
}

MlaScratch place_mla_scratch(Arena& arena, const ModelConfig& c, DType dtype, int64_t T) {
  MlaScratch s;
  s.q = arena.place(dtype, {T, c.q_dim()}, "q as projected");
  s.kv = arena.place(dtype, {T, c.num_heads * (c.mla.nope + c.mla.v)}, "kv as projected");
  s.k_rope = arena.place(dtype, {T, c.mla.rope}, "k_rope");
  if (c.mla.q_lora_rank > 0) s.d_q_latent = arena.place(dtype, {T, c.mla.q_lora_rank}, "d q latent");
  s.d_kv_latent = arena.place(dtype, {T, c.mla.kv_lora_rank}, "d kv latent");
  s.dx = arena.place(dtype, {T, c.hidden_size}, "dx of a projection");
  s.d_attn = arena.place(dtype, {T, c.o_dim()}, "d_attn without padding");
  return s;
}

void mla_forward(Device& device, const ModelConfig& c, Tensor qkv, ConstTensor x, const BlockParams& p,
                 const MlaActivations& saved, const MlaScratch& scratch) {
  const int64_t T = x.shape[0];
  const MlaActivations a = at_size(saved, T);
  const MlaScratch s = at_size(scratch, T);
  if (c.mla.q_lora_rank > 0) {
    linear_forward(device, a.q_raw, x, p.q_a, p.q_a_bias);
    rmsnorm_forward(device, a.q, a.q_rstd, a.q_raw, p.q_a_norm, kLatentEps, c.norm);
    linear_forward(device, s.q, a.q, p.q_b, {});
  } else {
    linear_forward(device, s.q, x, p.q_b, {});
  }
  linear_forward(device, a.kv_raw, x, latent_rows(p.kv_a, c), latent_rows(p.kv_a_bias, c));
  linear_forward(device, s.k_rope, x, rope_rows(p.kv_a, c), rope_rows(p.kv_a_bias, c));
  rmsnorm_forward(device, a.kv, a.kv_rstd, a.kv_raw, p.kv_a_norm, kLatentEps, c.norm);
  linear_forward(device, s.kv, a.kv, p.kv_b, {});
  mla_assemble(device, qkv, s.q, s.kv, s.k_rope, mla_shape(c));
}

void mla_backward(Device& device, const ModelConfig& c, Tensor dx, ConstTensor dqkv, ConstTensor x,
                  const BlockParams& p, const BlockParams& g, const MlaActivations& saved, const MlaScratch& scratch) {
  const int64_t T = x.shape[0];
  const MlaActivations a = at_size(saved, T);
  const MlaScratch s = at_size(scratch, T);
  mla_assemble_backward(device, s.q, s.kv, s.k_rope, dqkv, mla_shape(c));  // which now hold their gradients
  if (c.mla.q_lora_rank > 0) {
    linear_backward(device, s.d_q_latent, g.q_b, {}, s.q, a.q, p.q_b);
    rmsnorm_backward(device, s.d_q_latent, g.q_a_norm, s.d_q_latent, a.q_raw, a.q_rstd, p.q_a_norm, c.norm);
    linear_backward(device, dx, g.q_a, g.q_a_bias, s.d_q_latent, x, p.q_a);
  } else {
    linear_backward(device, dx, g.q_b, {}, s.q, x, p.q_b);
  }
  linear_backward(device, s.d_kv_latent, g.kv_b, {}, s.kv, a.kv, p.kv_b);
  rmsnorm_backward(device, s.d_kv_latent, g.kv_a_norm, s.d_kv_latent, a.kv_raw, a.kv_rstd, p.kv_a_norm, c.norm);
  linear_backward(device, s.dx, latent_rows(g.kv_a, c), latent_rows(g.kv_a_bias, c), s.d_kv_latent, x,
                  latent_rows(p.kv_a, c));
  residual_add(device, dx, dx, s.dx);
  linear_backward(device, s.dx, rope_rows(g.kv_a, c), rope_rows(g.kv_a_bias, c), s.k_rope, x, rope_rows(p.kv_a, c));
  residual_add(device, dx, dx, s.dx);
}
