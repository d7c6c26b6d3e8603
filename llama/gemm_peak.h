// The machine's GEMM peak, measured: what MFU is relative to.
#pragma once

#include "layers/core/device.h"

/// The best of the products of square matrices that fit into a third of a second, in FLOP/s.
double measure_gemm_peak(Device& device);
