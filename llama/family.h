// Families: what a model_type means, as data. One row a family; the code that reads config.json (config.cpp,
// config_rope.cpp) and writes it (config_save.cpp) asks the row, never the name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llama/config.h"

/// Where a projection gets its bias from.
enum class BiasRule { Never, Always, AttentionBiasKey, QkvBiasKey };

/// Which layers have the window when config.json has no `layer_types`.
enum class WindowRule {
  Never,
  EveryLayer,       ///< wherever `sliding_window` is not null; `layer_types` is not read
  LateLayers,       ///< l >= max_window_layers
  PeriodicPattern,  ///< all but each `sliding_window_pattern`-th layer
  NopeLayers,       ///< the layers without rotary embedding
};

/// What the `rope_scaling` of transformers 4 may hold for this family; it refuses every other key.
enum class RopeScalingKeys {
  Any,
  TypeAndFactor,  ///< OLMo2
  TypeAndLists,   ///< Phi-3: short_factor and long_factor; everything else is derived
};

/// Sizes and values that transformers takes for a key that config.json does not have.
struct FamilyDefaults {
  int64_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads;
  int64_t num_kv_heads = 0;  ///< 0 = num_heads
  int64_t head_dim = 0;      ///< 0 = hidden_size / num_heads
  int64_t max_position_embeddings;
  double norm_eps, rope_theta;
  bool tie_word_embeddings = false;
  int64_t pad_token_id = -1;   ///< -1 = null
  int64_t sliding_window = 0;  ///< 0 = null
  bool attention_bias = false;
  double partial_rotary_factor = 1;
};

/// Which layers have experts.
enum class ExpertLayers {
  All,
  SparseStep,  ///< (l + 1) % decoder_sparse_step == 0, but those of mlp_only_layers
  AfterFirst,  ///< l >= first_k_dense_replace
};

/// The expert that all tokens have.
enum class SharedExpert {
  None,
  Gated,    ///< `shared_expert_intermediate_size`
  Counted,  ///< `n_shared_experts` times the width of an expert
};

/// How config.json describes a mixture of experts.
struct MoeRules {
  const char* num_experts_key;
  const char* num_experts_alias = nullptr;  ///< transformers 5 reads it, too
  int64_t num_experts, top_k;               ///< defaults
  const char* width_key = "moe_intermediate_size";
  int64_t width = 0;  ///< default; 0 = intermediate_size
  RouterScore score = RouterScore::SoftmaxSelected;
  bool has_norm_topk_key = false, norm_topk = true;  ///< `norm_topk_prob`, and its default
  bool has_groups = false;  ///< `n_group`, `topk_group`, `routed_scaling_factor`, a bias of the choice
  double scale = 1;         ///< defaults of has_groups
  int64_t num_groups = 1, top_groups = 1;
  ExpertLayers layers = ExpertLayers::All;
  int64_t first_dense = 0;  ///< AfterFirst: the default
  SharedExpert shared = SharedExpert::None;
  int64_t shared_width = 0;      ///< Gated: the default
  bool has_balance_loss = true;  ///< `output_router_logits`, `router_aux_loss_coef`
  bool is_gpt_oss = false;       ///< biases, clamped gate, weights (in, out) of all experts in one tensor
  bool is_fused = false;         ///< all experts in one tensor, (in, out) or (out, in): its shape says
  MoeNames names = {};
};

/// A vision-language model: its row says what the text part is, this what is around it.
struct VisionRules {
  const char* text_family;   ///< the text-only family with the same decoder
  const char* text_type;     ///< `model_type` in text_config
  bool may_be_flat = false;  ///< the keys of text_config may stand at the top level (transformers before 4.52)
  std::vector<int64_t> mrope_section;  ///< default of the key; empty = positions are plain numbers
  const char* image_token_key;         ///< a token in whose place stand features of an image
  int64_t image_token;                 ///< default
  std::optional<int64_t> video_token;  ///< default of `video_token_id`; none = no such key
  DecoderNames names;                  ///< where there is no checkpoint to look at
};

struct Family {
  const char* model_type;
  const char* architecture;
  FamilyDefaults defaults;

  NormKind norm = NormKind::Plain;
  const char* norm_eps_key = "rms_norm_eps";
  bool parallel_block = false;  ///< attention and MLP read the same normed input
  BlockNormNames norms = {
      .attn_in = "input_layernorm", .attn_out = "", .mlp_in = "post_attention_layernorm", .mlp_out = ""};
  QkNorm qk_norm = QkNorm::None;
  BiasRule qkv_bias = BiasRule::AttentionBiasKey, o_bias = BiasRule::AttentionBiasKey;
  bool has_mlp_bias_key = false;

  WindowRule windows = WindowRule::Never;
  bool has_use_sliding_window_key = false;  ///< `sliding_window` counts only where `use_sliding_window` is true
  int64_t window_period = 0;                ///< PeriodicPattern: the default
  int64_t max_window_layers = 28;           ///< LateLayers: the default
  bool has_window_period_key = false;       ///< PeriodicPattern: `sliding_window_pattern` overrides it

  std::vector<std::string_view> rope_types = {"default", "linear", "dynamic", "llama3", "yarn", "longrope"};
  RopeScalingKeys rope_scaling_keys = RopeScalingKeys::Any;
  RopePairing rope_pairing = RopePairing::HalfSplit;
  bool rotates_partially = false;                ///< partial_rotary_factor counts with rope_type "default"
  bool has_nope_layers = false;                  ///< `no_rope_layers`, `no_rope_layer_interval`
  bool rotates_only_in_windows = false;          ///< layers without a window have no rotary embedding
  double local_rope_theta = 0;                   ///< layers with a window have a rotary table of their own; 0 = none
  int64_t original_max_position_embeddings = 0;  ///< default of the top-level key; 0 = no default

  bool is_gemma = false;  ///< GeGLU, scaled embedding, query_pre_attn_scalar, final_logit_softcapping
  double attention_softcap = 0, final_softcap = 0;  ///< defaults; 0 = null
  bool has_attention_softcap_key = false;
  double logit_scale = 0;        ///< default of the key `logit_scale`; 0 = no such key
  bool has_multipliers = false;  ///< `embedding_`, `residual_`, `attention_multiplier`, `logits_scaling`: 1 if absent
  bool fused_qkv_on_disk = false, fused_gate_up_on_disk = false;  ///< qkv_proj, gate_up_proj are single tensors
  bool has_qk_norm_key = false;                                   ///< `use_qk_norm` turns qk_norm on
  bool has_sinks = false;
  bool has_mla = false;                                  ///< DeepSeek-V3
  bool has_mtp = false;                                  ///< checkpoints hold layers that predict further tokens
  std::optional<RopeConfig> scaled_rope = std::nullopt;  ///< where config.json has no scaling of its own
  std::optional<MoeRules> moe = std::nullopt;
  std::optional<VisionRules> vision = std::nullopt;
};

inline constexpr int64_t kGemmaQueryScalar = 256;  ///< default of `query_pre_attn_scalar`

/// Rows of vision-language models, made from those of their text families.
std::vector<Family> vision_language_families(const std::vector<Family>& text_families);

/// The row of `model_type`, or null.
const Family* find_family(std::string_view model_type);

/// "gemma2, gemma3_text, llama, ...".
std::string supported_families();

/// Why a model_type that is known, and not supported, is refused; empty for an unknown one.
std::string refusal_of(std::string_view model_type);
