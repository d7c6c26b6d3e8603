// The list of parameters of a model, from its knobs. Names on disk: transformers' (model.layers.N.self_attn.q_proj
// ...), below the prefix that the checkpoint has.
#include "llama/params.h"

#include <cstdlib>
#include <string_view>

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
  BlockParams(const ModelConfig& config, int64_t layer)
      : c_(config), layer_(layer), prefix_(fmt::format("{}layers.{}.", config.names.prefix, layer)) {}

  std::vector<ParamSpec> make() {
    add_norm(param_name::kAttnInNorm, c_.norms.attn_in);
    add_attention();
    add_norm(param_name::kAttnOutNorm, c_.norms.attn_out);
    add_norm(param_name::kMlpInNorm, c_.norms.mlp_in);
    c_.layers[static_cast<size_t>(layer_)].is_moe ? add_moe() : add_mlp("mlp", c_.intermediate_size);
    add_norm(param_name::kMlpOutNorm, c_.norms.mlp_out);
    return std::move(params_);
  }

 private:
  struct Part {
    std::string hf_module;
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
    if (c_.mla) {
      add_latent_attention();
    } else {
      add_linear(param_name::kQkv, param_name::kQkvBias, c_.fused_qkv_on_disk ? fused : split, c_.hidden_size,
                 c_.qkv_bias);
    }
    if (c_.qk_norm != QkNorm::None) {
      const bool per_head = c_.qk_norm == QkNorm::PerHead;
      add_norm(param_name::kQNorm, "self_attn.q_norm", per_head ? c_.head_dim : c_.q_dim());
      add_norm(param_name::kKNorm, "self_attn.k_norm", per_head ? c_.head_dim : c_.kv_dim());
    }
    if (c_.has_sinks) {
      params_.push_back(param(param_name::kSinks, {c_.num_heads}, Init::Normal, prefix_ + "self_attn.sinks"));
    }
    add_linear(param_name::kO, param_name::kOBias, {{"self_attn.o_proj", c_.hidden_size}}, c_.o_dim(), c_.o_bias);
  }

  void add_latent_attention() {
    const MlaConfig& mla = c_.mla;
    if (mla.q_lora_rank > 0) {
      add_linear(param_name::kQA, param_name::kQABias, {{"self_attn.q_a_proj", mla.q_lora_rank}}, c_.hidden_size,
                 c_.qkv_bias);
      add_norm(param_name::kQANorm, "self_attn.q_a_layernorm", mla.q_lora_rank);
      add_linear(param_name::kQB, "", {{"self_attn.q_b_proj", c_.q_dim()}}, mla.q_lora_rank, false);
    } else {
      add_linear(param_name::kQB, "", {{"self_attn.q_proj", c_.q_dim()}}, c_.hidden_size, false);
    }
    add_linear(param_name::kKvA, param_name::kKvABias, {{"self_attn.kv_a_proj_with_mqa", mla.kv_lora_rank + mla.rope}},
               c_.hidden_size, c_.qkv_bias);
    add_norm(param_name::kKvANorm, "self_attn.kv_a_layernorm", mla.kv_lora_rank);
    add_linear(param_name::kKvB, "", {{"self_attn.kv_b_proj", c_.num_heads * (mla.nope + mla.v)}}, mla.kv_lora_rank,
               false);
  }

  void add_mlp(const std::string& module, int64_t F) {
    const std::vector<Part> split = {{module + ".gate_proj", F}, {module + ".up_proj", F}};
    const std::vector<Part> fused = {{module + ".gate_up_proj", 2 * F}};
    add_linear(param_name::kGateUp, param_name::kGateUpBias, c_.fused_gate_up_on_disk ? fused : split, c_.hidden_size,
               c_.mlp_bias);
    add_linear(param_name::kDown, param_name::kDownBias, {{module + ".down_proj", c_.hidden_size}}, F, c_.mlp_bias);
  }

  /// One tensor of all experts, `rows` by `columns` each, on disk as `parts` of each expert or whole.
  void add_experts(const char* name, const char* fused_name, const std::vector<Part>& parts, int64_t columns) {
    const int64_t E = c_.moe.router.num_experts;
    int64_t rows = 0;
    for (const Part& part : parts) rows += part.rows;
    const Shape shape = c_.moe.layout == WeightLayout::OutIn ? Shape{E, rows, columns} : Shape{E, columns, rows};
    ParamSpec weight{.name = name, .shape = shape, .init = Init::Normal, .disk = {}};
    if (c_.moe.is_fused_on_disk) {
      weight.disk.push_back(whole(prefix_ + "mlp.experts." + fused_name, shape));
    } else {
      int64_t offset = 0;
      for (int64_t e = 0; e < E; e++) {
        for (const Part& part : parts) {
          weight.disk.push_back(
              {.hf_name = fmt::format("{}{}.{}.{}.weight", prefix_, c_.moe.names.experts, e, part.hf_module),
               .shape = {part.rows, columns},
               .offset = offset});
          offset += part.rows * columns;
        }
      }
    }
    params_.push_back(std::move(weight));
  }

  void add_moe() {
    const MoeConfig& moe = c_.moe;
    const int64_t E = moe.router.num_experts, C = c_.hidden_size, F = moe.intermediate_size;
    // transformers 5 calls all of them alike where the experts are one tensor
    const std::string router =
        moe.is_fused_on_disk && moe.layout == WeightLayout::OutIn ? "mlp.gate" : moe.names.router;
    add_linear(param_name::kRouter, param_name::kRouterBias, {{router, E}}, C, moe.has_biases);
    add_experts(param_name::kExpertsGateUp, "gate_up_proj", {{moe.names.gate, F}, {moe.names.up, F}}, C);
    add_experts(param_name::kExpertsDown, "down_proj", {{moe.names.down, C}}, F);
    if (moe.has_biases) {
      const std::string experts = prefix_ + "mlp.experts.";
      params_.push_back(param(param_name::kExpertsGateUpBias, {E, 2 * F}, Init::Zero, experts + "gate_up_proj_bias"));
      params_.push_back(param(param_name::kExpertsDownBias, {E, C}, Init::Zero, experts + "down_proj_bias"));
    }
    if (moe.shared_intermediate_size > 0) add_mlp(moe.names.shared, moe.shared_intermediate_size);
    if (moe.has_shared_gate) {
      params_.push_back(
          param(param_name::kSharedGate, {1, C}, Init::Normal, prefix_ + moe.names.shared_gate + ".weight"));
    }
  }

  const ModelConfig& c_;
  int64_t layer_;
  std::string prefix_;
  std::vector<ParamSpec> params_;
};

}  // namespace

std::vector<ParamUnit> param_units(const ModelConfig& config) {
  const Shape embedding = {config.vocab_size, config.hidden_size};
  const Init norm_init = config.norm == NormKind::OnePlus ? Init::Zero : Init::One;
  std::vector<ParamUnit> units;
  units.push_back({"embedding", {param(param_name::kEmbedding, embedding, Init::Normal, config.names.embedding())}});
  for (int64_t l = 0; l < config.num_layers; l++) {
    units.push_back({fmt::format("block {}", l), BlockParams(config, l).make()});
  }
  units.push_back(
      {"head", {param(param_name::kFinalNorm, {config.hidden_size}, norm_init, config.names.prefix + "norm.weight")}});
  if (!config.tie_word_embeddings) {
    units.back().params.push_back(param(param_name::kLmHead, embedding, Init::Normal, config.names.lm_head));
  }
  return units;
}

bool is_mtp_tensor(const ModelConfig& config, const std::string& hf_name) {
  const std::string layers = config.names.prefix + "layers.";
  return config.has_mtp_on_disk && hf_name.starts_with(layers) &&
         std::strtoll(hf_name.c_str() + layers.size(), nullptr, 10) >= config.num_layers;
}

bool is_harmless_extra_tensor(const ModelConfig& config, const std::string& hf_name) {
  if (hf_name == config.names.lm_head) return config.tie_word_embeddings;
  if (is_mtp_tensor(config, hf_name)) return true;
  for (const char* buffer : {"rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"}) {
    if (hf_name.starts_with(config.names.prefix) && hf_name.ends_with(std::string(".") + buffer)) return true;
  }
  return false;
}
