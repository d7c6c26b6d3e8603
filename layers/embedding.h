// Token embedding: y[t] = scale * w[token[t]].
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// y (T, C) <- tokens (T) I32 in [0, V), w (V, C).
void embedding_forward(Device& device, Tensor y, ConstTensor tokens, ConstTensor w, double scale);

/// dw (V, C) += scale * the rows of dy (T, C) that looked each token up, in the order of t (deterministic).
/// The row of `pad_token_id` gets no gradient (nn.Embedding's padding_idx); -1 = none.
void embedding_backward(Device& device, Tensor dw, ConstTensor dy, ConstTensor tokens, double scale,
                        int64_t pad_token_id);
