// The machine's GEMM peak, measured: what MFU is relative to.
#pragma once

#include "layers/core/device.h"

/// The best of a few products of square matrices, in FLOP/s; takes about a tenth of a second on two cores.
double measure_gemm_peak(Device& device);
