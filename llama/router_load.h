// What the routers of a model do, over all layers and ranks: the load-balancing loss (Fedus et al. 2021, as
// transformers defines it), and how evenly the experts are loaded.
//
// Of one micro-step, with the N = layers * tokens rows of all its ranks together, padding left out:
//   f_e = share of the N tokens that expert e gets, in any of the k places;   P_e = mean of softmax(logits)_e
//   loss = coef E sum_e f_e P_e                       k coef when the load is even
// It is a product of means, not a mean of products: so it is defined on what all ranks see in one micro-step, and the
// loss of a step is the mean over its micro-steps. f has no derivative; that of P_e by the logits is route_backward's.
#pragma once

#include "comm/mesh.h"
#include "layers/core/arena.h"
#include "llama/block.h"

class RouterLoad {
 public:
  /// `mesh` null: one rank, or an arena that only measures for `shape`.
  RouterLoad(Arena& arena, const ModelConfig& config, DType dtype, const MeshShape& shape, Mesh* mesh, Device& device);

  /// Where the layers of the next forward count: one entry a layer, null for dense ones.
  const std::vector<RouterStatistics>& statistics() const { return statistics_; }

  /// After the forward of a micro-step: what route_backward takes. The loss counts `weight` times; `num_tokens` of all
  /// ranks. Null without a load-balancing loss. Collective.
  Tensor balance_slope(double weight, int64_t num_tokens);

  struct Load {
    double balance_loss = 0;   ///< with its coefficient; the mean over the micro-steps
    double max_over_mean = 0;  ///< rows of the expert with most, over the mean; of the layer where that is largest
  };
  /// Since the last call. Collective, and waits for the device: once a step.
  Load take();

 private:
  bool has_loss() const { return config_.moe.balance_coef > 0; }
  void add_ranks();

  const ModelConfig& config_;
  MeshShape shape_;
  Mesh* mesh_;
  Device& device_;
  int64_t num_layers_ = 0;                    // that have experts
  Tensor all_shards_, all_replicas_;          // (P, n) F64: counts (layers, E), then probabilities (E), of each rank
  Tensor sums_;                               // (n) F64: of all ranks, since the last take(); counts alone matter
  Tensor micro_step_;                         // (n) F64: of all ranks, in this micro-step
  Tensor slope_, loss_;                       // (E), (1) F64
  std::vector<RouterStatistics> statistics_;  // views of this rank's part
};
