// Weights that a checkpoint holds in fewer bits, decoded while they are loaded:
//   MXFP4 (gpt-oss)       X_blocks U8 (E, N, K/32, 16), X_scales U8 (E, N, K/32), for X (E, K, N): two E2M1 numbers a
//                         byte, the even k in the low half, times 2^(scale - 127) of their 32 k
//   FP8 (DeepSeek-V3)     X F8_E4M3 (R, C), X_scale_inv F32 (ceil(R / 128), ceil(C / 128)): each number times the scale
//   of
//                         its 128 x 128 tile
// They are trained and saved unquantised.
#pragma once

#include "data/safetensors.h"
#include "llama/params.h"

enum class Quantization { None, Mxfp4, Fp8 };

/// How tensor `name` lies in the checkpoint.
Quantization quantization_of(const SafetensorsDirectory& directory, const std::string& name);

/// The names under which it lies there, with the shapes that they must have.
struct QuantizedTensor {
  std::string name;
  std::vector<int64_t> shape;
};
std::vector<QuantizedTensor> quantized_tensors(const std::string& name, const Shape& shape, Quantization kind);

/// Elements [begin, begin + count) of tensor `name` of shape `shape`, decoded if need be, as `to`.
void read_weight(const SafetensorsDirectory& directory, const std::string& name, const Shape& shape, int64_t begin,
                 int64_t count, DType to, void* out);
