// ModelConfig: what a checkpoint is, as knobs; read from a Hugging Face config.json. One decoder runs every family:
// nothing outside config.cpp and params.cpp asks for a model_type.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "layers/gated_act.h"
#include "layers/grouped_linear.h"
#include "layers/moe.h"
#include "layers/rmsnorm.h"

enum class QkNorm { None, PerHead, Full };  ///< RMSNorm of q and k: per head (HD), or over the whole projection
enum class Activation { SwiGlu, GeGluTanh };
enum class RopePairing { HalfSplit, Interleaved };  ///< rotated pairs: (m, m + r/2), or (2m, 2m + 1)

/// One rotary table: how inv_freq is made (Hugging Face `rope_scaling` / `rope_parameters`).
struct RopeConfig {
  std::string type = "default";  ///< default | linear | dynamic | llama3 | yarn | longrope
  double theta = 1e4;
  int64_t rotary_dim = 0;  ///< r: the first r of HD dimensions rotate
  RopePairing pairing = RopePairing::HalfSplit;
  int64_t max_position_embeddings = 0;           ///< P
  int64_t original_max_position_embeddings = 0;  ///< O (llama3, yarn, longrope)
  std::optional<double> factor = std::nullopt;
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn
  bool truncate = true;                              // yarn
  std::optional<double> attention_factor = std::nullopt, mscale = std::nullopt, mscale_all_dim = std::nullopt;
  std::vector<double> short_factor = {}, long_factor = {};  // longrope, (r/2) each
  /// `mrope_section`, `mrope_interleaved`: which of the three positions in an image each pair rotates by. A token of
  /// text has one position thrice, so that they change nothing; they are carried along.
  nlohmann::json mrope = nlohmann::json::object();

  /// Whether inv_freq depends on the longest document of the batch (dynamic, longrope).
  bool depends_on_length() const { return type == "dynamic" || type == "longrope"; }
};

struct RopeTable {
  std::vector<float> inv_freq;  ///< (r/2)
  double attention_factor = 1;  ///< multiplies cos and sin
};

/// yarn: 0.1 m ln(factor) + 1, or 1 where nothing is stretched.
double yarn_temperature(double factor, double mscale);

/// The table for a batch whose longest document has `max_document_tokens` tokens (max(position) + 1).
RopeTable make_rope_table(const RopeConfig& rope, int64_t max_document_tokens);

struct LayerConfig {
  int64_t window = 0;  ///< W: token i sees j with 0 <= i - j < W; 0 = all
  int64_t chunk = 0;   ///< token i sees j <= i of the same chunk of so many tokens of its document; 0 = all (Llama 4)
  int rope = 0;        ///< index into ModelConfig::ropes; -1 = no rotary embedding (NoPE)
  bool is_moe = false;
};

/// Hugging Face names of a mixture of experts, below "model.layers.N.".
struct MoeNames {
  std::string router = "mlp.gate", experts = "mlp.experts";
  std::string gate = "gate_proj", up = "up_proj", down = "down_proj";  ///< of one expert, below experts.E
  std::string shared = "", shared_gate = "";
};

/// A mixture of experts: what its layers have in common.
struct MoeConfig {
  RouterShape router;                    ///< E = 0: the model has none
  int64_t intermediate_size = 0;         ///< of an expert
  int64_t shared_intermediate_size = 0;  ///< of the expert that all tokens have; 0 = none
  bool has_shared_gate = false, has_select_bias = false;
  bool has_biases = false;  ///< of the router and of the experts
  Gate gate = GateKind::Silu;
  double balance_coef = 0;  ///< of the load-balancing loss; 0 = none

  // On disk
  MoeNames names;
  bool is_fused_on_disk = false;  ///< one tensor for all experts
  WeightLayout layout = WeightLayout::OutIn;

  explicit operator bool() const { return router.num_experts > 0; }
};

/// Hugging Face names of a block's norms below "model.layers.N."; empty = the block has no such norm.
struct BlockNormNames {
  std::string attn_in, attn_out, mlp_in, mlp_out;
};

/// Latent attention (DeepSeek-V3): see mla_block.h. head_dim is nope + rope, and every query head has a kv head.
struct MlaConfig {
  int64_t q_lora_rank = 0, kv_lora_rank = 0;  ///< widths of the latents; q 0 = none; kv 0 = plain attention
  int64_t nope = 0, rope = 0, v = 0;          ///< widths of a head: without position, that rotates, of v
  explicit operator bool() const { return kv_lora_rank > 0; }
};

/// Where a checkpoint has its decoder. A vision-language model has it below a prefix of its own, or several, by age.
struct DecoderNames {
  std::string prefix = "model.";           ///< of embed_tokens, layers and norm
  std::string lm_head = "lm_head.weight";  ///< the whole name
  std::string embedding() const { return prefix + "embed_tokens.weight"; }
};

struct ModelConfig {
  std::string model_type;    ///< "llama", for messages and for saving
  std::string architecture;  ///< "LlamaForCausalLM"

  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, num_layers = 0;  // V, C, F, L
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;                           // NH, NKV, HD
  int64_t max_position_embeddings = 0;

  // Embedding and head
  bool tie_word_embeddings = false;
  double embed_scale = 1;     ///< multiplies the lookup only (Gemma, Granite)
  double logit_scale = 1;     ///< multiplies the logits, before the softcap (Cohere2, Granite)
  double final_softcap = 0;   ///< cap * tanh(z / cap) on the logits; 0 = none
  int64_t pad_token_id = -1;  ///< nn.Embedding(padding_idx): its lookup has no gradient; -1 = none
  double initializer_range = 0.02;

  // Norms. A residual branch is h += r out_norm(f(in_norm(h))) with the norms that exist.
  NormKind norm = NormKind::Plain;
  double norm_eps = 1e-6;
  BlockNormNames norms;
  bool parallel_block = false;  ///< h += A(x) + M(x), x = attn_in norm of h; its only norm (Cohere2)

  /// r (Granite). Where every branch norms its input, r costs nothing: the stream holds h / r, to which a branch is
  /// added as it is, and in_norm(h) = in_norm(h / r) with eps / r^2. Exact, but that h is rounded at another place.
  double residual_multiplier = 1;
  double stream_scale() const { return embed_scale / residual_multiplier; }  ///< multiplies the lookup
  double stream_eps() const { return norm_eps / (residual_multiplier * residual_multiplier); }  ///< of input norms

  // Attention
  QkNorm qk_norm = QkNorm::None;
  bool qkv_bias = false, o_bias = false;
  double attention_scale = 0;    ///< multiplies q . k
  double attention_softcap = 0;  ///< cap * tanh(s / cap) on the scores; 0 = none
  MlaConfig mla;
  bool has_sinks = false;  ///< a logit of each query head that takes part in its softmax
  std::vector<RopeConfig> ropes;
  std::vector<LayerConfig> layers;  ///< (L)

  // MLP
  Activation activation = Activation::SwiGlu;
  bool mlp_bias = false;
  MoeConfig moe;

  // On disk
  bool has_mtp_on_disk = false;  ///< tensors of layers beyond num_layers, which predict further tokens, are left out
  bool fused_qkv_on_disk = false, fused_gate_up_on_disk = false;  ///< Phi-3; GLM the second only
  DecoderNames names;

  // Of a vision-language model, whose text part is what is trained
  bool has_vision = false;
  std::vector<TensorToWrite> vision_tensors;  ///< all tensors but the decoder's; known where there is a checkpoint
  std::vector<int64_t> image_tokens;          ///< ids in whose place stand features of images and videos

  nlohmann::json hf;  ///< config.json as read: whatever is not a knob is carried into the saved one

  int64_t q_dim() const { return num_heads * head_dim; }
  int64_t o_dim() const { return mla ? num_heads * mla.v : q_dim(); }  ///< what o_proj reads
  int64_t kv_dim() const { return num_kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }
};

/// Reads `path`/config.json (or `path` itself when it is a file). An Error names the file, the key and the remedy; a
/// model_type or knob that is not supported is refused by name, with the list of those that are.
ModelConfig load_model_config(const std::filesystem::path& path);
/// The same from a parsed config.json; `where` is for messages.
ModelConfig parse_model_config(const nlohmann::json& hf, const std::string& where);

/// The part of its config.json `hf` that describes the text model: all of it, or `text_config` where there is vision.
nlohmann::json& text_part(const ModelConfig& config, nlohmann::json& hf);

/// What config.json says in a saved checkpoint: opens with equal logits in transformers 4.57 and 5.24 (both RoPE
/// layouts, both dtype keys, floats as floats). `torch_dtype` is "float32" or "bfloat16".
nlohmann::json config_to_save(const ModelConfig& config, const std::string& torch_dtype);
