// The wrappers of PTX, run by the runtime, against the tables of the PTX manual.
#include "layers/core/tensor_core.h"

#include "test/simt/device_tensor.h"

namespace {

TEST(TensorCoreCuda, instructions_are_those_of_the_manual) {
  Device cpu = Device::cpu(), cuda = Device::cuda(0);
  HostTensor a(DType::BF16, {16, 16}, "a"), b(DType::BF16, {16, 16}, "b"), sums(DType::F32, {32, 2, 4}, "sums"),
      fragments(DType::I32, {3, 32, 4}, "fragments");
  a.fill_normal(1), b.fill_normal(2), sums.fill_normal(3);
  DeviceTensor a_(cuda, a), b_(cuda, b), sums_(cuda, sums), fragments_(cuda, DType::I32, fragments.shape());
  tensor_core_check(cuda, fragments_, sums_, a_, b_);
  const HostTensor start = sums;
  tensor_core_check(cpu, fragments, sums, a, b);
  EXPECT_TRUE(fragments_.to_host().bit_equal(fragments));
  const HostTensor found = sums_.to_host();
  for (int64_t i = 0; i < sums.numel(); i++) {  // 16 products, added in any order
    EXPECT_NEAR(found.get(i), sums.get(i), 1e-5) << i;
    EXPECT_NE(sums.get(i), start.get(i)) << i;
  }
  EXPECT_TRUE(simt_launched_kernels().contains("tensor_core_check_kernel"));
}

}  // namespace
