// Reads config.json into knobs, by the rules of transformers 5.24 (absent keys, nulls, derived layer types). What would
// change the maths and is not supported is refused by name; other keys are carried along.
#include "llama/config.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

#include "data/file.h"
#include "data/json.h"
#include "data/safetensors.h"
#include "llama/config_moe.h"
#include "llama/config_reader.h"
#include "llama/config_rope.h"
#include "llama/family.h"

using nlohmann::json;

namespace {

// Bounds that no model reaches and that keep every product of sizes, in bytes, within 62 bits.
constexpr int64_t kMaxWidth = int64_t{1} << 22, kMaxVocab = int64_t{1} << 24, kMaxLayers = 2048,
                  kMaxHeadDim = int64_t{1} << 16;
constexpr int64_t kMaxPositions = int64_t{1} << 40;
constexpr int64_t kMaxFileBytes = int64_t{16} << 20;
constexpr double kMinMultiplier = 1e-9, kMaxMultiplier = 1e9;  // of those that something is divided by

// ---- keys that change the maths

enum class HarmlessIf { NullOrFalse, NullOrZero, NullOrOne, NullOrTrue, Null };

struct DangerousKey {
  const char* key;
  HarmlessIf harmless;
  const char* why;
};

constexpr const char* kNoDropout = "dropout is not supported; set it to 0.0 in config.json to train without";
constexpr const char* kNoExperts = "this model_type has no experts, and transformers ignores the key";
constexpr const char* kNoMultiplier = "multipliers of this kind are not supported";
constexpr const char* kCausalOnly = "only causal language models are supported";
constexpr const char* kIgnored =
    "transformers ignores it for this model_type, and so would this trainer; remove it or set it to null";
constexpr const char* kNoMla = "this model_type has no latent attention (MLA), and transformers ignores the key";

constexpr std::array<DangerousKey, 18> kDangerousKeys = {{
    {"compression_config", HarmlessIf::Null,
     "the weights are compressed; use the checkpoint in bf16 or fp32 that it was made from"},
    {"attention_dropout", HarmlessIf::NullOrZero, kNoDropout},
    {"resid_pdrop", HarmlessIf::NullOrZero, kNoDropout},
    {"embd_pdrop", HarmlessIf::NullOrZero, kNoDropout},
    {"hidden_dropout", HarmlessIf::NullOrZero, kNoDropout},
    {"use_bidirectional_attention", HarmlessIf::NullOrFalse, kCausalOnly},
    {"is_causal", HarmlessIf::NullOrTrue, kCausalOnly},
    {"is_encoder_decoder", HarmlessIf::NullOrFalse, kCausalOnly},
    {"add_cross_attention", HarmlessIf::NullOrFalse, kCausalOnly},
    {"moe_num_experts", HarmlessIf::NullOrZero, kNoExperts},
    {"alibi", HarmlessIf::NullOrFalse, "position biases (ALiBi) are not supported"},
    {"clip_qkv", HarmlessIf::Null, "clipping of q, k and v is not supported"},
    {"scale_emb", HarmlessIf::NullOrOne, kNoMultiplier},
    {"scale_depth", HarmlessIf::NullOrOne, kNoMultiplier},
    {"final_logit_softcap", HarmlessIf::NullOrZero,
     "the key is final_logit_softcapping, and transformers ignores this one"},
    {"lm_head_bias", HarmlessIf::NullOrFalse, "a bias of the head is not supported"},
    {"cross_attention_layers", HarmlessIf::Null, "cross-attention is not supported"},
    {"block_configs", HarmlessIf::Null, "blocks of different shapes are not supported"},
}};

bool is_harmless(const json& value, HarmlessIf rule) {
  if (value.is_null()) return true;
  switch (rule) {
    case HarmlessIf::NullOrFalse:
      return value.is_boolean() && !value.get<bool>();
    case HarmlessIf::NullOrTrue:
      return value.is_boolean() && value.get<bool>();
    case HarmlessIf::NullOrZero:
      return value.is_number() && value.get<double>() == 0;
    case HarmlessIf::NullOrOne:
      return value.is_number() && value.get<double>() == 1;
    case HarmlessIf::Null:
      return false;
  }
  return false;
}

void refuse_unless(const ConfigReader& reader, const char* key, HarmlessIf rule, const char* why) {
  const json* value = reader.find(key);
  if (value && !is_harmless(*value, rule)) reader.refuse(key, "{}", why);
}

/// MXFP4 and FP8 of tiles of 128 x 128 are decoded while they are loaded: quantized.h.
void check_quantization(const ConfigReader& reader) {
  const char* key = "quantization_config";
  const json* quantization = reader.find(key);
  if (!quantization || quantization->is_null()) return;
  const std::string method = quantization->is_object() ? quantization->value("quant_method", "") : "";
  const bool is_fp8 = method == "fp8" && quantization->value("weight_block_size", json()) == json({128, 128}) &&
                      quantization->value("fmt", "e4m3") == "e4m3";
  if (method == "mxfp4" || is_fp8) return;
  reader.refuse(key,
                "of quantised weights only mxfp4, and fp8 with weight_block_size [128, 128], are decoded; use the "
                "checkpoint in bf16 or fp32 that it was made from");
}

/// Keys that matter in other families, where this one ignores them: set, they say that something else was meant.
void refuse_dangerous_keys(const ConfigReader& reader, const Family& family) {
  for (const DangerousKey& d : kDangerousKeys) refuse_unless(reader, d.key, d.harmless, d.why);
  check_quantization(reader);
  const auto unless = [&](bool heeded, const char* key, HarmlessIf rule) {
    if (!heeded) refuse_unless(reader, key, rule, kIgnored);
  };
  unless(family.qkv_bias != BiasRule::Never, "attention_bias", HarmlessIf::NullOrFalse);
  unless(family.has_mlp_bias_key, "mlp_bias", HarmlessIf::NullOrFalse);
  unless(family.qk_norm != QkNorm::None, "use_qk_norm",
         family.has_qk_norm_key ? HarmlessIf::Null : HarmlessIf::NullOrFalse);
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    const bool heeded =
        family.moe && (family.moe->num_experts_key == std::string_view(key) ||
                       (family.moe->num_experts_alias && family.moe->num_experts_alias == std::string_view(key)));
    if (!heeded) refuse_unless(reader, key, HarmlessIf::NullOrZero, family.moe ? kIgnored : kNoExperts);
  }
  unless(family.qk_norm != QkNorm::None, "qk_layernorm", HarmlessIf::NullOrFalse);
  unless(family.has_attention_softcap_key, "attn_logit_softcapping", HarmlessIf::NullOrZero);
  unless(family.is_gemma, "final_logit_softcapping", HarmlessIf::NullOrZero);
  unless(family.is_gemma, "query_pre_attn_scalar", HarmlessIf::Null);
  if (family.windows == WindowRule::Never && family.has_use_sliding_window_key) {
    refuse_unless(reader, "use_sliding_window", HarmlessIf::NullOrFalse,
                  "versions of transformers disagree on which layers of this model_type have the window");
  } else {
    unless(family.windows != WindowRule::Never, "sliding_window", HarmlessIf::NullOrZero);
  }
  unless(family.has_nope_layers, "no_rope_layers", HarmlessIf::Null);
  unless(family.logit_scale != 0, "logit_scale", HarmlessIf::NullOrOne);
  for (const char* key : {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}) {
    unless(family.has_multipliers, key, HarmlessIf::NullOrOne);
  }
  unless(std::string_view(family.norm_eps_key) == "rms_norm_eps", "rms_norm_eps", HarmlessIf::Null);
  refuse_unless(reader, "use_parallel_block", family.parallel_block ? HarmlessIf::NullOrTrue : HarmlessIf::NullOrFalse,
                kIgnored);
  const bool interleaved = family.rope_pairing == RopePairing::Interleaved;
  for (const char* key : {"q_lora_rank", "kv_lora_rank"}) {
    if (!family.has_mla) refuse_unless(reader, key, HarmlessIf::NullOrZero, kNoMla);
  }
  for (const char* key : {"rope_interleave", "rope_interleaved"}) {
    if (family.has_mla && std::string_view(key) == "rope_interleave") continue;
    refuse_unless(reader, key, interleaved ? HarmlessIf::NullOrTrue : HarmlessIf::NullOrFalse,
                  interleaved ? "this family rotates neighbours, and transformers ignores the key"
                              : "this family rotates halves, and transformers ignores the key");
  }
}

// ---- which family

const Family& read_family(const ConfigReader& reader) {
  CHECK(reader.find("model_type"), "{}: no \"model_type\"; supported: {}", reader.where(), supported_families());
  const std::string model_type = reader.text("model_type", "");
  if (const Family* family = find_family(model_type)) return *family;
  std::string reason = refusal_of(model_type);
  if (reason.empty() && (reader.has("text_config") || reader.has("vision_config"))) reason = refusal_of("llava");
  if (reason.empty()) reason = "it is not one of the families that are supported";
  reader.refuse("model_type", "{}. Supported: {}", reason, supported_families());
}

void check_architecture(const ConfigReader& reader, const Family& family) {
  const json* list = reader.find("architectures");
  if (!list || list->is_null() || (list->is_array() && list->empty())) return;
  if (!list->is_array()) reader.refuse("architectures", "expected a list of class names");
  for (const json& name : *list) {
    if (!name.is_string()) reader.refuse("architectures", "expected a list of class names");
    std::string lower = name.get<std::string>();
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (lower.ends_with(family.vision ? "forconditionalgeneration" : "forcausallm")) return;
  }
  reader.refuse("architectures", "only causal language models are supported, for this model_type {}",
                family.architecture);
}

/// What describes the text model: `text_config` of a vision-language model, or the top level.
ConfigReader text_reader(const ConfigReader& top, const Family& family) {
  if (!family.vision) return top;
  const char* key = "text_config";
  if (!top.has(key)) {
    if (!family.vision->may_be_flat) top.refuse(key, "this model_type needs it: the sizes of its text part are there");
    return top;
  }
  const json& text = *top.find(key);
  if (!text.is_object()) top.refuse(key, "expected an object");
  ConfigReader reader(text, top.where(), key);
  const char* type = family.vision->text_type;
  if (reader.text("model_type", type) != type) {
    reader.refuse("model_type", "the text part of a {} is a {}", family.model_type, type);
  }
  return reader;
}

/// Keys that a vision-language model has at its top level, whatever text_config says.
void read_vision(ModelConfig& c, const ConfigReader& top, const VisionRules& vision) {
  check_quantization(top);
  c.has_vision = true;
  c.names = vision.names;
  c.image_tokens = {top.integer(vision.image_token_key, vision.image_token, 0, kMaxVocab)};
  if (vision.video_token) c.image_tokens.push_back(top.integer("video_token_id", *vision.video_token, 0, kMaxVocab));
}

// ---- sizes, norms, head

/// transformers 5 writes the width that rotates as head_dim, and reads it before qk_rope_head_dim.
MlaConfig read_mla(const ConfigReader& reader) {
  MlaConfig mla;
  mla.q_lora_rank = reader.optional_integer("q_lora_rank", 1536, 0, kMaxWidth).value_or(0);
  mla.kv_lora_rank = reader.integer("kv_lora_rank", 512, 1, kMaxWidth);
  mla.nope = reader.integer("qk_nope_head_dim", 128, 1, kMaxHeadDim);
  mla.rope = reader.integer("qk_rope_head_dim", 64, 2, kMaxHeadDim);
  mla.v = reader.integer("v_head_dim", 128, 1, kMaxHeadDim);
  if (reader.has("head_dim")) mla.rope = reader.integer("head_dim", 0, 2, kMaxHeadDim);
  if (mla.v > mla.nope + mla.rope) {
    reader.refuse("v_head_dim", "wider than a head of q, {} + {}, which is not supported", mla.nope, mla.rope);
  }
  return mla;
}

void read_sizes(ModelConfig& c, const ConfigReader& reader, const FamilyDefaults& d) {
  c.vocab_size = reader.integer("vocab_size", d.vocab_size, 1, kMaxVocab);
  c.hidden_size = reader.integer("hidden_size", d.hidden_size, 1, kMaxWidth);
  c.intermediate_size = reader.integer("intermediate_size", d.intermediate_size, 1, kMaxWidth);
  c.num_layers = reader.integer("num_hidden_layers", d.num_layers, 1, kMaxLayers);
  c.num_heads = reader.integer("num_attention_heads", d.num_heads, 1, kMaxWidth);
  c.num_kv_heads =
      reader.optional_integer("num_key_value_heads", d.num_kv_heads ? d.num_kv_heads : c.num_heads, 1, kMaxWidth)
          .value_or(c.num_heads);
  c.max_position_embeddings = reader.integer("max_position_embeddings", d.max_position_embeddings, 1, kMaxPositions);
  if (c.num_heads % c.num_kv_heads != 0) {
    reader.refuse("num_key_value_heads",
                  "it must divide num_attention_heads, which is {} (an absent num_key_value_heads means {})",
                  c.num_heads, c.num_kv_heads);
  }
  if (c.mla) {
    c.head_dim = c.mla.nope + c.mla.rope;
    if (c.num_kv_heads != c.num_heads) {
      reader.refuse("num_key_value_heads", "latent attention has as many as num_attention_heads, {}", c.num_heads);
    }
  }
  const auto head_dim =
      c.mla ? std::optional<int64_t>(c.head_dim)
            : reader.optional_integer("head_dim", d.head_dim ? std::optional<int64_t>(d.head_dim) : std::nullopt, 1,
                                      kMaxHeadDim);
  if (!head_dim && c.hidden_size % c.num_heads != 0) {
    reader.refuse("hidden_size", "it is not a multiple of num_attention_heads, {}, and there is no head_dim",
                  c.num_heads);
  }
  c.head_dim = head_dim.value_or(c.hidden_size / c.num_heads);
  CHECK(c.head_dim <= kMaxHeadDim && c.num_heads * c.head_dim <= kMaxWidth,
        "{}: {} heads (num_attention_heads) of width {} (head_dim) are too large, the limits are {} for a head and {} "
        "for all",
        reader.where(), c.num_heads, c.head_dim, kMaxHeadDim, kMaxWidth);
}

/// torch's padding_idx: negative values count from the end.
int64_t read_pad_token(const ConfigReader& reader, const Family& family, int64_t vocab_size) {
  const char* key = "pad_token_id";
  const int64_t fallback = family.defaults.pad_token_id;
  if (!reader.find(key)) {
    CHECK(fallback < vocab_size,
          "{}: \"{}\" is absent, which means {} for {}, and vocab_size is {}: write \"{}\": null", reader.where(), key,
          fallback, family.model_type, vocab_size, key);
    return fallback;
  }
  const int64_t id = reader.optional_integer(key, std::nullopt, -vocab_size, vocab_size - 1).value_or(-vocab_size - 1);
  return id < -vocab_size ? -1 : (id < 0 ? vocab_size + id : id);
}

void read_activation(ModelConfig& c, const ConfigReader& reader, const Family& family) {
  c.activation = family.is_gemma ? Activation::GeGluTanh : Activation::SwiGlu;
  const char* key = family.is_gemma ? "hidden_activation" : "hidden_act";
  const std::string legal = family.is_gemma ? "gelu_pytorch_tanh" : "silu";
  const std::string name = reader.text(key, legal);
  if (name == legal || (legal == "silu" && name == "swish")) return;
  reader.refuse(key, "only \"{}\" is supported for {}", legal, family.model_type);
}

/// transformers 5 reads `tie_word_embeddings` of a vision-language model at the top level, and 4 in text_config.
void read_head(ModelConfig& c, const ConfigReader& top, const ConfigReader& reader, const Family& family) {
  const char* tie = "tie_word_embeddings";
  c.tie_word_embeddings = (top.find(tie) ? top : reader).boolean(tie, family.defaults.tie_word_embeddings);
  c.pad_token_id = read_pad_token(reader, family, c.vocab_size);
  c.initializer_range = reader.number("initializer_range", 0.02, 0, 1);
  c.norm_eps = reader.number(family.norm_eps_key, family.defaults.norm_eps, 0, 1);
  if (family.logit_scale != 0) {
    c.logit_scale = reader.number("logit_scale", family.logit_scale, 0, kMaxMultiplier, true);
  }
  if (family.has_multipliers) {
    c.embed_scale = reader.number("embedding_multiplier", 1, 0, kMaxMultiplier, true);
    c.residual_multiplier = reader.number("residual_multiplier", 1, kMinMultiplier, kMaxMultiplier);
    c.logit_scale = 1 / reader.number("logits_scaling", 1, kMinMultiplier, kMaxMultiplier);
  }
  if (!family.is_gemma) return;
  c.embed_scale = std::sqrt(static_cast<double>(c.hidden_size));
  const auto cap = family.final_softcap ? std::optional<double>(family.final_softcap) : std::nullopt;
  c.final_softcap = reader.optional_number("final_logit_softcapping", cap, 0, kMaxMultiplier, true).value_or(0);
}

void read_attention(ModelConfig& c, const ConfigReader& reader, const Family& family) {
  const auto biased = [&](BiasRule rule) {
    switch (rule) {
      case BiasRule::Never:
        return false;
      case BiasRule::Always:
        return true;
      case BiasRule::AttentionBiasKey:
        return reader.boolean("attention_bias", family.defaults.attention_bias);
      case BiasRule::QkvBiasKey:
        return reader.boolean("qkv_bias", true);
    }
    return false;
  };
  c.qkv_bias = biased(family.qkv_bias);
  c.o_bias = biased(family.o_bias);
  c.mlp_bias = family.has_mlp_bias_key && reader.boolean("mlp_bias", false);
  if (family.has_qk_norm_key && !reader.boolean("use_qk_norm", false)) c.qk_norm = QkNorm::None;
  c.has_sinks = family.has_sinks;
  c.attention_scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  if (family.is_gemma) {
    const int64_t scalar = reader.integer("query_pre_attn_scalar", kGemmaQueryScalar, 1, kMaxWidth, true);
    c.attention_scale = 1 / std::sqrt(static_cast<double>(scalar));
  }
  if (family.has_multipliers) {
    c.attention_scale = reader.number("attention_multiplier", 1, 0, kMaxMultiplier, true);
  }
  if (family.has_attention_softcap_key) {
    c.attention_softcap =
        reader.optional_number("attn_logit_softcapping", family.attention_softcap, 0, kMaxMultiplier, true).value_or(0);
  }
}

// ---- layers

/// W where the keys allow a window; 0 = none.
int64_t read_window(const ConfigReader& reader, const Family& family) {
  if (family.windows == WindowRule::Never) return 0;
  const bool uses = reader.boolean("use_sliding_window", !family.has_use_sliding_window_key);
  if (family.has_use_sliding_window_key && !uses) return 0;
  const int64_t fallback = family.defaults.sliding_window;
  const int64_t window =
      reader
          .optional_integer("sliding_window", fallback ? std::optional<int64_t>(fallback) : std::nullopt, 1,
                            kMaxPositions)
          .value_or(0);
  if (window > 0 && !uses)
    reader.refuse("use_sliding_window", "transformers ignores it for {}: set sliding_window to null",
                  family.model_type);
  return window;
}

std::vector<bool> derive_sliding(const ConfigReader& reader, const Family& family, const ModelConfig& c,
                                 int64_t window) {
  std::vector<bool> sliding(c.layers.size(), false);
  int64_t period = family.window_period;
  if (family.has_window_period_key) period = reader.integer("sliding_window_pattern", period, 1, kMaxLayers);
  const int64_t late = family.windows == WindowRule::LateLayers
                           ? reader.integer("max_window_layers", family.max_window_layers, 0, kMaxPositions)
                           : 0;
  for (size_t l = 0; l < sliding.size(); l++) {
    const int64_t layer = static_cast<int64_t>(l);
    switch (family.windows) {
      case WindowRule::Never:
        break;
      case WindowRule::EveryLayer:
        sliding[l] = window > 0;
        break;
      case WindowRule::LateLayers:
        sliding[l] = window > 0 && layer >= late;
        break;
      case WindowRule::PeriodicPattern:
        sliding[l] = (layer + 1) % period != 0;
        break;
      case WindowRule::NopeLayers:
        sliding[l] = window > 0 && c.layers[l].rope < 0;
        break;
    }
  }
  return sliding;
}

enum class LayerType { Full, Sliding, Chunked };

/// `layer_types` as given; empty when absent.
std::vector<LayerType> read_layer_types(const ConfigReader& reader, int64_t num_layers) {
  const char* key = "layer_types";
  const json* list = reader.find(key);
  if (!list || list->is_null()) return {};
  if (!list->is_array() || list->size() != static_cast<size_t>(num_layers)) {
    reader.refuse(key, "expected a list of {} layer types, one for each of num_hidden_layers", num_layers);
  }
  std::vector<LayerType> types;
  for (const json& type : *list) {
    const std::string name = type.is_string() ? type.get<std::string>() : "";
    if (name != "full_attention" && name != "sliding_attention" && name != "chunked_attention") {
      reader.refuse(
          key,
          "layer {} is {}; only full_attention, sliding_attention and chunked_attention are supported, not layers "
          "that mix tokens by recurrence, linear attention or convolution",
          types.size(), ConfigReader::shown(type));
    }
    types.push_back(name == "full_attention"      ? LayerType::Full
                    : name == "sliding_attention" ? LayerType::Sliding
                                                  : LayerType::Chunked);
  }
  return types;
}

/// no_rope_layers[l]: 1 = the layer HAS a rotary embedding.
void read_nope_layers(ModelConfig& c, const ConfigReader& reader) {
  const char* key = "no_rope_layers";
  const int64_t interval = reader.integer("no_rope_layer_interval", 4, 1, kMaxPositions);
  const json* list = reader.find(key);
  const bool given = list && !list->is_null();
  if (given && (!list->is_array() || list->size() < c.layers.size())) {
    reader.refuse(key, "expected a list of {} numbers, one for each of num_hidden_layers", c.layers.size());
  }
  for (size_t l = 0; l < c.layers.size(); l++) {
    bool has_rope = (static_cast<int64_t>(l) + 1) % interval != 0;
    if (given) {
      const json& flag = (*list)[l];
      if (!flag.is_number_integer() || (flag != 0 && flag != 1))
        reader.refuse(key, "element {} is {}, expected 1 (the layer has a rotary embedding) or 0", l,
                      ConfigReader::shown(flag));
      has_rope = flag == 1;
    }
    c.layers[l].rope = has_rope ? 0 : -1;
  }
}

/// attention_chunk_size, for a layer that needs it.
int64_t read_chunk(const ConfigReader& reader, const Family& family, size_t layer) {
  if (family.local_rope_theta || family.rotates_only_in_windows) {
    reader.refuse("layer_types", "layer {} is chunked_attention, and {} has no rotary embedding for such a layer",
                  layer, family.model_type);
  }
  const char* key = "attention_chunk_size";
  if (!reader.find(key)) reader.refuse(key, "layer {} is a chunked_attention layer and needs its tokens", layer);
  return reader.integer(key, 0, 1, kMaxPositions);
}

void read_layers(ModelConfig& c, const ConfigReader& reader, const Family& family) {
  c.layers.resize(static_cast<size_t>(c.num_layers));
  if (family.has_nope_layers) read_nope_layers(c, reader);
  const int64_t window = read_window(reader, family);
  std::vector<LayerType> types;
  for (const bool is_sliding : derive_sliding(reader, family, c, window)) {
    types.push_back(is_sliding ? LayerType::Sliding : LayerType::Full);
  }
  const std::vector<LayerType> given = read_layer_types(reader, c.num_layers);
  const bool heeds_types = family.windows != WindowRule::Never && family.windows != WindowRule::EveryLayer;
  if (!given.empty() && !heeds_types && given != types) {
    reader.refuse("layer_types", "transformers ignores it for {}, whose layers are all alike{}; remove it",
                  family.model_type,
                  family.windows == WindowRule::EveryLayer ? fmt::format(" (sliding_window {})", window) : "");
  }
  if (!given.empty()) types = given;
  for (size_t l = 0; l < c.layers.size(); l++) {
    const bool is_sliding = types[l] == LayerType::Sliding;
    if (is_sliding && window == 0) {
      reader.refuse("sliding_window", "layer {} is a sliding_attention layer and needs a window{}", l,
                    family.has_use_sliding_window_key ? " (and use_sliding_window true)" : "");
    }
    c.layers[l].window = is_sliding ? window : 0;
    if (types[l] == LayerType::Chunked) c.layers[l].chunk = read_chunk(reader, family, l);
    if (family.local_rope_theta) c.layers[l].rope = is_sliding ? 1 : 0;
    if (family.rotates_only_in_windows) c.layers[l].rope = is_sliding ? 0 : -1;
  }
  const json* chunk = reader.find("attention_chunk_size");
  if (chunk && !chunk->is_null() && std::find(types.begin(), types.end(), LayerType::Chunked) == types.end()) {
    reader.refuse("attention_chunk_size", "no layer of layer_types is chunked_attention; remove it, or say which are");
  }
}

}  // namespace

ModelConfig parse_model_config(const json& hf, const std::string& where) {
  const ConfigReader top(hf, where);
  const Family& family = read_family(top);
  check_architecture(top, family);
  const ConfigReader reader = text_reader(top, family);
  refuse_dangerous_keys(reader, family);

  ModelConfig c;
  c.model_type = family.model_type;
  c.architecture = family.architecture;
  c.norm = family.norm;
  c.norms = family.norms;
  c.parallel_block = family.parallel_block;
  c.qk_norm = family.qk_norm;
  c.has_mtp_on_disk = family.has_mtp;
  if (family.has_mla) c.mla = read_mla(reader);
  c.fused_qkv_on_disk = family.fused_qkv_on_disk;
  c.fused_gate_up_on_disk = family.fused_gate_up_on_disk;
  read_sizes(c, reader, family.defaults);
  read_head(c, top, reader, family);
  if (family.vision) read_vision(c, top, *family.vision);
  read_activation(c, reader, family);
  read_attention(c, reader, family);
  read_layers(c, reader, family);
  read_moe(c, reader, family);
  c.ropes = read_ropes(reader, family, c);
  if (c.mla) {
    const RopeConfig& rope = c.ropes.front();
    if (rope.type != "default" && rope.mscale_all_dim.value_or(0) != 0) {
      const double temperature = yarn_temperature(rope.factor.value_or(1), *rope.mscale_all_dim);
      c.attention_scale *= temperature * temperature;
    }
  }
  c.hf = hf;
  return c;
}

namespace {

/// transformers 5 may write one tensor for all experts of a layer; what is loaded so is saved so.
bool has_fused_experts(const SafetensorsDirectory& directory) {
  const auto names = directory.names();
  return std::any_of(names.begin(), names.end(),
                     [](const std::string& name) { return name.ends_with(".experts.gate_up_proj"); });
}

bool has_safetensors(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return false;
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    if (std::filesystem::exists(path / name, error)) return true;
  }
  return false;
}

/// What the names of the tensors say of a vision-language model: where its decoder is, and what else there is.
void find_vision(ModelConfig& c, const VisionRules& vision, const SafetensorsDirectory& directory) {
  for (const char* prefix : {"language_model.model.", "model.language_model.", "model."}) {
    if (!directory.contains(std::string(prefix) + "norm.weight")) continue;
    c.names.prefix = prefix;
    break;
  }
  for (const char* head : {"language_model.lm_head.weight", "lm_head.weight"}) {
    if (directory.contains(head)) c.names.lm_head = head;
  }
  for (const std::string& name : directory.names()) {
    if (name.starts_with(c.names.prefix) || name == c.names.lm_head) continue;
    const TensorInfo& info = directory.info(name);
    const std::string file = directory.file_of(name).string();
    CHECK(info.dtype, "{}: {} is {}, which cannot be kept", file, name, info.dtype_name);
    c.vision_tensors.push_back({name, *info.dtype, info.shape});
  }
  CHECK(!c.vision_tensors.empty(),
        "{}: its config.json is a {}, but it holds tensors of text only; write a config.json of model_type {} with the "
        "keys of text_config",
        directory.file_of(directory.names().front()).parent_path().string(), c.model_type, vision.text_family);
}

/// What no config.json says, but the tensors of the checkpoint.
void look_at_tensors(ModelConfig& c, const Family& family, const SafetensorsDirectory& directory) {
  if (family.vision) find_vision(c, *family.vision, directory);
  if (!c.moe) return;
  if (!family.moe->is_fused) {
    c.moe.is_fused_on_disk = has_fused_experts(directory);
    return;
  }
  // (E, C, 2F) as published; (E, 2F, C) where transformers 5 has saved it
  const auto layer = std::find_if(c.layers.begin(), c.layers.end(), [](const LayerConfig& l) { return l.is_moe; });
  const std::string name =
      fmt::format("{}layers.{}.mlp.experts.gate_up_proj", c.names.prefix, layer - c.layers.begin());
  const std::vector<int64_t> out_in = {c.moe.router.num_experts, 2 * c.moe.intermediate_size, c.hidden_size};
  if (directory.contains(name) && directory.info(name).shape == out_in) c.moe.layout = WeightLayout::OutIn;
}

}  // namespace

nlohmann::json& text_part(const ModelConfig& config, nlohmann::json& hf) {
  const auto text = hf.find("text_config");
  return config.has_vision && text != hf.end() && text->is_object() ? *text : hf;
}

ModelConfig load_model_config(const std::filesystem::path& path) {
  std::error_code error;
  const auto file = std::filesystem::is_directory(path, error) ? path / "config.json" : path;
  CHECK(std::filesystem::exists(file, error),
        "{}: there is no such file; model.path must be a Hugging Face checkpoint directory or its config.json",
        file.string());
  ModelConfig config = parse_model_config(parse_json(read_file(file, kMaxFileBytes), file.string()), file.string());
  const Family& family = *find_family(config.model_type);
  const bool may_differ = config.has_vision || (config.moe && !family.moe->is_gpt_oss);
  if (may_differ && has_safetensors(path)) look_at_tensors(config, family, SafetensorsDirectory(path));
  return config;
}
