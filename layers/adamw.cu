// AdamW on CUDA. Contract and formula: adamw.h; the CPU loop that specifies it: adamw.cpp.
//
// Work: a thread owns four neighbours (or one, where the length or a pointer does not allow 128-bit accesses); nobody
//   else touches them. Operations and their order are the CPU's, with square root and division rounded correctly: the
//   bits are the same but for which products and sums each compiler contracts into an FMA.
//
// Bytes from DRAM of n elements, the minimum: reads p, m, v, g, writes p, m, v, all F32: 28 n (26 n where g is BF16, in
//   64-bit loads); weights, BF16: 2 n more in 64-bit stores, instead of a second pass that reads p and writes weights
//   (6 n).
#include <type_traits>

#include "layers/adamw_coefficients.h"
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"

namespace {

constexpr int kThreads = 256;  // of a block

__device__ __forceinline__ float flush_subnormal(float x) {
  return fabsf(x) < 0x1p-126f ? 0.0f : x;
}

// See adamw.h; weights may be null.
template <class G, int kWidth>
__global__ void __launch_bounds__(kThreads) adamw_update_kernel(float* p, float* m, float* v, bf16* weights, const G* g,
                                                                int64_t n, detail::AdamWCoefficients<float> c) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i >= n) return;
  float pi[kWidth], mi[kWidth], vi[kWidth], gi[kWidth];
  load_floats(pi, p + i);
  load_floats(mi, m + i);
  load_floats(vi, v + i);
  load_floats(gi, g + i);
  for (int k = 0; k < kWidth; k++) {
    const float gk = c.clip_scale * gi[k];
    mi[k] = flush_subnormal(c.beta1 * mi[k] + c.one_minus_beta1 * gk);
    vi[k] = flush_subnormal(c.beta2 * vi[k] + c.one_minus_beta2 * gk * gk);
    const float decayed = pi[k] - c.decay * pi[k];
    pi[k] = decayed - c.step_size * mi[k] / (sqrtf(vi[k]) * c.inv_sqrt_correction2 + c.eps);
  }
  store_floats(p + i, pi);
  store_floats(m + i, mi);
  store_floats(v + i, vi);
  if (weights) store_floats(weights + i, pi);
}

}  // namespace

void adamw_update_cuda(Device& device, Tensor p, Tensor m, Tensor v, ConstTensor g, const AdamWStep& step,
                       Tensor weights) {
  CHECK(p.dtype == DType::F32, "adamw_update: dtype {} is not supported on the CUDA device, use F32", name_of(p.dtype));
  const int64_t n = p.numel();
  const bool packed = is_packable<float>(n, {p.data, m.data, v.data, g.data, weights.data});
  dispatch_cuda(g.dtype, "adamw_update", [&]<class G>(G) {
    const auto run = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
      launch(device, {ceil_div(n, kThreads * kWidth), kThreads}, adamw_update_kernel<G, kWidth>, p.as<float>(),
             m.as<float>(), v.as<float>(), weights ? weights.as<bf16>() : nullptr, g.as<G>(), n,
             detail::AdamWCoefficients<float>(step));
    };
    packed ? run(std::integral_constant<int, kPackWidth<float>>()) : run(std::integral_constant<int, 1>());
  });
}
