// AdamW over the shards of a ParamStore: moments beside the weights, decay by name.
#pragma once

#include <string>
#include <vector>

#include "comm/param_store.h"
#include "layers/adamw.h"
#include "llama/params.h"
#include "llama/run_config.h"

/// Whether `name` matches the glob `pattern` ("*norm*").
bool matches_glob(const std::string& pattern, const std::string& name);

/// The factor that brings a gradient norm down to max_norm, as torch.nn.utils.clip_grad_norm_:
/// min(1, max_norm / (norm + 1e-6)); max_norm = 0: no clipping.
double clip_scale(double norm, double max_norm);

class AdamW {
 public:
  AdamW(Arena& arena, const ParamStore& params, const std::vector<ParamUnit>& units,
        const RunConfig::Optimizer& options);

  /// One update of this rank's shards. `step` counts from 1.
  void step(Device& device, ParamStore& params, double lr, double clip_scale, int64_t step);

  /// The moments of unit u, laid out as its weights are.
  Tensor exp_avg(size_t u) { return exp_avg_.at(u); }
  Tensor exp_avg_sq(size_t u) { return exp_avg_sq_.at(u); }

  /// Parameters with and without decay, for the log.
  int64_t num_decayed() const { return num_decayed_; }
  int64_t num_not_decayed() const { return num_not_decayed_; }

 private:
  /// Elements of a unit's flat buffer that share one decision.
  struct Range {
    int64_t begin, end;
    bool decays;
  };

  RunConfig::Optimizer options_;
  std::vector<Tensor> exp_avg_, exp_avg_sq_;  // one flat buffer a unit
  std::vector<std::vector<Range>> ranges_;
  int64_t num_decayed_ = 0, num_not_decayed_ = 0;
};
