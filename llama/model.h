// Llama: the whole decoder, forward and backward, on one arena. The name is historical: every supported family runs
// here.
//
//   h_0 = stream_scale * embed(tokens);  h_{l+1} = block_l(h_l);  x = final_norm(h_L);
//   logits = softcap(logit_scale * lm_head(x))
#pragma once

#include <optional>
#include <vector>

#include "comm/param_store.h"
#include "data/batch.h"
#include "llama/block.h"
#include "llama/residual_stream.h"
#include "llama/router_load.h"

struct ModelOptions {
  DType dtype = DType::F32;
  int64_t max_tokens = 0;  ///< T of the largest batch, on one rank
  int64_t loss_tile_tokens = 1024;
  bool recompute_blocks = false;  ///< keep only each block's input, run its forward again in the backward: same bits
  bool offload_block_inputs = false;  ///< to the host's memory, beside the computation: same bits. CUDA only
  MeshShape mesh = {};                ///< its sp ranks share each batch
};

/// What a micro-step is of its step.
struct MicroStep {
  double grad_scale = 1;  ///< of sum(nll)
  // Of a load-balancing loss
  double weight = 1;       ///< 1 / micro-steps
  int64_t num_tokens = 0;  ///< of all ranks, without padding
};

class Llama {
 public:
  /// `mesh` of shape options.mesh; null: one rank, or an arena that only measures.
  Llama(Arena& arena, const ModelConfig& config, const ModelOptions& options, Mesh* mesh, Device& device);

  /// Up to the final norm; saves what the backward needs.
  void forward(const Batch& batch, ParamStore& params);

  /// After forward() of the same batch. Adds the gradients of grad_scale * sum(nll), and of the load-balancing loss
  /// where there is one, to the store, and sum(nll) to what take_nll() gives. `logits` (T, V) receives what the
  /// cross-entropy saw, unless null.
  void backward(const Batch& batch, ParamStore& params, const MicroStep& step, Tensor logits = {});

  /// The forward, and adds the sum of nll to what take_nll() gives, without gradients.
  void evaluate(const Batch& batch, ParamStore& params, Tensor logits = {});

  /// The sum of nll since the last call. Waits for the device: call it once a step.
  double take_nll();

  /// (E) of a layer, where the router has one: see route_forward.
  void set_select_bias(size_t layer, const std::vector<double>& bias);
  /// Null for a dense model.
  RouterLoad* router_load() { return router_load_ ? &*router_load_ : nullptr; }

  const ModelConfig& config() const { return config_; }
  const std::vector<ParamUnit>& units() const { return units_; }
  /// Null without sequence parallelism.
  const Ulysses* ulysses() const { return ulysses_ ? &*ulysses_ : nullptr; }

 private:
  /// Where the ends of documents are.
  struct DocumentBuffers {
    std::vector<int64_t> cu_seqlens;
    Tensor bounds;             // (T * mesh.sp, 2) I32: Documents::bounds; on a CUDA device only
    Tensor cu_seqlens_device;  // (T * mesh.sp + 1) I64; likewise
  };
  void place_documents(DocumentBuffers& buffers, Arena& arena);
  Documents load_documents(DocumentBuffers& buffers, std::vector<int64_t> cu_seqlens);

  void load_batch(const Batch& batch);
  void run_forward(const Batch& batch, ParamStore& params, bool keeps_inputs);
  /// The weight that makes the logits, and its gradient: lm_head, or the embedding when tied.
  Tensor head_weight(ParamStore& params);
  Tensor head_grad(ParamStore& params);
  size_t head_unit() const { return units_.size() - 1; }
  Tensor at_tokens(Tensor buffer) const;  ///< the first T of (max_tokens, ...)

  const ModelConfig& config_;
  ModelOptions options_;
  Device& device_;
  std::vector<ParamUnit> units_;

  Tensor tokens_, targets_, positions_;   // (T) I32
  Tensor is_token_;                       // (T) I32; of a mixture of experts only
  Tensor token_order_;                    // (T) I32: embedding_order; on CUDA only
  Tensor loss_rows_;                      // (T) I32, see layers/loss.h
  int64_t num_targets_ = 0;               // of the current batch
  Tensor nll_;                            // (1) F64, since take_nll()
  DocumentBuffers documents_, chunks_;    // chunks_: cut for the layers that have chunks, which are alike
  int64_t chunk_ = 0;                     // tokens of a chunk; 0 = none has
  std::vector<Tensor> inv_freq_;          // (r/2) F32, one a rope
  std::vector<int64_t> inv_freq_seqlen_;  // the longest document it was made for; 0 = not yet
  std::vector<double> attention_factor_;  // one a rope
  BlockInputs inputs_;                    // of the current batch
  std::vector<BlockInputs::Rope> ropes_;  // (max_tokens, r/2)
  std::optional<ResidualStream> h_;
  std::vector<BlockActivations> saved_;  // L, or 1 with recompute
  BlockScratch scratch_;
  Tensor x_, x_rstd_, dh_;  // (T, C), (T), (T, C)
  std::optional<Ulysses> ulysses_;
  std::optional<RouterLoad> router_load_;
  Tensor loss_workspace_;
};

/// The units of a model as the store wants them.
std::vector<UnitSpec> unit_specs(const std::vector<ParamUnit>& units);
