// Rules between the run, the model and the machine: all are checked before any memory is taken.
#pragma once

#include "comm/mesh.h"
#include "layers/core/log.h"
#include "llama/config.h"
#include "llama/run_config.h"

/// Throws for what cannot run, warns of what can but may surprise.
void validate(const RunConfig& run, const ModelConfig& model, const MeshShape& mesh, Console& console);

/// Makes of `auto` what it means on this host: train.device cuda where there is a GPU, train.dtype bf16 on cuda and
/// fp32 on the cpu.
void resolve_device(RunConfig& run);

/// The device of a resolved run for this rank of its host: the GPUs in turn. With --plan it has no memory.
Device open_device(const RunConfig& run, int rank_on_host);
