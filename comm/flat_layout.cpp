#include "comm/flat_layout.h"

namespace {

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

}  // namespace

FlatLayout::FlatLayout(const std::vector<TensorSpec>& tensors, int num_shards) : num_shards_(num_shards) {
  CHECK(num_shards >= 1, "a unit cannot be cut into {} shards", num_shards);
  int64_t end = 0;
  for (const TensorSpec& tensor : tensors) {
    begin_.push_back(end);
    end = round_up(end + tensor.shape.numel(), kAlignment);
  }
  shard_numel_ = round_up((end + num_shards - 1) / num_shards, kAlignment);
}
