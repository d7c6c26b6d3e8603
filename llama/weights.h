// Weights come into a ParamStore from a checkpoint or from a random generator, and are found there by their names on
// disk. Each rank touches its own shard only.
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "comm/param_store.h"
#include "data/safetensors.h"
#include "llama/params.h"

/// The part of a disk tensor that lies in this rank's shard of its unit.
struct ShardPiece {
  size_t unit = 0;
  const ParamSpec* param = nullptr;
  const DiskTensor* disk = nullptr;
  int64_t begin = 0;  ///< first element, within the disk tensor
  int64_t count = 0;
  int64_t shard_offset = 0;  ///< where it starts in the shard
};

/// Every piece of this rank, in the order of the units. `units` must outlive the result.
std::vector<ShardPiece> shard_pieces(const std::vector<ParamUnit>& units, const ParamStore& params);

/// The piece's elements in a flat tensor that is laid out as the shard (weights, gradients, moments).
Tensor piece_of(Tensor shard, const ShardPiece& piece);

/// N(0, initializer_range) for weights, 0 for biases, 1 (or 0 for 1 + w norms) for norms, 0 for the embedding of the
/// pad token; element i of a tensor depends on (seed, Hugging Face name, i) only.
void init_random(ParamStore& params, const ModelConfig& config, const std::vector<ParamUnit>& units, uint64_t seed);

/// Bytes read so far, bytes in all.
using LoadProgress = std::function<void(int64_t, int64_t)>;

/// Reads this rank's pieces. Before anything is read, all names and shapes are checked: missing tensors, wrong shapes
/// and unknown extra tensors are listed in one Error. A lm_head.weight beside a tied embedding must equal it.
void load_weights(ParamStore& params, const ModelConfig& config, const std::vector<ParamUnit>& units,
                  const SafetensorsDirectory& directory, const LoadProgress& progress = {});
