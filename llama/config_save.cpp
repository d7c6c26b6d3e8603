// Writes config.json so that transformers 4.57 and 5.24 both build the model that was trained: 4.57 reads `rope_theta`
// and `rope_scaling`, 5.24 `rope_parameters`, and 5.24 wants floats with a point and whole numbers without.
#include <algorithm>
#include <cmath>

#include "layers/core/check.h"
#include "llama/config_moe.h"

using nlohmann::json;

namespace {

json null_if(bool is_null, const json& value) {
  return is_null ? json(nullptr) : value;
}

// ---- rotary embedding

double resolved_factor(const RopeConfig& rope) {
  return rope.factor.value_or(static_cast<double>(rope.max_position_embeddings) /
                              static_cast<double>(rope.original_max_position_embeddings));
}

json with_mrope(json keys, const RopeConfig& rope) {
  keys.update(rope.mrope);
  return keys;
}

/// The keys of `rope_scaling`; null for the plain rotary embedding. The attention factor of longrope is spelled out,
/// because the versions derive it from different keys.
json rope_scaling(const RopeConfig& rope) {
  if (rope.type == "default") return rope.mrope.empty() ? json(nullptr) : with_mrope({{"rope_type", "default"}}, rope);
  json s = {{"rope_type", rope.type}, {"factor", resolved_factor(rope)}};
  if (rope.original_max_position_embeddings)
    s["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  if (rope.type == "llama3") {
    s["low_freq_factor"] = rope.low_freq_factor;
    s["high_freq_factor"] = rope.high_freq_factor;
  } else if (rope.type == "yarn") {
    s["beta_fast"] = rope.beta_fast;
    s["beta_slow"] = rope.beta_slow;
    s["truncate"] = rope.truncate;
    if (rope.attention_factor) s["attention_factor"] = *rope.attention_factor;
    if (rope.mscale) s["mscale"] = *rope.mscale;
    if (rope.mscale_all_dim) s["mscale_all_dim"] = *rope.mscale_all_dim;
  } else if (rope.type == "longrope") {
    s["attention_factor"] = make_rope_table(rope, 1).attention_factor;
    s["short_factor"] = rope.short_factor;
    s["long_factor"] = rope.long_factor;
  }
  return with_mrope(std::move(s), rope);
}

/// The dict of transformers 5: the same keys with the type and theta inside.
json rope_parameters(const RopeConfig& rope) {
  json p = rope.type == "default" ? with_mrope({{"rope_type", "default"}}, rope) : rope_scaling(rope);
  p["rope_theta"] = rope.theta;
  return p;
}

/// partial_rotary_factor: the least double for which int(head_dim * it) is r.
double partial_rotary_factor(int64_t rotary_dim, int64_t head_dim) {
  double partial = static_cast<double>(rotary_dim) / static_cast<double>(head_dim);
  while (static_cast<int64_t>(static_cast<double>(head_dim) * partial) < rotary_dim)
    partial = std::nextafter(partial, 2.0);
  return partial;
}

/// What transformers 4 reads; for some families it refuses all but a few keys.
json rope_scaling_of_v4(const RopeConfig& rope, RopeScalingKeys keys) {
  if (rope.type == "default" || keys == RopeScalingKeys::Any) return rope_scaling(rope);
  switch (keys) {
    case RopeScalingKeys::Any:
      break;
    case RopeScalingKeys::TypeAndFactor:
      return {{"type", rope.type}, {"factor", resolved_factor(rope)}};
    case RopeScalingKeys::TypeAndLists:
      return {{"type", rope.type}, {"short_factor", rope.short_factor}, {"long_factor", rope.long_factor}};
  }
  return nullptr;
}

void save_ropes(json& out, const ModelConfig& c, const Family& family) {
  const RopeConfig& rope = c.ropes.at(0);
  out["rope_theta"] = rope.theta;
  out["rope_scaling"] = rope_scaling_of_v4(rope, family.rope_scaling_keys);
  out["rope_parameters"] = rope_parameters(rope);
  for (const char* key : {"partial_rotary_factor", "original_max_position_embeddings"}) out.erase(key);
  if (rope.type == "longrope") out["original_max_position_embeddings"] = rope.original_max_position_embeddings;
  if (family.rotates_partially) {
    const double partial = partial_rotary_factor(rope.rotary_dim, c.head_dim);
    out["partial_rotary_factor"] = out["rope_parameters"]["partial_rotary_factor"] = partial;
  }
  if (family.local_rope_theta) {
    const RopeConfig& local = c.ropes.at(1);
    out["rope_local_base_freq"] = local.theta;
    out["rope_parameters"] = {{"full_attention", rope_parameters(rope)}, {"sliding_attention", rope_parameters(local)}};
  }
}

// ---- layers

void save_layers(json& out, const ModelConfig& c, const Family& family) {
  int64_t window = 0;
  json types = json::array();
  for (const LayerConfig& layer : c.layers) {
    window = std::max(window, layer.window);
    types.push_back(layer.window > 0 ? "sliding_attention" : layer.chunk > 0 ? "chunked_attention" : "full_attention");
  }
  if (family.windows == WindowRule::EveryLayer) {
    out["sliding_window"] = null_if(window == 0, window);
    if (family.has_use_sliding_window_key) out["use_sliding_window"] = window > 0;
  } else if (family.windows != WindowRule::Never) {
    out["layer_types"] = types;
    if (window > 0) out["sliding_window"] = window;
    if (family.has_use_sliding_window_key) out["use_sliding_window"] = window > 0;
    if (family.windows == WindowRule::PeriodicPattern && window == 0)
      out["sliding_window"] = family.defaults.sliding_window;
  }
  if (family.has_nope_layers) {
    json has_rope = json::array();
    for (const LayerConfig& layer : c.layers) has_rope.push_back(layer.rope >= 0 ? 1 : 0);
    out["no_rope_layers"] = has_rope;
  }
}

void save_sizes(json& out, const ModelConfig& c) {
  out["vocab_size"] = c.vocab_size;
  out["hidden_size"] = c.hidden_size;
  out["intermediate_size"] = c.intermediate_size;
  out["num_hidden_layers"] = c.num_layers;
  out["num_attention_heads"] = c.num_heads;
  out["num_key_value_heads"] = c.num_kv_heads;
  out["head_dim"] = c.mla ? c.mla.rope : c.head_dim;
  if (c.mla) {
    out["q_lora_rank"] = null_if(c.mla.q_lora_rank == 0, c.mla.q_lora_rank);
    out["kv_lora_rank"] = c.mla.kv_lora_rank;
    out["qk_nope_head_dim"] = c.mla.nope, out["qk_rope_head_dim"] = c.mla.rope, out["v_head_dim"] = c.mla.v;
    out["qk_head_dim"] = c.head_dim;
    out["rope_interleave"] = c.ropes.at(0).pairing == RopePairing::Interleaved;
  }
  out["max_position_embeddings"] = c.max_position_embeddings;
}

void save_maths(json& out, const ModelConfig& c, const Family& family) {
  out[family.norm_eps_key] = c.norm_eps;
  out["initializer_range"] = c.initializer_range;
  out["tie_word_embeddings"] = c.tie_word_embeddings;
  for (const char* dropout : {"attention_dropout", "resid_pdrop", "embd_pdrop"}) {
    if (out.contains(dropout)) out[dropout] = 0.0;
  }
  out["pad_token_id"] = null_if(c.pad_token_id < 0, c.pad_token_id);
  if (family.qkv_bias == BiasRule::AttentionBiasKey) out["attention_bias"] = c.qkv_bias;
  if (family.qkv_bias == BiasRule::QkvBiasKey) out["qkv_bias"] = c.qkv_bias;
  if (family.has_mlp_bias_key) out["mlp_bias"] = c.mlp_bias;
  if (family.has_qk_norm_key) out["use_qk_norm"] = c.qk_norm != QkNorm::None;
  if (family.logit_scale != 0) out["logit_scale"] = c.logit_scale;
  if (family.has_multipliers) {
    out["embedding_multiplier"] = c.embed_scale;
    out["residual_multiplier"] = c.residual_multiplier;
    out["attention_multiplier"] = c.attention_scale;
    out["logits_scaling"] = 1 / c.logit_scale;
  }
  if (!family.is_gemma) return;
  out["hidden_activation"] = "gelu_pytorch_tanh";
  out["query_pre_attn_scalar"] = std::llround(1 / (c.attention_scale * c.attention_scale));
  out["final_logit_softcapping"] = null_if(c.final_softcap == 0, c.final_softcap);
  if (family.has_attention_softcap_key)
    out["attn_logit_softcapping"] = null_if(c.attention_softcap == 0, c.attention_softcap);
}

}  // namespace

json config_to_save(const ModelConfig& config, const std::string& torch_dtype) {
  const Family* family = find_family(config.model_type);
  CHECK(family, "no family is called \"{}\"; supported: {}", config.model_type, supported_families());
  CHECK(torch_dtype == "float32" || torch_dtype == "bfloat16", "a checkpoint is float32 or bfloat16, not \"{}\"",
        torch_dtype);
  json out = config.hf.is_object() ? config.hf : json::object();
  out["model_type"] = config.model_type;
  out["architectures"] = {config.architecture};
  out["torch_dtype"] = out["dtype"] = torch_dtype;
  out.erase("quantization_config");  // weights are saved as they were trained
  if (config.has_vision && config.hf.empty()) out["text_config"] = json::object();
  json& text = text_part(config, out);
  save_sizes(text, config);
  save_maths(text, config, *family);
  save_layers(text, config, *family);
  save_moe(text, config, *family);
  save_ropes(text, config, *family);
  out["tie_word_embeddings"] = config.tie_word_embeddings;
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (text.contains(key)) text[key] = torch_dtype;
  }
  return out;
}
