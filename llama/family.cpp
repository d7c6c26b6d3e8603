// The table of families (defaults as in transformers 5.24), and the model_types that are refused with a reason.
#include "llama/family.h"

#include <algorithm>
#include <array>

namespace {

constexpr int64_t k128k = 131072;

const std::array<Family, 9>& families() {
  static const std::array<Family, 9> table = {{
      {.model_type = "llama",
       .architecture = "LlamaForCausalLM",
       .defaults = {.vocab_size = 32000,
                    .hidden_size = 4096,
                    .intermediate_size = 11008,
                    .num_layers = 32,
                    .num_heads = 32,
                    .max_position_embeddings = 2048,
                    .norm_eps = 1e-6,
                    .rope_theta = 1e4},
       .has_mlp_bias_key = true},
      {.model_type = "mistral",
       .architecture = "MistralForCausalLM",
       .defaults = {.vocab_size = 32000,
                    .hidden_size = 4096,
                    .intermediate_size = 14336,
                    .num_layers = 32,
                    .num_heads = 32,
                    .num_kv_heads = 8,
                    .max_position_embeddings = k128k,
                    .norm_eps = 1e-6,
                    .rope_theta = 1e4,
                    .sliding_window = 4096},
       .qkv_bias = BiasRule::Never,
       .o_bias = BiasRule::Never,
       .windows = WindowRule::EveryLayer},
      {.model_type = "qwen2",
       .architecture = "Qwen2ForCausalLM",
       .defaults = {.vocab_size = 151936,
                    .hidden_size = 4096,
                    .intermediate_size = 22016,
                    .num_layers = 32,
                    .num_heads = 32,
                    .num_kv_heads = 32,
                    .max_position_embeddings = 32768,
                    .norm_eps = 1e-6,
                    .rope_theta = 1e4,
                    .sliding_window = 4096},
       .qkv_bias = BiasRule::Always,
       .o_bias = BiasRule::Never,
       .windows = WindowRule::LateLayers,
       .has_use_sliding_window_key = true},
      {.model_type = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .defaults = {.vocab_size = 151936,
                    .hidden_size = 4096,
                    .intermediate_size = 22016,
                    .num_layers = 32,
                    .num_heads = 32,
                    .num_kv_heads = 32,
                    .head_dim = 128,
                    .max_position_embeddings = 32768,
                    .norm_eps = 1e-6,
                    .rope_theta = 1e4,
                    .sliding_window = 4096},
       .qk_norm = QkNorm::PerHead,
       .windows = WindowRule::LateLayers,
       .has_use_sliding_window_key = true},
      {.model_type = "smollm3",
       .architecture = "SmolLM3ForCausalLM",
       .defaults = {.vocab_size = 128256,
                    .hidden_size = 2048,
                    .intermediate_size = 11008,
                    .num_layers = 36,
                    .num_heads = 16,
                    .num_kv_heads = 4,
                    .max_position_embeddings = 32768,
                    .norm_eps = 1e-6,
                    .rope_theta = 2e6,
                    .tie_word_embeddings = true,
                    .pad_token_id = 128004},
       .has_mlp_bias_key = true,
       .windows = WindowRule::NopeLayers,
       .has_use_sliding_window_key = true,
       .has_nope_layers = true},
      {.model_type = "olmo2",
       .architecture = "Olmo2ForCausalLM",
       .defaults = {.vocab_size = 50304,
                    .hidden_size = 4096,
                    .intermediate_size = 11008,
                    .num_layers = 32,
                    .num_heads = 32,
                    .max_position_embeddings = 2048,
                    .norm_eps = 1e-5,
                    .rope_theta = 1e4,
                    .pad_token_id = 1},
       .norm = NormKind::LateCast,
       .norms = {.attn_in = "",
                 .attn_out = "post_attention_layernorm",
                 .mlp_in = "",
                 .mlp_out = "post_feedforward_layernorm"},
       .qk_norm = QkNorm::Full,
       .rope_types = {"default", "linear", "dynamic"},
       .rope_scaling_keys = RopeScalingKeys::TypeAndFactor},
      {.model_type = "phi3",
       .architecture = "Phi3ForCausalLM",
       .defaults = {.vocab_size = 32064,
                    .hidden_size = 3072,
                    .intermediate_size = 8192,
                    .num_layers = 32,
                    .num_heads = 32,
                    .max_position_embeddings = 4096,
                    .norm_eps = 1e-5,
                    .rope_theta = 1e4,
                    .pad_token_id = 32000},
       .qkv_bias = BiasRule::Never,
       .o_bias = BiasRule::Never,
       .windows = WindowRule::EveryLayer,
       .rope_types = {"default", "longrope"},
       .rope_scaling_keys = RopeScalingKeys::TypeAndLists,
       .rotates_partially = true,
       .original_max_position_embeddings = 4096,
       .fused_on_disk = true},
      {.model_type = "gemma2",
       .architecture = "Gemma2ForCausalLM",
       .defaults = {.vocab_size = 256000,
                    .hidden_size = 2304,
                    .intermediate_size = 9216,
                    .num_layers = 26,
                    .num_heads = 8,
                    .num_kv_heads = 4,
                    .head_dim = 256,
                    .max_position_embeddings = 8192,
                    .norm_eps = 1e-6,
                    .rope_theta = 1e4,
                    .tie_word_embeddings = true,
                    .pad_token_id = 0,
                    .sliding_window = 4096},
       .norm = NormKind::OnePlus,
       .norms = {.attn_in = "input_layernorm",
                 .attn_out = "post_attention_layernorm",
                 .mlp_in = "pre_feedforward_layernorm",
                 .mlp_out = "post_feedforward_layernorm"},
       .windows = WindowRule::PeriodicPattern,
       .window_period = 2,
       .is_gemma = true,
       .attention_softcap = 50,
       .final_softcap = 30,
       .has_attention_softcap_key = true},
      {.model_type = "gemma3_text",
       .architecture = "Gemma3ForCausalLM",
       .defaults = {.vocab_size = 262208,
                    .hidden_size = 2304,
                    .intermediate_size = 9216,
                    .num_layers = 26,
                    .num_heads = 8,
                    .num_kv_heads = 4,
                    .head_dim = 256,
                    .max_position_embeddings = k128k,
                    .norm_eps = 1e-6,
                    .rope_theta = 1e6,
                    .tie_word_embeddings = true,
                    .pad_token_id = 0,
                    .sliding_window = 4096},
       .norm = NormKind::OnePlus,
       .norms = {.attn_in = "input_layernorm",
                 .attn_out = "post_attention_layernorm",
                 .mlp_in = "pre_feedforward_layernorm",
                 .mlp_out = "post_feedforward_layernorm"},
       .qk_norm = QkNorm::PerHead,
       .windows = WindowRule::PeriodicPattern,
       .window_period = 6,
       .has_window_period_key = true,
       .rope_types = {"default", "linear", "dynamic", "llama3", "yarn"},
       .local_rope_theta = 1e4,
       .is_gemma = true},
  }};
  return table;
}

// Layers that mix tokens by recurrence, linear attention or convolution, in some or all layers.
constexpr std::array<std::string_view, 34> kRecurrent = {"bailing_hybrid",
                                                         "bamba",
                                                         "falcon_h1",
                                                         "falcon_mamba",
                                                         "granitemoehybrid",
                                                         "jamba",
                                                         "kimi_linear",
                                                         "lfm2",
                                                         "lfm2_moe",
                                                         "lfm2_vl",
                                                         "lfm3",
                                                         "mamba",
                                                         "mamba2",
                                                         "minimax",
                                                         "minimax_text_01",
                                                         "nemotron_h",
                                                         "olmo_hybrid",
                                                         "plamo2",
                                                         "qwen3_5",
                                                         "qwen3_5_moe",
                                                         "qwen3_5_moe_text",
                                                         "qwen3_5_text",
                                                         "qwen3_next",
                                                         "recurrent_gemma",
                                                         "retnet",
                                                         "rwkv",
                                                         "rwkv5",
                                                         "rwkv6",
                                                         "rwkv7",
                                                         "stripedhyena",
                                                         "xlstm",
                                                         "zamba",
                                                         "zamba2",
                                                         "zaya"};

// Text models inside a model of images, sound or video.
constexpr std::array<std::string_view, 30> kMultimodal = {
    "aria",         "aya_vision", "gemma3",      "gemma3n",         "gemma4",   "glm4v",
    "glm4v_moe",    "idefics2",   "idefics3",    "internvl",        "janus",    "kimi_vl",
    "llama4",       "llava",      "llava_next",  "llava_onevision", "mistral3", "mllama",
    "moshi",        "paligemma",  "phi3_v",      "phi4_multimodal", "phi4mm",   "pixtral",
    "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl",        "qwen3_vl", "smolvlm"};

template <size_t N>
bool contains(const std::array<std::string_view, N>& list, std::string_view name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

}  // namespace

const Family* find_family(std::string_view model_type) {
  const auto& table = families();
  const auto it = std::find_if(table.begin(), table.end(), [&](const Family& f) { return f.model_type == model_type; });
  return it == table.end() ? nullptr : &*it;
}

std::string supported_families() {
  std::string names;
  for (const Family& f : families()) names += (names.empty() ? "" : ", ") + std::string(f.model_type);
  return names;
}

std::string refusal_of(std::string_view model_type) {
  if (contains(kRecurrent, model_type)) {
    return "it has layers that mix tokens by recurrence, linear attention or convolution (as Mamba, RWKV and LFM2 do); "
           "this trainer knows attention only, which is what it can split over documents and sequence shards";
  }
  if (contains(kMultimodal, model_type)) {
    return "it takes images, sound or video; use a text-only checkpoint of the family (for gemma3: one whose "
           "model_type is gemma3_text)";
  }
  return "";
}
