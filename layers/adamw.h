// AdamW (Loshchilov & Hutter, 2019), decoupled decay, as torch.optim.AdamW:
//   g = clip_scale * g;   p -= lr * weight_decay * p
//   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
//   p -= lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
// Subnormal m and v become zero. An element's result depends on that element alone, whatever the threads and shards.
// CUDA: adamw.cu, in F32.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

struct AdamWStep {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0;
  double clip_scale = 1;  ///< multiplies the gradient first
  int64_t step = 1;       ///< counts from 1
};

/// p, m, v (n) updated in place <- g (n); all of one dtype (F32, F64), but that g may be BF16 for F32. weights (n)
/// BF16: the new p, rounded once; null where nobody needs it. One pass over memory.
void adamw_update(Device& device, Tensor p, Tensor m, Tensor v, ConstTensor g, const AdamWStep& step,
                  Tensor weights = {});

// CUDA kernel (adamw.cu); called by the front door above after the contract is checked.
void adamw_update_cuda(Device& device, Tensor p, Tensor m, Tensor v, ConstTensor g, const AdamWStep& step,
                       Tensor weights);
