// The gate of the MLP: y = act(gate) * up.
//   Silu:     act(z) = z * sigmoid(z)                                             SwiGLU (Shazeer, 2020)
//   GeluTanh: act(z) = 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))            GeGLU (Gemma)
//   Clamped:  g = min(gate, limit), u = clamp(up, -limit, limit);  y = (u + 1) g sigmoid(alpha g)    gpt-oss
// In a mixture of experts a row may have a weight: y = w act(gate) * up. The layer after it is linear, so that this is
// the weight of what the expert gives, and its gradient needs nothing else that is kept.
// CUDA: gated_act.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

enum class GateKind { Silu, GeluTanh, Clamped };

struct Gate {
  GateKind kind = GateKind::Silu;
  double alpha = 1.702, limit = 7;  ///< Clamped

  Gate(GateKind kind_) : kind(kind_) {}
  Gate(GateKind kind_, double alpha_, double limit_) : kind(kind_), alpha(alpha_), limit(limit_) {}
  /// Columns of gate and up by turns, as gpt-oss stores its weights; else gate columns, then up columns.
  bool is_interleaved() const { return kind == GateKind::Clamped; }
};

/// y (T, F) <- gate_up (T, 2F); row_weights (T) in accumulator_dtype, or null.
void gated_act_forward(Device& device, Tensor y, ConstTensor gate_up, const Gate& gate, ConstTensor row_weights = {});

/// d_gate_up (T, 2F) = gradient of gate_up <- dy (T, F). d_gate_up may be gate_up's own memory. d_row_weights (T) =
/// gradient of row_weights, null with it.
void gated_act_backward(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, const Gate& gate,
                        ConstTensor row_weights = {}, Tensor d_row_weights = {});

// CUDA kernels (gated_act.cu); called by the front doors above after the contract is checked.
void gated_act_forward_cuda(Device& device, Tensor y, ConstTensor gate_up, const Gate& gate, ConstTensor row_weights);
void gated_act_backward_cuda(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, const Gate& gate,
                             ConstTensor row_weights, Tensor d_row_weights);
