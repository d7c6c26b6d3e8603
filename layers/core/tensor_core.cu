// The wrappers of PTX in one kernel. Contract: tensor_core.h.
#include "layers/core/tensor_core.h"

#include "layers/core/tile.cuh"

namespace {

constexpr int kChunk = kPackWidth<bf16>;  // 8 elements, 16 bytes

__global__ void __launch_bounds__(kWarpSize)
    tensor_core_check_kernel(int32_t* fragments, float* sums, const bf16* a, const bf16* b) {
  bf16* const a_shared = dynamic_shared<bf16>();
  bf16* const b_shared = a_shared + 16 * 16;
  const int lane = lane_index();
  cp_async_16(a_shared + lane * kChunk, a + lane * kChunk);
  cp_async_commit();
  cp_async_16(b_shared + lane * kChunk, b + lane * kChunk);
  cp_async_commit();
  cp_async_wait<1>();
  __syncwarp();  // a is there
  // Lane l gives row l % 16 of columns 0 to 7, or of 8 to 15.
  const int at = lane % 16 * 16 + lane / 16 * 8;
  unsigned of_a[4], of_a_transposed[4], of_b[4];
  ldmatrix_x4(of_a, a_shared + at);
  ldmatrix_x4_trans(of_a_transposed, a_shared + at);
  cp_async_wait<0>();
  __syncwarp();  // b is there
  ldmatrix_x4_trans(of_b, b_shared + at);
  float sum[2][4];
  for (int half = 0; half < 2; half++) {
    load_floats(sum[half], sums + (lane * 2 + half) * 4);
    mma_bf16_16x8x16(sum[half], of_a, of_b[2 * half], of_b[2 * half + 1]);
    store_floats(sums + (lane * 2 + half) * 4, sum[half]);
  }
  const auto store = [&](int i, const unsigned(&matrix)[4]) {
    store_128(fragments + (i * kWarpSize + lane) * 4, int4{static_cast<int>(matrix[0]), static_cast<int>(matrix[1]),
                                                           static_cast<int>(matrix[2]), static_cast<int>(matrix[3])});
  };
  store(0, of_a), store(1, of_a_transposed), store(2, of_b);
}

}  // namespace

void tensor_core_check_cuda(Device& device, Tensor fragments, Tensor sums, ConstTensor a, ConstTensor b) {
  launch(device, {1, kWarpSize, 2 * 16 * 16 * sizeof(bf16)}, tensor_core_check_kernel, fragments.as<int32_t>(),
         sums.as<float>(), a.as<bf16>(), b.as<bf16>());
}
