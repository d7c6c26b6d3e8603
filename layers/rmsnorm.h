// RMSNorm (Zhang & Sennrich, 2019) over the last dimension, and LayerNorm (Ba et al., 2016) without a bias.
//
//   rstd = 1 / sqrt(mean(x^2) + eps)        xhat = x * rstd        sums in fp32 (fp64 for F64)
//   Plain:     y = w * cast(xhat)           Llama, Qwen, Mistral, Phi-3: rounded to the dtype BEFORE the weight
//   LateCast:  y = cast(w * xhat)           OLMo2, gpt-oss
//   OnePlus:   y = cast(xhat * (1 + w))     Gemma
//   LayerNorm: y = cast(w * xhat)           Cohere: of x - mean(x) in the place of x
//
// The first three differ in bf16 rounding only, but for OnePlus, whose weight is stored as w - 1. The mean of LayerNorm
// is not saved: the backward finds it again.
// A residual add before the norm, or after its backward, is done in the same pass. CUDA: rmsnorm.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

enum class NormKind { Plain, LateCast, OnePlus, LayerNorm };

/// y (..., C), rstd (rows) F32 (F64 for F64) <- x (..., C), w (C). y may be x's own memory.
void rmsnorm_forward(Device& device, Tensor y, Tensor rstd, ConstTensor x, ConstTensor w, double eps, NormKind kind);

/// sum (..., C) = a + b, rounded to the dtype; y, rstd: as above, of x = sum. The same bits as the two steps. sum may
/// be a's or b's own memory.
void add_rmsnorm_forward(Device& device, Tensor sum, Tensor y, Tensor rstd, ConstTensor a, ConstTensor b, ConstTensor w,
                         double eps, NormKind kind);

/// dx (..., C) = gradient of x (+ residual (..., C), unless that is null; rounded once); dw (C) += gradient of w,
/// accumulated in dw's own dtype. dx may be the memory of dy or of residual.
void rmsnorm_backward(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd,
                      ConstTensor w, NormKind kind, ConstTensor residual = {});

// CUDA kernels (rmsnorm.cu); called by the front doors above after the contract is checked.
// `sum`, `added` null: the norm of x alone.
void rmsnorm_forward_cuda(Device& device, Tensor y, Tensor rstd, Tensor sum, ConstTensor x, ConstTensor added,
                          ConstTensor w, double eps, NormKind kind);
void rmsnorm_backward_cuda(Device& device, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor rstd,
                           ConstTensor w, NormKind kind, ConstTensor residual);
