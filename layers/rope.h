// Rotary position embedding (Su et al., 2021) of the q and k heads of a fused qkv, in place.
//   HalfSplit:   pairs (x[m], x[m + r/2])      Interleaved: pairs (x[2m], x[2m + 1])      m < r/2
//   y0 = x0 cos - x1 sin,  y1 = x1 cos + x0 sin;  dimensions from r on pass through.
// The backward is the rotation by -angle.
// CUDA: rope.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// The angles of T tokens; without tables nothing rotates.
struct Rotation {
  ConstTensor cos, sin;  ///< (T, r/2) F32 (F64 for F64)
  bool interleaved = false;
  explicit operator bool() const { return static_cast<bool>(cos); }
  int64_t half() const { return cos ? cos.shape.last() : 0; }  ///< r/2
};

/// cos, sin (T, r/2) <- a * cos(position * inv_freq): the angle and its cosine in fp32, as transformers has them
/// (in fp64 for F64 tables).
void rope_table(Device& device, Tensor cos, Tensor sin, ConstTensor positions, ConstTensor inv_freq,
                double attention_factor);

/// Rotates heads [0, num_heads) of x (T, H, HD) in place by cos, sin (T, r/2) F32 (F64 for F64), r <= HD; the other
/// heads (v) stay.
void rope_forward(Device& device, Tensor x, ConstTensor cos, ConstTensor sin, int64_t num_heads, bool interleaved);
/// The gradient, in place: rotation by the negative angle.
void rope_backward(Device& device, Tensor dx, ConstTensor cos, ConstTensor sin, int64_t num_heads, bool interleaved);

// CUDA kernels (rope.cu); called by the front doors above after the contract is checked. sign: 1, or -1 for the
// gradient.
void rope_table_cuda(Device& device, Tensor cos, Tensor sin, ConstTensor positions, ConstTensor inv_freq,
                     double attention_factor);
void rope_rotate_cuda(Device& device, Tensor x, ConstTensor cos, ConstTensor sin, int64_t num_heads, bool interleaved,
                      int sign);
