#include "llama/moe_block.h"

#include "layers/linear.h"
#include "layers/reduce.h"

namespace {

/// The saved tensors and the scratch at the T of this batch.
MoeActivations at_size(const MoeActivations& a, const ModelConfig& c, int64_t T) {
  const MoeConfig& moe = c.moe;
  const int64_t k = moe.router.top_k, E = moe.router.num_experts, R = T * k, F = moe.intermediate_size,
                S = moe.shared_intermediate_size, C = c.hidden_size;
  MoeActivations v;
  v.logits = at_size(a.logits, {T, E});
  v.routing = {at_size(a.routing.experts, {T, k}), at_size(a.routing.rows, {T, k}), at_size(a.routing.slots, {R}),
               at_size(a.routing.row_weights, {R}), a.routing.offsets};
  v.gate_up = at_size(a.gate_up, {R, 2 * F}), v.act = at_size(a.act, {R, F});
  v.shared_gate_up = at_size(a.shared_gate_up, {T, 2 * S}), v.shared_act = at_size(a.shared_act, {T, S});
  v.shared_out = at_size(a.shared_out, {T, C}), v.shared_gate = at_size(a.shared_gate, {T, 1});
  return v;
}

MoeScratch at_size(const MoeScratch& s, const ModelConfig& c, int64_t T) {
  const MoeConfig& moe = c.moe;
  const int64_t R = T * moe.router.top_k, C = c.hidden_size;
  MoeScratch v;
  v.rows_in = at_size(s.rows_in, {R, C}), v.rows_out = at_size(s.rows_out, {R, C});
  v.d_act = at_size(s.d_act, {R, moe.intermediate_size}), v.d_row_weights = at_size(s.d_row_weights, {R});
  v.d_logits = at_size(s.d_logits, {T, moe.router.num_experts});
  v.d_shared = at_size(s.d_shared, {T, C}), v.d_shared_act = at_size(s.d_shared_act, {T, moe.shared_intermediate_size});
  v.d_shared_gate = at_size(s.d_shared_gate, {T, 1}), v.dx = at_size(s.dx, {T, C});
  return v;
}

}  // namespace

MoeActivations place_moe_activations(Arena& arena, const ModelConfig& c, DType dtype, int64_t T) {
  const MoeConfig& moe = c.moe;
  const int64_t k = moe.router.top_k, E = moe.router.num_experts, R = T * k, F = moe.intermediate_size,
                S = moe.shared_intermediate_size;
  const DType sums = accumulator_dtype(dtype);
  MoeActivations a;
  a.logits = arena.place(sums, {T, E}, "router logits");
  a.routing.experts = arena.place(DType::I32, {T, k}, "experts of tokens");
  a.routing.rows = arena.place(DType::I32, {T, k}, "rows of tokens");
  a.routing.slots = arena.place(DType::I32, {R}, "tokens of rows");
  a.routing.row_weights = arena.place(sums, {R}, "weights of rows");
  a.routing.offsets = arena.place(DType::I32, {E + 1}, "rows of experts");
  a.gate_up = arena.place(dtype, {R, 2 * F}, "experts' gate_up");
  a.act = arena.place(dtype, {R, F}, "experts' act");
  if (S > 0) {
    a.shared_gate_up = arena.place(dtype, {T, 2 * S}, "shared gate_up");
    a.shared_act = arena.place(dtype, {T, S}, "shared act");
  }
  if (moe.has_shared_gate) {
    a.shared_out = arena.place(dtype, {T, c.hidden_size}, "shared out");
    a.shared_gate = arena.place(dtype, {T, 1}, "shared gate");
  }
  return a;
}

MoeScratch place_moe_scratch(Arena& arena, const ModelConfig& c, DType dtype, int64_t T) {
  const MoeConfig& moe = c.moe;
  const int64_t R = T * moe.router.top_k, C = c.hidden_size;
  MoeScratch s;
  s.rows_in = arena.place(dtype, {R, C}, "rows to the experts");
  s.rows_out = arena.place(dtype, {R, C}, "rows from the experts");
  s.d_act = arena.place(dtype, {R, moe.intermediate_size}, "experts' d_act");
  s.d_row_weights = arena.place(accumulator_dtype(dtype), {R}, "d weights of rows");
  s.d_logits = arena.place(dtype, {T, moe.router.num_experts}, "d router logits");
  s.dx = arena.place(dtype, {T, C}, "dx of the router");
  if (moe.shared_intermediate_size > 0) {
    s.d_shared_act = arena.place(dtype, {T, moe.shared_intermediate_size}, "shared d_act");
    s.d_shared = arena.place(dtype, {T, C}, "shared out, or its gradient");
  }
  if (moe.has_shared_gate) s.d_shared_gate = arena.place(dtype, {T, 1}, "d shared gate");
  return s;
}

void moe_forward(Device& device, const ModelConfig& c, int layer, Tensor out, ConstTensor x, const BlockParams& p,
                 const BlockInputs& in, const MoeActivations& saved, const MoeScratch& scratch) {
  const MoeConfig& moe = c.moe;
  const MoeActivations a = at_size(saved, c, in.T);
  const MoeScratch s = at_size(scratch, c, in.T);

  linear_forward(device, a.logits, x, p.router, p.router_bias);
  route_forward(device, a.routing, a.logits,
                moe.has_select_bias ? in.select_bias[static_cast<size_t>(layer)] : Tensor{}, moe.router);
  if (!in.statistics.empty()) {
    const RouterStatistics& statistics = in.statistics[static_cast<size_t>(layer)];
    route_statistics(device, statistics.counts, statistics.probabilities, a.logits, a.routing, in.is_token);
  }
  route_gather(device, s.rows_in, x, a.routing);
  grouped_linear_forward(device, a.gate_up, s.rows_in, p.experts_gate_up, p.experts_gate_up_bias, a.routing.offsets,
                         moe.layout);
  gated_act_forward(device, a.act, a.gate_up, moe.gate, a.routing.row_weights);

  CombineTerms terms;
  if (moe.shared_intermediate_size > 0) {
    linear_forward(device, a.shared_gate_up, x, p.gate_up, p.gate_up_bias);
    gated_act_forward(device, a.shared_act, a.shared_gate_up, GateKind::Silu);
    const Tensor shared = moe.has_shared_gate ? a.shared_out : s.d_shared;
    if (out || moe.has_shared_gate) linear_forward(device, shared, a.shared_act, p.down, p.down_bias);
    if (moe.has_shared_gate) linear_forward(device, a.shared_gate, x, p.shared_gate, {});
    terms.shared = shared, terms.shared_gate = a.shared_gate;
  }
  if (!out) return;
  grouped_linear_forward(device, s.rows_out, a.act, p.experts_down, {}, a.routing.offsets, moe.layout);
  terms.bias = p.experts_down_bias;
  route_combine(device, out, s.rows_out, a.routing, terms);
}

void moe_backward(Device& device, const ModelConfig& c, Tensor dx, ConstTensor d_out, ConstTensor x,
                  const BlockParams& p, const BlockParams& g, const BlockInputs& in, const MoeActivations& saved,
                  const MoeScratch& scratch) {
  const MoeConfig& moe = c.moe;
  const MoeActivations a = at_size(saved, c, in.T);
  const MoeScratch s = at_size(scratch, c, in.T);

  // The experts: out = sum of y (+ w b), y = act W_down^T, act = w gated_act(gate_up), gate_up = x W_gate_up^T + b
  route_gather(device, s.rows_out, d_out, a.routing);
  grouped_linear_backward(device, s.d_act, g.experts_down, {}, s.rows_out, a.act, p.experts_down, a.routing.offsets,
                          moe.layout);
  gated_act_backward(device, a.gate_up, s.d_act, a.gate_up, moe.gate, a.routing.row_weights, s.d_row_weights);
  if (moe.has_biases) {
    route_bias_backward(device, g.experts_down_bias, s.d_row_weights, d_out, p.experts_down_bias, a.routing);
  }
  route_gather(device, s.rows_in, x, a.routing);
  grouped_linear_backward(device, s.rows_out, g.experts_gate_up, g.experts_gate_up_bias, a.gate_up, s.rows_in,
                          p.experts_gate_up, a.routing.offsets, moe.layout);

  // The router
  route_backward(device, s.d_logits, s.d_row_weights, a.logits, a.routing, moe.router, in.balance_slope,
                 in.balance_slope ? ConstTensor(in.is_token) : ConstTensor());
  linear_backward(device, s.dx, g.router, g.router_bias, s.d_logits, x, p.router);
  route_combine(device, dx, s.rows_out, a.routing, {.addend = s.dx});

  // The shared expert
  if (moe.shared_intermediate_size == 0) return;
  ConstTensor d_shared = d_out;
  if (moe.has_shared_gate) {
    shared_gate_backward(device, s.d_shared, s.d_shared_gate, d_out, a.shared_out, a.shared_gate);
    d_shared = s.d_shared;
    linear_backward(device, s.dx, g.shared_gate, {}, s.d_shared_gate, x, p.shared_gate);
    residual_add(device, dx, dx, s.dx);
  }
  linear_backward(device, s.d_shared_act, g.down, g.down_bias, d_shared, a.shared_act, p.down);
  gated_act_backward(device, a.shared_gate_up, s.d_shared_act, a.shared_gate_up, GateKind::Silu);
  linear_backward(device, s.dx, g.gate_up, g.gate_up_bias, a.shared_gate_up, x, p.gate_up);
  residual_add(device, dx, dx, s.dx);
}
