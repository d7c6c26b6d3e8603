// The memory plan: what a run will allocate, made by the very constructors that allocate it, on an arena that only
// measures. Needs no GPU and no weights.
#pragma once

#include <string>
#include <vector>

#include "llama/model.h"
#include "llama/optimizer.h"
#include "llama/run_config.h"

/// Parameters, optimizer and model of a run, on one arena.
struct TrainState {
  std::vector<ParamUnit> units;
  ParamStore params;
  AdamW adamw;
  Llama llama;

  /// `mesh` null: one rank, or an arena that only measures for `shape`.
  TrainState(Arena& arena, const RunConfig& run, const ModelConfig& model, const ModelOptions& options,
             const MeshShape& shape, Mesh* mesh, Device& device);
};

/// Sizes that follow from the options: tokens of a micro-batch, tile of the loss.
ModelOptions model_options(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);

struct MemoryPlan {
  struct Row {
    std::string section, name, shape;
    DType dtype = DType::F32;
    int64_t count = 0;      ///< tensors of this name and shape
    size_t size_bytes = 0;  ///< of all of them
  };
  std::vector<Row> rows;
  size_t arena_bytes = 0;  ///< the one allocation
  size_t host_bytes = 0;   ///< beside it: the program, its libraries, GEMM packing buffers, the rows of a step
  size_t total_bytes() const { return arena_bytes + host_bytes; }
};

/// A rank's tokens of one step on the host, beside the arena, and a whole micro-batch before it is cut.
size_t batch_bytes(const RunConfig& run, const MeshShape& shape);

/// Of one rank.
MemoryPlan plan_memory(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);

/// What this rank sends in an optimizer step of full micro-batches, by formula. (P - 1) / P of ...
///   gathers    each unit once, and each block again whenever another one has taken its buffer: in every pass but the
///              first all blocks but two
///   reduces    each unit's gradients, every micro-step
///   exchanges  q, k, v and the attention's output of my tokens, forward and backward (and in the recomputed forward)
/// and 2 (R - 1) / R of each shard's gradients over R replicas. A step after an evaluation finds some units gathered.
Traffic plan_traffic(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);
/// What was sent since the start.
Traffic measured_traffic(const TrainState& state);

/// The arena with memory.recompute none and block: what the choice costs.
struct RecomputeChoice {
  std::string recompute;
  size_t arena_bytes = 0;
};
std::vector<RecomputeChoice> recompute_choices(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);
