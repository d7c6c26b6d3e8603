#include "comm/flat_layout.h"

#include "layers/core/integer.h"

FlatLayout::FlatLayout(const std::vector<TensorSpec>& tensors, int num_shards) : num_shards_(num_shards) {
  CHECK(num_shards >= 1, "a unit cannot be cut into {} shards", num_shards);
  int64_t end = 0;
  for (const TensorSpec& tensor : tensors) {
    begin_.push_back(end);
    end = round_up(end + tensor.shape.numel(), kAlignment);
  }
  shard_numel_ = round_up(ceil_div(end, num_shards), kAlignment);
}
