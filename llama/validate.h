// Rules between the run, the model and the machine: all are checked before any memory is taken.
#pragma once

#include "comm/mesh.h"
#include "layers/core/log.h"
#include "llama/config.h"
#include "llama/run_config.h"

/// Throws for what cannot run, warns of what can but may surprise.
void validate(const RunConfig& run, const ModelConfig& model, const MeshShape& mesh, Console& console);

/// The device of train.device; says why it is the CPU where a GPU was to be had.
Device open_device(const RunConfig& run, Console& console);
