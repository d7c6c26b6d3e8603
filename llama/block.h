// One transformer block, forward and backward, for every supported family:
//
//   a = attn_in_norm(h)          (h itself without such a norm)
//   qkv = a W_qkv^T + b;         q, k = qk_norm(q, k);  q, k = rope(q, k)
//     or q, k, v from latents, see mla_block.h
//   h' = h + attn_out_norm(attention(q, k, v) W_o^T + b)
//   m = mlp_in_norm(h')          (a in a parallel block, which has neither this norm nor output norms)
//   out = h' + mlp_out_norm(gated_act(m W_gate_up^T + b) W_down^T + b)     or a mixture of experts, see moe_block.h
//
// Letters: T tokens, C width, NH / NKV heads, HD head width, F MLP width. With sequence parallelism (Ulysses) over P
// ranks, T are the tokens of this rank, and attention sees all P T tokens with NH / P heads.
#pragma once

#include <span>
#include <vector>

#include "comm/ulysses.h"
#include "layers/attention.h"
#include "layers/core/arena.h"
#include "layers/mla.h"
#include "llama/config.h"
#include "llama/params.h"

/// The weights (or their gradients) of a block by role; null where the model has none.
struct BlockParams {
  Tensor attn_in_norm, qkv, qkv_bias, q_norm, k_norm, sinks, o, o_bias, attn_out_norm;
  Tensor q_a, q_a_bias, q_a_norm, q_b, kv_a, kv_a_bias, kv_a_norm, kv_b;     // instead of qkv
  Tensor mlp_in_norm, gate_up, gate_up_bias, down, down_bias, mlp_out_norm;  // the MLP's, or those of the shared expert
  Tensor router, router_bias, experts_gate_up, experts_gate_up_bias, experts_down, experts_down_bias, shared_gate;
};

/// Finds them among the views of a unit.
BlockParams block_params(const ParamUnit& unit, std::span<const Tensor> views);

/// Of latent attention, see mla_block.h.
struct MlaActivations {
  Tensor q_raw, q, q_rstd;     // (T, LQ), (T, LQ), (T): the latent of q before and after its norm; only with one
  Tensor kv_raw, kv, kv_rstd;  // (T, LK), (T, LK), (T)
  Tensor attn;                 // (T, NH dv): attn_mine without its padding
};

struct MlaScratch {
  Tensor q, kv, k_rope;                // (T, NH HD), (T, NH (dn + dv)), (T, dr), or their gradients
  Tensor d_q_latent, d_kv_latent, dx;  // (T, LQ), (T, LK), (T, C)
  Tensor d_attn;                       // (T, NH dv)
};

/// Of a mixture of experts, see moe_block.h: R = T k rows.
struct MoeActivations {
  Tensor logits;                      // (T, E)
  Routing routing;                    // see layers/moe.h
  Tensor gate_up, act;                // (R, 2F), (R, F)
  Tensor shared_gate_up, shared_act;  // (T, 2S), (T, S)
  Tensor shared_out, shared_gate;     // (T, C), (T, 1): only with a gate
};

struct MoeScratch {
  Tensor rows_in, rows_out;                          // (R, C): to the experts, and from them
  Tensor d_act, d_row_weights, d_logits;             // (R, F), (R), (T, E)
  Tensor d_shared, d_shared_act, d_shared_gate, dx;  // (T, C), (T, S), (T, 1), (T, C)
};

/// What the forward saves for the backward. Sizes are for the largest T; every call uses the first T tokens.
struct BlockActivations {
  Tensor attn_in, attn_in_rstd;    // (T, C), (T): the normed input; the block's input itself when there is no norm
  Tensor qkv_raw, qk_rstd;         // (T, QKV), (T, norms): before qk_norm; only with qk_norm
  Tensor qkv;                      // (all T, QKV / P): what attention saw, of this rank's heads
  Tensor attn, lse;                // (all T, NH * HD / P), (NH / P, all T)
  Tensor attn_mine;                // (T, NH * HD): of all heads; only with P > 1
  Tensor attn_out, attn_out_rstd;  // (T, C), (T): before the output norm; only with one
  Tensor mid;                      // (T, C): h'; not in a parallel block
  Tensor mlp_in, mlp_in_rstd;      // (T, C), (T): only with such a norm
  Tensor gate_up, act;             // (T, 2F), (T, F)
  Tensor mlp_out, mlp_out_rstd;    // (T, C), (T)
  MlaActivations mla;              // beside qkv
  MoeActivations moe;              // instead of gate_up and act
};

/// Buffers that no call leaves anything in; shared by all blocks.
struct BlockScratch {
  Tensor branch;                // (T, C): forward: a branch before it is added; backward: its gradient
  Tensor d_branch;              // (T, C)
  Tensor d_act;                 // (T, F)
  Tensor d_attn;                // (T, NH * HD)
  Tensor dqkv;                  // (T, QKV)
  Tensor attention_workspace;   // bytes
  Tensor d_attn_all, dqkv_all;  // (all T, NH * HD / P), (all T, QKV / P): only with P > 1
  MlaScratch mla;
  MoeScratch moe;
};

/// Where a layer's forward adds up what its router does, of tokens that are no padding.
struct RouterStatistics {
  Tensor counts;         ///< (E) F64: rows of each expert
  Tensor probabilities;  ///< (E) F64: sum of softmax(logits); null without a load-balancing loss
};

/// The first elements of a buffer that was placed for the largest T, at the T of this batch. Null stays null.
Tensor at_size(Tensor buffer, Shape shape);

/// How the heads of this model are dealt to P ranks.
UlyssesShape ulysses_shape(const ModelConfig& config, int64_t P);

/// `layer` -1: for any layer.
BlockActivations place_block_activations(Arena& arena, const ModelConfig& config, int layer, DType dtype, int64_t T,
                                         int64_t P);
BlockScratch place_block_scratch(Arena& arena, const ModelConfig& config, DType dtype, int64_t T, int64_t P,
                                 DeviceKind kind);

/// What the batch brings to every block.
struct BlockInputs {
  int64_t T = 0;
  Documents documents;         ///< of all tokens
  Documents chunks;            ///< documents cut into the chunks of the layers that have them
  Ulysses* ulysses = nullptr;  ///< null: P = 1
  struct Rope {
    Tensor cos, sin;  // (T, r/2)
  };
  std::vector<Rope> ropes;  ///< one for each of ModelConfig::ropes

  // Of a mixture of experts
  Tensor is_token;                           ///< (T) I32: 0 = padding
  std::vector<Tensor> select_bias;           ///< of each layer, or none, see route_forward
  std::vector<RouterStatistics> statistics;  ///< of each layer; empty: nothing is counted
  Tensor balance_slope;                      ///< see route_backward; null: none

  int64_t parts() const { return ulysses ? ulysses->shape().parts : 1; }
};

/// out (T, C) <- h (T, C). out and h differ. `out` null: only what the backward needs is computed, for recomputing.
void block_forward(Device& device, const ModelConfig& config, int layer, Tensor out, ConstTensor h,
                   const BlockParams& params, const BlockInputs& inputs, BlockActivations& saved,
                   BlockScratch& scratch);

/// dh (T, C): in, the gradient of out; out, the gradient of h. Parameter gradients +=. The gate_up tensors
/// and qkv_raw of `saved` are overwritten.
void block_backward(Device& device, const ModelConfig& config, int layer, Tensor dh, ConstTensor h,
                    const BlockParams& params, const BlockParams& grads, const BlockInputs& inputs,
                    BlockActivations& saved, BlockScratch& scratch);
