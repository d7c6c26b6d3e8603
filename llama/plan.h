// The memory plan: what a run will allocate, made by the very constructors that allocate it, on an arena that only
// measures. Needs no GPU and no weights.
#pragma once

#include <string>
#include <vector>

#include "llama/frozen.h"
#include "llama/model.h"
#include "llama/optimizer.h"
#include "llama/run_config.h"

/// Parameters, optimizer and model of a run, on one arena.
struct TrainState {
  std::vector<ParamUnit> units;
  ParamStore params;
  AdamW adamw;
  Llama llama;
  FrozenTensors frozen;

  /// `mesh` null: one rank, or an arena that only measures for `shape`.
  TrainState(Arena& arena, const RunConfig& run, const ModelConfig& model, const ModelOptions& options,
             const MeshShape& shape, Mesh* mesh, Device& device);
};

/// Sizes that follow from the options: tokens of a micro-batch, tile of the loss.
ModelOptions model_options(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);

/// Of one rank. On the CPU the arena is in the host's memory, too.
struct MemoryPlan {
  struct Row {
    std::string section, name, shape;
    DType dtype = DType::F32;
    int64_t count = 0;      ///< tensors of this name and shape
    size_t size_bytes = 0;  ///< of all of them
  };
  std::vector<Row> rows;
  bool is_cuda = false;
  size_t arena_bytes = 0;      ///< the one allocation
  size_t offloaded_bytes = 0;  ///< in pinned memory of the host
  size_t program_bytes = 0;    ///< the host: the program and its libraries as they are now
  size_t buffer_bytes = 0;     ///< the host: copies, packed matrices of GEMM, the rows of a step

  size_t gpu_bytes() const { return is_cuda ? arena_bytes + Device::kWorkspaceBytes : 0; }
  size_t host_bytes() const { return (is_cuda ? 0 : arena_bytes) + offloaded_bytes + program_bytes + buffer_bytes; }
};

MemoryPlan plan_memory(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);

/// Memory that a rank may still take.
struct MemoryLimits {
  int64_t gpu_bytes = 0;  ///< beside Device::kWorkspaceBytes
  int64_t host_bytes = 0;
};
/// An Error when the plan needs more: what is short, and with which options the run would fit.
void check_memory(const RunConfig& run, const ModelConfig& model, const MeshShape& shape, const MemoryLimits& limits);

/// What this rank sends in an optimizer step of full micro-batches, by formula. (P - 1) / P of ...
///   gathers    each unit once, and each block again whenever another one has taken its buffer: in every pass but the
///              first all blocks but two
///   reduces    each unit's gradients, every micro-step
///   exchanges  q, k, v and the attention's output of my tokens, forward and backward (and in the recomputed forward)
/// and 2 (R - 1) / R of each shard's gradients over R replicas. A step after an evaluation finds some units gathered.
Traffic plan_traffic(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);
/// What was sent since the start.
Traffic measured_traffic(const TrainState& state);

/// What options about memory cost.
struct MemoryChoice {
  std::string options;
  MemoryPlan plan;
  bool is_this_run = false;
};
std::vector<MemoryChoice> memory_choices(const RunConfig& run, const ModelConfig& model, const MeshShape& shape);
