#include "llama/optimizer.h"

#include <fnmatch.h>

#include <algorithm>

bool matches_glob(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

double clip_scale(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

AdamW::AdamW(Arena& arena, const ParamStore& params, const std::vector<ParamUnit>& units,
             const RunConfig::Optimizer& options)
    : options_(options) {
  CHECK(options.name == "adamw", "optimizer.name = {}: the one optimizer is adamw", options.name);
  CHECK(units.size() == params.num_units(), "the store has {} units, the model {}", params.num_units(), units.size());
  arena.begin_section("optimizer moments");
  for (size_t u = 0; u < units.size(); u++) {
    const FlatLayout& layout = params.layout(u);
    const DType dtype = accumulator_dtype(params.dtype());
    exp_avg_.push_back(arena.place(dtype, {layout.shard_numel()}, units[u].name + " exp_avg"));
    exp_avg_sq_.push_back(arena.place(dtype, {layout.shard_numel()}, units[u].name + " exp_avg_sq"));
    std::vector<Range> ranges;
    for (size_t i = 0; i < units[u].params.size(); i++) {
      for (const DiskTensor& disk : units[u].params[i].disk) {
        const bool decays = std::none_of(options.no_decay.begin(), options.no_decay.end(),
                                         [&](const auto& pattern) { return matches_glob(pattern, disk.hf_name); });
        const int64_t begin = layout.begin(i) + disk.offset, n = disk.shape.numel();
        (decays ? num_decayed_ : num_not_decayed_) += n;
        if (!ranges.empty() && ranges.back().decays == decays && ranges.back().end == begin) {
          ranges.back().end += n;
        } else {
          ranges.push_back({begin, begin + n, decays});
        }
      }
    }
    ranges_.push_back(std::move(ranges));
  }
}

void AdamW::step(Device& device, ParamStore& params, double lr, double clip, int64_t step) {
  AdamWStep update{lr, options_.beta1, options_.beta2, options_.eps, 0, clip, step};
  for (size_t u = 0; u < params.num_units(); u++) {
    const Tensor p = params.master_shard(u), g = params.grad_shard(u);
    const Tensor rounded = params.has_master() ? params.param_shard(u) : Tensor{};
    const int64_t shard_begin = params.shard_begin(u), shard_end = shard_begin + p.numel();
    for (const Range& range : ranges_[u]) {
      const int64_t begin = std::max(range.begin, shard_begin), end = std::min(range.end, shard_end);
      if (begin >= end) continue;
      const auto part = [&](Tensor t) { return t.rows(begin - shard_begin, end - begin); };
      update.weight_decay = range.decays ? options_.weight_decay : 0;
      adamw_update(device, part(p), part(exp_avg_[u]), part(exp_avg_sq_[u]), part(g), update,
                   rounded ? part(rounded) : Tensor{});
    }
  }
  params.weights_changed();
}
