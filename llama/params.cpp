// The list of parameters of a model, from its knobs. Names on disk: transformers' (model.layers.N.self_attn.q_proj
// ...).
#include "llama/params.h"

namespace {

DiskTensor whole(std::string hf_name, Shape shape) {
  return {.hf_name = std::move(hf_name), .shape = shape};
}

ParamSpec param(const char* name, Shape shape, Init init, std::string hf_name) {
  return {.name = name, .shape = shape, .init = init, .disk = {whole(std::move(hf_name), shape)}};
}

/// One block's parameters, appended in the order in which the forward pass uses them.
class BlockParams {
 public:
  BlockParams(const ModelConfig& config, int64_t layer) : c_(config), prefix_(fmt::format("model.layers.{}.", layer)) {}

  std::vector<ParamSpec> make() {
    add_norm(param_name::kAttnInNorm, c_.norms.attn_in);
    add_attention();
    add_norm(param_name::kAttnOutNorm, c_.norms.attn_out);
    add_norm(param_name::kMlpInNorm, c_.norms.mlp_in);
    add_mlp();
    add_norm(param_name::kMlpOutNorm, c_.norms.mlp_out);
    return std::move(params_);
  }

 private:
  struct Part {
    const char* hf_module;
    int64_t rows;
  };

  /// Norms are stored so that the fresh model multiplies by one: as 1, or as 0 where the op adds one.
  Init norm_init() const { return c_.norm == NormKind::OnePlus ? Init::Zero : Init::One; }

  void add_norm(const char* name, const std::string& hf_module, int64_t width) {
    params_.push_back(param(name, {width}, norm_init(), prefix_ + hf_module + ".weight"));
  }
  void add_norm(const char* name, const std::string& hf_module) {
    if (!hf_module.empty()) add_norm(name, hf_module, c_.hidden_size);
  }

  /// `parts` stacked by rows into one (sum of rows, in) weight, and likewise one bias.
  void add_linear(const char* name, const char* bias_name, const std::vector<Part>& parts, int64_t in, bool has_bias) {
    int64_t rows = 0;
    ParamSpec weight{.name = name, .shape = {}, .init = Init::Normal, .disk = {}};
    ParamSpec bias{.name = bias_name, .shape = {}, .init = Init::Zero, .disk = {}};
    for (const Part& part : parts) {
      const std::string hf_name = prefix_ + part.hf_module;
      weight.disk.push_back({.hf_name = hf_name + ".weight", .shape = {part.rows, in}, .offset = rows * in});
      bias.disk.push_back({.hf_name = hf_name + ".bias", .shape = {part.rows}, .offset = rows});
      rows += part.rows;
    }
    weight.shape = {rows, in};
    bias.shape = {rows};
    params_.push_back(std::move(weight));
    if (has_bias) params_.push_back(std::move(bias));
  }

  void add_attention() {
    const std::vector<Part> split = {
        {"self_attn.q_proj", c_.q_dim()}, {"self_attn.k_proj", c_.kv_dim()}, {"self_attn.v_proj", c_.kv_dim()}};
    const std::vector<Part> fused = {{"self_attn.qkv_proj", c_.qkv_dim()}};
    add_linear(param_name::kQkv, param_name::kQkvBias, c_.fused_qkv_on_disk ? fused : split, c_.hidden_size,
               c_.qkv_bias);
    if (c_.qk_norm != QkNorm::None) {
      const bool per_head = c_.qk_norm == QkNorm::PerHead;
      add_norm(param_name::kQNorm, "self_attn.q_norm", per_head ? c_.head_dim : c_.q_dim());
      add_norm(param_name::kKNorm, "self_attn.k_norm", per_head ? c_.head_dim : c_.kv_dim());
    }
    add_linear(param_name::kO, param_name::kOBias, {{"self_attn.o_proj", c_.hidden_size}}, c_.q_dim(), c_.o_bias);
  }

  void add_mlp() {
    const int64_t F = c_.intermediate_size;
    const std::vector<Part> split = {{"mlp.gate_proj", F}, {"mlp.up_proj", F}};
    const std::vector<Part> fused = {{"mlp.gate_up_proj", 2 * F}};
    add_linear(param_name::kGateUp, param_name::kGateUpBias, c_.fused_gate_up_on_disk ? fused : split, c_.hidden_size,
               c_.mlp_bias);
    add_linear(param_name::kDown, param_name::kDownBias, {{"mlp.down_proj", c_.hidden_size}}, F, c_.mlp_bias);
  }

  const ModelConfig& c_;
  std::string prefix_;
  std::vector<ParamSpec> params_;
};

}  // namespace

std::vector<ParamUnit> param_units(const ModelConfig& config) {
  const Shape embedding = {config.vocab_size, config.hidden_size};
  const Init norm_init = config.norm == NormKind::OnePlus ? Init::Zero : Init::One;
  std::vector<ParamUnit> units;
  units.push_back({"embedding", {param(param_name::kEmbedding, embedding, Init::Normal, "model.embed_tokens.weight")}});
  for (int64_t l = 0; l < config.num_layers; l++) {
    units.push_back({fmt::format("block {}", l), BlockParams(config, l).make()});
  }
  units.push_back({"head", {param(param_name::kFinalNorm, {config.hidden_size}, norm_init, "model.norm.weight")}});
  if (!config.tie_word_embeddings) {
    units.back().params.push_back(param(param_name::kLmHead, embedding, Init::Normal, "lm_head.weight"));
  }
  return units;
}

bool is_harmless_extra_tensor(const ModelConfig& config, const std::string& hf_name) {
  if (hf_name == "lm_head.weight") return config.tie_word_embeddings;
  for (const char* buffer : {"rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"}) {
    if (hf_name.starts_with("model.") && hf_name.ends_with(std::string(".") + buffer)) return true;
  }
  return false;
}
