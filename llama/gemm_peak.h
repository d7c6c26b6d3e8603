// The GEMM peak of a device: what MFU is relative to.
#pragma once

#include "layers/core/device.h"
#include "layers/core/dtype.h"

/// FLOP/s. Of a GPU: what its maker states for dense products of `dtype` with fp32 sums (Device::peak_flops). Of the
/// CPU: measured, the best of the products of square matrices that fit into a third of a second.
double gemm_peak(Device& device, DType dtype);
