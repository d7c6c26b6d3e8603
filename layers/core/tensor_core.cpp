// Front door and the CPU loops that specify it: the tables of the PTX manual. Contract: tensor_core.h.
#include "layers/core/tensor_core.h"

namespace {

/// Elements of a 16 x 16 matrix that lane l holds of its four 8 x 8 blocks, in the order in which the lanes give their
/// rows: (0, 0), (8, 0), (0, 8), (8, 8). Rows l / 4, columns 2 (l % 4) and the next one; transposed, the other way
/// round.
void load_fragment(int32_t* to, const bf16* matrix, int lane, bool is_transposed) {
  const auto element = [&](int row, int column) { return static_cast<uint32_t>(matrix[row * 16 + column].bits); };
  for (int block = 0; block < 4; block++) {
    const int row = block % 2 * 8, column = block / 2 * 8, outer = lane / 4, inner = lane % 4 * 2;
    const uint32_t low = is_transposed ? element(row + inner, column + outer) : element(row + outer, column + inner),
                   high = is_transposed ? element(row + inner + 1, column + outer)
                                        : element(row + outer, column + inner + 1);
    to[block] = static_cast<int32_t>(low | high << 16);
  }
}

}  // namespace

void tensor_core_check(Device& device, Tensor fragments, Tensor sums, ConstTensor a, ConstTensor b) {
  check_tensor(fragments, "tensor_core_check: fragments", {3, 32, 4}, DType::I32);
  check_tensor(sums, "tensor_core_check: sums", {32, 2, 4}, DType::F32);
  check_tensor(a, "tensor_core_check: a", {16, 16}, DType::BF16);
  check_tensor(b, "tensor_core_check: b", {16, 16}, DType::BF16);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return tensor_core_check_cuda(device, fragments, sums, a, b);
  }
  for (int lane = 0; lane < 32; lane++) {
    int32_t* const to = fragments.as<int32_t>() + lane * 4;
    load_fragment(to, a.as<bf16>(), lane, false);
    load_fragment(to + 32 * 4, a.as<bf16>(), lane, true);
    load_fragment(to + 2 * 32 * 4, b.as<bf16>(), lane, true);
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = half * 8 + lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
          sum += static_cast<float>(a.as<bf16>()[row * 16 + k]) * static_cast<float>(b.as<bf16>()[k * 16 + column]);
        }
        sums.as<float>()[(lane * 2 + half) * 4 + i] += sum;
      }
    }
  }
}
