// What the wrappers of PTX in cuda_primitives.cuh do, as one small operation: on a GPU it shows that the instructions
// are what the CPU, by the tables of the PTX manual, and test/simt take them for. The self-test runs it; no layer does.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

/// One warp. a, b (16, 16) BF16, sums (32, 2, 4) F32.
///   fragments (3, 32, 4) I32  what each lane gets of a by ldmatrix, of a by ldmatrix.trans, and of b by ldmatrix.trans
///   sums += a b               by mma.m16n8k16, of columns 0 to 7 and of 8 to 15
/// a and b come to shared memory by cp.async, in two groups; all is stored 128 bits at a time.
void tensor_core_check(Device& device, Tensor fragments, Tensor sums, ConstTensor a, ConstTensor b);

// CUDA kernel (tensor_core.cu); called by the front door above after the contract is checked.
void tensor_core_check_cuda(Device& device, Tensor fragments, Tensor sums, ConstTensor a, ConstTensor b);
