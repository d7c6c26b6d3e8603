// A checkpoint's contents: a Hugging Face model directory, plus `optimizer/` with the moments under the same tensor
// names, plus `trainer_state.json`. When it is complete and which ones are kept: checkpoint_dir.h.
//
//   config.json, model.safetensors, tokenizer files     opens with from_pretrained
//   optimizer/exp_avg.safetensors, exp_avg_sq.safetensors
//   trainer_state.json                                  step, tokens, data position, resolved run config
#pragma once

#include "llama/checkpoint_dir.h"
#include "llama/plan.h"
#include "llama/weights.h"

/// Writes `dir`/step_N, atomically: on any error older checkpoints are untouched. All ranks call it: rank 0 makes the
/// files, the ranks of the first replica write their shards into them, rank 0 makes them visible.
void save_checkpoint(const std::filesystem::path& dir, TrainState& state, const ModelConfig& model,
                     const CompanionFiles& companions, const TrainerState& trainer, Mesh& mesh,
                     const FileSystem& file_system = {});

/// Weights and moments, bit for bit.
void load_checkpoint(const Checkpoint& checkpoint, TrainState& state, const ModelConfig& model,
                     const LoadProgress& progress = {});
