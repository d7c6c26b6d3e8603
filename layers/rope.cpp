// Front doors and the CPU loops that specify RoPE. Contract and formulas: rope.h.
#include "layers/rope.h"

#include <cmath>

#include "layers/core/parallel.h"
#include "layers/rope_head.h"

namespace {

constexpr int64_t kGrainElements = 8192;
constexpr int64_t kTableGrain = 64;

// fp32: every step rounds as in transformers: position * inv_freq, cos of that, times the factor.
template <class T>
void table_cpu(T* cos, T* sin, const int32_t* positions, const float* inv_freq, int64_t num_tokens, int64_t half,
               T attention_factor) {
  parallel_for(num_tokens, kTableGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      for (int64_t m = 0; m < half; m++) {
        const T angle = static_cast<T>(positions[t]) * static_cast<T>(inv_freq[m]);
        cos[t * half + m] = std::cos(angle) * attention_factor;
        sin[t * half + m] = std::sin(angle) * attention_factor;
      }
    }
  });
}

template <bool kInterleaved, class T>
void rotate_cpu(T* x, const T* cos, const T* sin, T sign, const Shape& shape, int64_t num_heads, int64_t half) {
  const int64_t num_tokens = shape[0], token_width = shape[1] * shape[2], HD = shape[2];
  parallel_for(num_tokens, kGrainElements / std::max<int64_t>(num_heads * half, 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      for (int64_t h = 0; h < num_heads; h++) {
        detail::rotate_head<kInterleaved>(x + t * token_width + h * HD, cos + t * half, sin + t * half, sign, half);
      }
    }
  });
}

void rotate(const char* who, Device& device, Tensor x, ConstTensor cos, ConstTensor sin, int64_t num_heads,
            bool interleaved, int sign) {
  CHECK(x.shape.rank() == 3, "{}: x ('{}') is {}, expected (T, H, HD)", who, x.name, x.shape.str());
  const int64_t T = x.shape[0], H = x.shape[1], HD = x.shape[2], half = cos.shape.last();
  check_tensor(x, fmt::format("{}: x", who).c_str(), x.shape, x.dtype);
  check_tensor(cos, fmt::format("{}: cos", who).c_str(), {T, half}, accumulator_dtype(x.dtype));
  check_tensor(sin, fmt::format("{}: sin", who).c_str(), {T, half}, accumulator_dtype(x.dtype));
  CHECK(2 * half <= HD, "{}: cos ('{}') {} rotates {} dimensions, a head has {}", who, cos.name, cos.shape.str(),
        2 * half, HD);
  CHECK(num_heads >= 0 && num_heads <= H, "{}: {} heads to rotate, x ('{}') {} has {}", who, num_heads, x.name,
        x.shape.str(), H);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return rope_rotate_cuda(device, x, cos, sin, num_heads, interleaved, sign);
  }
  dispatch_float(x.dtype, who, [&]<class F>(F) {
    const auto op = interleaved ? rotate_cpu<true, F> : rotate_cpu<false, F>;
    op(x.as<F>(), cos.as<F>(), sin.as<F>(), static_cast<F>(sign), x.shape, num_heads, half);
  });
}

}  // namespace

void rope_table(Device& device, Tensor cos, Tensor sin, ConstTensor positions, ConstTensor inv_freq,
                double attention_factor) {
  const int64_t T = positions.numel(), half = inv_freq.numel();
  check_tensor(positions, "rope_table: positions", {T}, DType::I32);
  check_tensor(inv_freq, "rope_table: inv_freq", {half}, DType::F32);
  check_tensor(cos, "rope_table: cos", {T, half}, cos.dtype);
  check_tensor(sin, "rope_table: sin", {T, half}, cos.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return rope_table_cuda(device, cos, sin, positions, inv_freq, attention_factor);
  }
  dispatch_float(cos.dtype, "rope_table", [&]<class F>(F) {
    table_cpu(cos.as<F>(), sin.as<F>(), positions.as<int32_t>(), inv_freq.as<float>(), T, half,
              static_cast<F>(attention_factor));
  });
}

void rope_forward(Device& device, Tensor x, ConstTensor cos, ConstTensor sin, int64_t num_heads, bool interleaved) {
  rotate("rope_forward", device, x, cos, sin, num_heads, interleaved, 1);
}

void rope_backward(Device& device, Tensor dx, ConstTensor cos, ConstTensor sin, int64_t num_heads, bool interleaved) {
  rotate("rope_backward", device, dx, cos, sin, num_heads, interleaved, -1);
}
