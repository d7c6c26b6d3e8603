// LM head and cross-entropy, fused in tiles of tokens: the (T, V) logits never exist whole.
//   z = softcap(logit_scale x W^T)    nll_t = log sum_v exp(z_tv) - z_t,target    target -100: no loss, no gradient
//   dz = (softmax(z) - onehot) * grad_scale                                   grad_scale = 1 / N, N over the whole step
// Rows without a target cost nothing: they are left out before the GEMM. Which rows those are is found out once per
// batch, on the host, so that a step on a GPU waits for nothing. CUDA: loss.cu.
//
// What holds exactly: the sum of nll is added in fp64 in a fixed order of the rows; the number of threads changes no
// bit; asking for `logits` changes no bit of loss, dx and dw. tile_tokens decides how many rows one GEMM sees and how
// the sum over rows in dw is grouped: another tile_tokens agrees to rounding.
#pragma once

#include <span>
#include <vector>

#include "layers/core/device.h"
#include "layers/core/tensor.h"

struct LossShape {
  double softcap = 0;          ///< cap * tanh(z / cap); 0 = none
  int64_t tile_tokens = 1024;  ///< rows of logits that exist at once
  double logit_scale = 1;      ///< multiplies x W^T, before the softcap
};

/// The order in which rows are worked on.
struct LossRows {
  ConstTensor rows;         ///< (T) I32, as loss_rows() gives them, in the device's memory
  int64_t num_targets = 0;  ///< the first so many have a target
};

/// Rows with a target first, their number in `num_targets`, then those without, each ascending. A target that is
/// neither -100 nor in [0, V) is an Error.
std::vector<int32_t> loss_rows(std::span<const int32_t> targets, int64_t V, int64_t& num_targets);

/// Bytes of scratch for T tokens of x's `dtype`: logits of one tile, its rows of x and dx, 8 bytes a token, and for
/// BF16 the gradient of the logits of one tile.
size_t loss_workspace_bytes(const LossShape& shape, DType dtype, int64_t T, int64_t C, int64_t V);

/// nll (1) F64 += the sum of nll over all rows with a target. x (T, C), w (V, C), targets (T) I32 and their `rows`.
/// logits (T, V) in accumulator_dtype(x.dtype) of every row, as the cross-entropy sees them, are written too when the
/// tensor is not null (then no row is left out).
void loss_forward(Device& device, Tensor nll, ConstTensor x, ConstTensor w, ConstTensor targets, const LossRows& rows,
                  const LossShape& shape, Tensor workspace, Tensor logits = {});

/// Forward and backward at once: nll as above, not scaled; dx (T, C) = gradient of x, zero where no target is;
/// dw (V, C) += in accumulator_dtype(x.dtype). dx may be x's own memory.
void loss_forward_backward(Device& device, Tensor nll, Tensor dx, Tensor dw, ConstTensor x, ConstTensor w,
                           ConstTensor targets, const LossRows& rows, double grad_scale, const LossShape& shape,
                           Tensor workspace, Tensor logits = {});

// CUDA (loss.cu): cuBLASLt and kernels; called by the front doors above after the contract is checked. dx and dw are
// null for a forward.
void loss_cuda(Device& device, Tensor nll, Tensor dx, Tensor dw, ConstTensor x, ConstTensor w, ConstTensor targets,
               const LossRows& rows, double grad_scale, const LossShape& shape, Tensor workspace, Tensor logits);
