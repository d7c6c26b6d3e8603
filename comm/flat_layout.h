// FlatLayout: where the tensors of a unit lie in its one flat buffer, and which part of it each rank owns. Pure
// arithmetic; nothing need divide by the number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layers/core/tensor.h"

struct TensorSpec {
  std::string name;
  Shape shape;
};

class FlatLayout {
 public:
  static constexpr int64_t kAlignment = 64;  ///< elements: tensors and shards start on a cache line in any dtype

  FlatLayout(const std::vector<TensorSpec>& tensors, int num_shards);

  int64_t begin(size_t i) const { return begin_.at(i); }
  /// Of the whole buffer, with padding: num_shards * shard_numel.
  int64_t numel() const { return shard_numel_ * num_shards_; }
  int64_t shard_numel() const { return shard_numel_; }
  int64_t shard_begin(int shard) const { return shard_numel_ * shard; }

 private:
  std::vector<int64_t> begin_;
  int64_t shard_numel_ = 0;
  int num_shards_ = 1;
};
