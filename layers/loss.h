// LM head and cross-entropy, fused in tiles of tokens: the (T, V) logits never exist whole.
//   z = softcap(x W^T)        nll_t = log sum_v exp(z_tv) - z_t,target        target -100: no loss, no gradient
//   dz = (softmax(z) - onehot) * grad_scale                                   grad_scale = 1 / N, N over the whole step
// Rows without a target cost nothing: they are left out before the GEMM.
//
// What holds exactly: the sum of nll is added in fp64 in the order of the rows; the number of threads changes no bit;
// asking for `logits` changes no bit of loss, dx and dw. tile_tokens decides how many rows one GEMM sees and how the
// sum over rows in dw is grouped: another tile_tokens agrees to rounding.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

struct LossShape {
  double softcap = 0;          ///< cap * tanh(z / cap); 0 = none
  int64_t tile_tokens = 1024;  ///< rows of logits that exist at once
};

/// Bytes of scratch for T tokens: logits of one tile, its rows of x and dx, and 16 bytes a token.
size_t loss_workspace_bytes(const LossShape& shape, DType dtype, int64_t T, int64_t C, int64_t V);

/// The sum of nll over all rows with a target. x (T, C), w (V, C), targets (T) I32.
/// logits (T, V) of every row, as the cross-entropy sees them, are written too when the tensor is not null (then no row
/// is left out). A target that is neither -100 nor in [0, V) is an Error.
double loss_forward(Device& device, ConstTensor x, ConstTensor w, ConstTensor targets, const LossShape& shape,
                    Tensor workspace, Tensor logits = {});

/// Forward and backward at once: returns the sum of nll (not scaled); dx (T, C) = gradient of x, zero where no target
/// is; dw (V, C) +=. dx may be x's own memory.
double loss_forward_backward(Device& device, Tensor dx, Tensor dw, ConstTensor x, ConstTensor w, ConstTensor targets,
                             double grad_scale, const LossShape& shape, Tensor workspace, Tensor logits = {});
