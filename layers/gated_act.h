// The gate of the MLP: y = act(gate) * up.
//   Silu:     act(z) = z * sigmoid(z)                                             SwiGLU (Shazeer, 2020)
//   GeluTanh: act(z) = 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3)))            GeGLU (Gemma)
// CUDA: gated_act.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

enum class GateKind { Silu, GeluTanh };

/// y (T, F) <- gate_up (T, 2F): gate columns, then up columns.
void gated_act_forward(Device& device, Tensor y, ConstTensor gate_up, GateKind kind);

/// d_gate_up (T, 2F) = gradient of gate_up <- dy (T, F). d_gate_up may be gate_up's own memory.
void gated_act_backward(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, GateKind kind);

// CUDA kernels (gated_act.cu); called by the front doors above after the contract is checked.
void gated_act_forward_cuda(Device& device, Tensor y, ConstTensor gate_up, GateKind kind);
void gated_act_backward_cuda(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, GateKind kind);
