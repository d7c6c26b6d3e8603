// train_gpt --selftest: each layer on this GPU against the CPU device, what to run first on a new machine.
#pragma once

#include "layers/core/device.h"
#include "layers/core/log.h"

/// Prints a table of relative errors, in fp32 and bf16; whether all are within their bounds.
bool selftest(Device& gpu, Console& console);
