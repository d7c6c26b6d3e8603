// The keys of mixtures of experts, by the rules of transformers 5.24.
#include "llama/config_moe.h"

#include <algorithm>

using nlohmann::json;

namespace {

constexpr int64_t kMaxExperts = 4096, kMaxWidth = int64_t{1} << 22, kMaxLayers = 2048;
constexpr double kMaxFactor = 1e9;

/// What a key stands for that transformers 5 also reads under another name.
int64_t read_num_experts(const ConfigReader& reader, const MoeRules& rules) {
  const char *key = rules.num_experts_key, *alias = rules.num_experts_alias;
  if (alias == nullptr || !reader.has(alias)) return reader.integer(key, rules.num_experts, 1, kMaxExperts);
  const int64_t n = reader.integer(alias, rules.num_experts, 1, kMaxExperts);
  if (reader.has(key) && reader.integer(key, n, 1, kMaxExperts) != n) {
    reader.refuse(alias, "\"{}\" says another number; both mean the same, so remove one", key);
  }
  return n;
}

std::vector<bool> read_expert_layers(const ConfigReader& reader, const MoeRules& rules, size_t num_layers) {
  std::vector<bool> is_moe(num_layers, true);
  if (rules.layers == ExpertLayers::AfterFirst) {
    const int64_t first = reader.integer("first_k_dense_replace", rules.first_dense, 0, kMaxLayers);
    std::fill_n(is_moe.begin(), std::min<int64_t>(first, static_cast<int64_t>(num_layers)), false);
  }
  if (rules.layers != ExpertLayers::SparseStep) return is_moe;
  const int64_t step = reader.integer("decoder_sparse_step", 1, 1, kMaxLayers);
  for (size_t l = 0; l < num_layers; l++) is_moe[l] = (static_cast<int64_t>(l) + 1) % step == 0;
  const char* key = "mlp_only_layers";
  const json* dense = reader.find(key);
  if (!dense || dense->is_null()) return is_moe;
  if (!dense->is_array()) reader.refuse(key, "expected a list of layers");
  for (const json& layer : *dense) {
    if (!layer.is_number_integer() || layer < 0 || layer >= num_layers) {
      reader.refuse(key, "{} is no layer of {}", ConfigReader::shown(layer), num_layers);
    }
    is_moe[layer.get<size_t>()] = false;
  }
  return is_moe;
}

void read_router(RouterShape& router, const ConfigReader& reader, const MoeRules& rules) {
  router.num_experts = read_num_experts(reader, rules);
  router.top_k = reader.integer("num_experts_per_tok", rules.top_k, 1, RouterShape::kMaxTopK);
  router.score = rules.score;
  if (router.top_k > router.num_experts) {
    reader.refuse("num_experts_per_tok", "there are {} experts ({})", router.num_experts, rules.num_experts_key);
  }
  if (rules.has_norm_topk_key) {
    router.renormalize = reader.boolean("norm_topk_prob", rules.norm_topk);
    if (rules.score != RouterScore::Sigmoid && !router.renormalize) router.score = RouterScore::SoftmaxAll;
  }
  if (!rules.has_groups) return;
  router.scale = reader.number("routed_scaling_factor", rules.scale, 0, kMaxFactor, true);
  router.num_groups = reader.integer("n_group", rules.num_groups, 1, kMaxExperts);
  router.top_groups = reader.integer("topk_group", rules.top_groups, 1, kMaxExperts);
  const int64_t width = router.num_experts / router.num_groups;
  if (router.num_experts % router.num_groups != 0 || (router.num_groups > 1 && width < 2)) {
    reader.refuse("n_group", "expected groups of equal size, and of two experts at least, of {} experts",
                  router.num_experts);
  }
  if (router.top_groups > router.num_groups || router.top_k > router.top_groups * width) {
    reader.refuse("topk_group", "{} experts a token do not come from so many of {} groups of {}", router.top_k,
                  router.num_groups, width);
  }
}

void read_shared_expert(MoeConfig& moe, const ConfigReader& reader, const MoeRules& rules) {
  if (rules.shared == SharedExpert::Gated) {
    moe.shared_intermediate_size = reader.integer("shared_expert_intermediate_size", rules.shared_width, 1, kMaxWidth);
    moe.has_shared_gate = true;
  } else if (rules.shared == SharedExpert::Counted) {
    moe.shared_intermediate_size = moe.intermediate_size * reader.integer("n_shared_experts", 1, 1, kMaxExperts);
  }
}

}  // namespace

void read_moe(ModelConfig& c, const ConfigReader& reader, const Family& family) {
  if (!family.moe) return;
  const MoeRules& rules = *family.moe;
  MoeConfig& moe = c.moe;
  read_router(moe.router, reader, rules);
  moe.intermediate_size =
      rules.width > 0 ? reader.integer(rules.width_key, rules.width, 1, kMaxWidth) : c.intermediate_size;
  read_shared_expert(moe, reader, rules);
  moe.has_select_bias = rules.has_groups;
  moe.names = rules.names;
  const char* jitter = "router_jitter_noise";
  if (reader.optional_number(jitter, 0.0, 0, 1).value_or(0) != 0) {
    reader.refuse(jitter, "noise in the router is not supported; set it to 0.0 in config.json to train without");
  }
  const bool asks = reader.boolean("output_router_logits", false);
  if (rules.has_balance_loss) {
    const double coef = reader.number("router_aux_loss_coef", 1e-3, 0, kMaxFactor);
    if (asks) moe.balance_coef = coef;
  } else if (asks) {
    reader.refuse("output_router_logits", "{} has no load-balancing loss, and transformers ignores it; set it to false",
                  family.model_type);
  }
  if (rules.is_fused) moe.is_fused_on_disk = true, moe.layout = WeightLayout::InOut;
  if (rules.is_gpt_oss) {
    moe.has_biases = true;
    moe.gate = {GateKind::Clamped, reader.number("swiglu_alpha", 1.702, 0, kMaxFactor, true),
                reader.number("swiglu_limit", 7, 0, kMaxFactor, true)};
    moe.layout = WeightLayout::InOut;
    moe.is_fused_on_disk = true;
  }
  const std::vector<bool> is_moe = read_expert_layers(reader, rules, c.layers.size());
  for (size_t l = 0; l < c.layers.size(); l++) c.layers[l].is_moe = is_moe[l];
  // A model whose layers are all dense after all has no mixture.
  if (std::none_of(is_moe.begin(), is_moe.end(), [](bool b) { return b; })) moe = {};
}

void save_moe(json& out, const ModelConfig& c, const Family& family) {
  if (!family.moe || !c.moe) return;
  const MoeRules& rules = *family.moe;
  const RouterShape& router = c.moe.router;
  out[rules.num_experts_key] = router.num_experts;
  if (rules.num_experts_alias) out[rules.num_experts_alias] = router.num_experts;
  out["num_experts_per_tok"] = router.top_k;
  if (rules.width > 0) out[rules.width_key] = c.moe.intermediate_size;
  if (rules.has_norm_topk_key) {
    out["norm_topk_prob"] =
        router.score == RouterScore::Sigmoid ? router.renormalize : router.score == RouterScore::SoftmaxSelected;
  }
  if (rules.has_groups) {
    out["routed_scaling_factor"] = router.scale;
    out["n_group"] = router.num_groups, out["topk_group"] = router.top_groups;
  }
  if (rules.shared == SharedExpert::Gated) out["shared_expert_intermediate_size"] = c.moe.shared_intermediate_size;
  if (rules.shared == SharedExpert::Counted) {
    out["n_shared_experts"] = c.moe.shared_intermediate_size / c.moe.intermediate_size;
  }
  if (rules.layers == ExpertLayers::AfterFirst) {
    const auto first = std::find_if(c.layers.begin(), c.layers.end(), [](const LayerConfig& l) { return l.is_moe; });
    out["first_k_dense_replace"] = first - c.layers.begin();
  } else if (rules.layers == ExpertLayers::SparseStep) {
    json dense = json::array();
    for (size_t l = 0; l < c.layers.size(); l++) {
      if (!c.layers[l].is_moe) dense.push_back(l);
    }
    out["decoder_sparse_step"] = 1, out["mlp_only_layers"] = dense;
  }
  if (rules.has_balance_loss) {
    out["output_router_logits"] = c.moe.balance_coef > 0;
    if (c.moe.balance_coef > 0) out["router_aux_loss_coef"] = c.moe.balance_coef;
  }
  if (out.contains("router_jitter_noise")) out["router_jitter_noise"] = 0.0;
  if (rules.is_gpt_oss) out["swiglu_alpha"] = c.moe.gate.alpha, out["swiglu_limit"] = c.moe.gate.limit;
}
