#include "llama/router_load.h"

#include <algorithm>

#include "layers/reduce.h"

RouterLoad::RouterLoad(Arena& arena, const ModelConfig& config, DType dtype, const MeshShape& shape, Mesh* mesh,
                       Device& device)
    : config_(config), shape_(shape), mesh_(mesh), device_(device) {
  const int64_t E = config.moe.router.num_experts;
  for (const LayerConfig& layer : config.layers) num_layers_ += layer.is_moe;
  const int64_t n = (num_layers_ + 1) * E;
  all_shards_ = arena.place(DType::F64, {shape.shards(), n}, "router statistics of the ranks");
  if (shape.dp_replicate > 1) {
    all_replicas_ = arena.place(DType::F64, {shape.dp_replicate, n}, "router statistics of the replicas");
  }
  micro_step_ = arena.place(DType::F64, {n}, "router statistics");
  sums_ = arena.place(DType::F64, {n}, "router statistics of the step");
  slope_ = arena.place(accumulator_dtype(dtype), {E}, "balance slope");
  loss_ = arena.place(DType::F64, {1}, "balance loss");
  const Tensor mine = all_shards_.rows(mesh ? mesh->shard().rank() : 0, 1).reshaped({n});
  int64_t i = 0;
  for (const LayerConfig& layer : config.layers) {
    RouterStatistics statistics;
    if (layer.is_moe) {
      statistics.counts = mine.rows(i++ * E, E);
      if (has_loss()) statistics.probabilities = mine.rows(num_layers_ * E, E);
    }
    statistics_.push_back(statistics);
  }
}

/// micro_step_ = the sum over all ranks, which starts anew.
void RouterLoad::add_ranks() {
  const int64_t n = micro_step_.numel();
  fill_zero(device_, micro_step_);
  if (mesh_) mesh_->shard_tensors().all_gather(all_shards_);
  add_parts(device_, micro_step_, all_shards_.reshaped({all_shards_.numel()}), shape_.shards());
  fill_zero(device_, all_shards_);
  if (mesh_ && shape_.dp_replicate > 1) {
    device_.copy(all_replicas_.rows(mesh_->replica(), 1).data, micro_step_.data, micro_step_.size_bytes());
    mesh_->replicate_tensors().all_gather(all_replicas_);
    fill_zero(device_, micro_step_);
    add_parts(device_, micro_step_, all_replicas_.reshaped({shape_.dp_replicate * n}), shape_.dp_replicate);
  }
  add_parts(device_, sums_, micro_step_, 1);
}

Tensor RouterLoad::balance_slope(double weight, int64_t num_tokens) {
  if (!has_loss()) return {};
  add_ranks();
  const int64_t E = config_.moe.router.num_experts;
  route_balance(device_, slope_, loss_, micro_step_.rows(0, num_layers_ * E).reshaped({num_layers_, E}),
                micro_step_.rows(num_layers_ * E, E), config_.moe.balance_coef * weight, num_layers_ * num_tokens);
  return slope_;
}

RouterLoad::Load RouterLoad::take() {
  if (!has_loss()) add_ranks();
  const int64_t E = config_.moe.router.num_experts;
  std::vector<double> counts(static_cast<size_t>(sums_.numel()));
  Load load;
  device_.copy_to_host(counts.data(), sums_.data, sums_.size_bytes());
  device_.copy_to_host(&load.balance_loss, loss_.data, sizeof load.balance_loss);
  fill_zero(device_, sums_);
  fill_zero(device_, loss_);
  for (int64_t l = 0; l < num_layers_; l++) {
    const auto begin = counts.begin() + l * E;
    double total = 0;
    for (auto count = begin; count != begin + E; count++) total += *count;
    const double most = *std::max_element(begin, begin + E);
    if (total > 0) load.max_over_mean = std::max(load.max_over_mean, most * static_cast<double>(E) / total);
  }
  return load;
}
