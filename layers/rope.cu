// RoPE on CUDA. Contract and formulas: rope.h; the CPU loops that specify it: rope.cpp.
//
// Rotation: a token has a block, (threads along the pairs of a head, heads). A thread has kWidth pairs of a head, which
//   are two packs of x (a pack: 128 bits, or one element where shapes or pointers do not allow more), the same pairs in
//   every head that it visits: their cos and sin stay in its registers. Nobody else touches the two packs.
//     HalfSplit:   elements [m, m + kWidth) and [m + r/2, m + r/2 + kWidth)
//     Interleaved: elements [2m, 2m + 2 kWidth)
//
// Bytes from DRAM, each the minimum (the threads along the heads find cos and sin in L1):
//   table:    writes cos, sin                             T r/2 8
//   rotation: reads and writes what turns of x,           2 T num_heads r sizeof(T)
//             reads cos, sin                              T r/2 8
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/rope.h"

namespace {

constexpr int kTableThreads = 256;
constexpr int kMaxThreads = 128;     // of a block that rotates
constexpr int kMaxHeadThreads = 32;  // of these along a head

// cos, sin (T, half) <- factor * cos(position * inv_freq), an element a thread. Every step rounds, as in rope.cpp: a
// product that nothing is added to is never contracted.
__global__ void __launch_bounds__(kTableThreads)
    rope_table_kernel(float* cos, float* sin, const int32_t* positions, const float* inv_freq, int64_t num_tokens,
                      int64_t half, float attention_factor) {
  const int64_t i = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  if (i >= num_tokens * half) return;
  const float angle = static_cast<float>(positions[i / half]) * inv_freq[i % half];
  cos[i] = cosf(angle) * attention_factor;
  sin[i] = sinf(angle) * attention_factor;
}

/// kWidth numbers of a table.
template <int kWidth>
struct Angles {
  float value[kWidth];

  __device__ __forceinline__ explicit Angles(const float* p) {
    constexpr int kPack = kWidth == 1 ? 1 : kPackWidth<float>;
    for (int k = 0; k < kWidth; k += kPack) {
      const Pack<float, kPack> pack = load_pack<kPack>(p + k);
      for (int j = 0; j < kPack; j++) value[k + j] = pack.element[j];
    }
  }
};

// y0 = x0 cos - x1 sin,  y1 = x1 cos + x0 sin, in place. x (T, H, HD), cos and sin (T, half); `sign` turns the sine.
template <class T, int kWidth, bool kInterleaved>
__global__ void __launch_bounds__(kMaxThreads)
    rope_rotate_kernel(T* x, const float* cos, const float* sin, float sign, int64_t token_width, int num_heads, int HD,
                       int half) {
  T* xt = x + blockIdx.x * token_width;
  const int64_t row = int64_t{blockIdx.x} * half;
  for (int m = threadIdx.x * kWidth; m < half; m += blockDim.x * kWidth) {
    const Angles<kWidth> c(cos + row + m), s(sin + row + m);
    for (int h = threadIdx.y; h < num_heads; h += blockDim.y) {
      T* head = xt + int64_t{h} * HD;
      T* first = head + (kInterleaved ? 2 * m : m);
      T* second = head + (kInterleaved ? 2 * m + kWidth : m + half);
      Pack<T, kWidth> pack[2] = {load_pack<kWidth>(first), load_pack<kWidth>(second)};
      for (int k = 0; k < kWidth; k++) {
        const int i0 = kInterleaved ? 2 * k : k, i1 = kInterleaved ? 2 * k + 1 : k + kWidth;
        T& e0 = pack[i0 / kWidth].element[i0 % kWidth];
        T& e1 = pack[i1 / kWidth].element[i1 % kWidth];
        const float x0 = to_float(e0), x1 = to_float(e1), ck = c.value[k], sk = sign * s.value[k];
        e0 = from_float<T>(x0 * ck - x1 * sk);
        e1 = from_float<T>(x1 * ck + x0 * sk);
      }
      store_pack<kWidth>(first, pack[0]);
      store_pack<kWidth>(second, pack[1]);
    }
  }
}

template <class T, int kWidth>
void rotate(Device& device, Tensor x, ConstTensor cos, ConstTensor sin, int64_t num_heads, bool interleaved, int sign) {
  const int64_t num_tokens = x.shape[0], H = x.shape[1], HD = x.shape[2], half = cos.shape.last();
  constexpr int64_t kMax = int64_t{1} << 30;
  CHECK(H <= kMax && HD <= kMax, "rope: {} heads of {} elements, the CUDA kernels allow {}", H, HD, kMax);
  if (half == 0 || num_heads == 0) return;
  const int64_t along = std::min<int64_t>(ceil_div(half, kWidth), kMaxHeadThreads);
  const int64_t heads = std::min<int64_t>(num_heads, kMaxThreads / along);
  const dim3 block(static_cast<unsigned>(along), static_cast<unsigned>(heads));
  launch(device, {num_tokens, block},
         interleaved ? rope_rotate_kernel<T, kWidth, true> : rope_rotate_kernel<T, kWidth, false>, x.as<T>(),
         cos.as<float>(), sin.as<float>(), static_cast<float>(sign), H * HD, static_cast<int>(num_heads),
         static_cast<int>(HD), static_cast<int>(half));
}

}  // namespace

void rope_table_cuda(Device& device, Tensor cos, Tensor sin, ConstTensor positions, ConstTensor inv_freq,
                     double attention_factor) {
  CHECK(cos.dtype == DType::F32, "rope_table: dtype {} is not supported on the CUDA device, use F32",
        name_of(cos.dtype));
  launch(device, {ceil_div(cos.numel(), kTableThreads), kTableThreads}, rope_table_kernel, cos.as<float>(),
         sin.as<float>(), positions.as<int32_t>(), inv_freq.as<float>(), positions.numel(), inv_freq.numel(),
         static_cast<float>(attention_factor));
}

void rope_rotate_cuda(Device& device, Tensor x, ConstTensor cos, ConstTensor sin, int64_t num_heads, bool interleaved,
                      int sign) {
  dispatch_cuda(x.dtype, "rope", [&]<class T>(T) {
    const int64_t HD = x.shape.last(), half = cos.shape.last();
    // Both packs of a thread are aligned, and so is its part of the tables, if half is made of whole packs.
    const bool packed = is_packable<T>(HD, {x.data, cos.data, sin.data}) && half % kPackWidth<T> == 0;
    packed ? rotate<T, kPackWidth<T>>(device, x, cos, sin, num_heads, interleaved, sign)
           : rotate<T, 1>(device, x, cos, sin, num_heads, interleaved, sign);
  });
}
