// The parameters of a model: what exists in memory, and what each piece is called on disk.
#pragma once

#include <string>
#include <vector>

#include "layers/core/tensor.h"
#include "llama/config.h"

/// A tensor of the checkpoint that is a contiguous range of a parameter: q_proj is the first rows of the fused qkv.
struct DiskTensor {
  std::string hf_name;  ///< "model.layers.0.self_attn.q_proj.weight"
  Shape shape;          ///< as on disk
  int64_t offset = 0;   ///< first element within the parameter
};

enum class Init { Normal, Zero, One };  ///< N(0, initializer_range), 0, 1

/// One parameter in memory. q, k, v (and gate, up) are one parameter, so that one GEMM makes them, whatever the disk
/// has.
struct ParamSpec {
  std::string name;  ///< within its unit: "qkv_proj.weight"
  Shape shape;
  Init init = Init::Normal;
  std::vector<DiskTensor> disk;  ///< covers the parameter exactly, in order
};

/// What is gathered, used and released together (ZeRO-3): the embedding, each block, the head.
struct ParamUnit {
  std::string name;  ///< "embedding", "block 3", "head"
  std::vector<ParamSpec> params;
};

/// Units in the order of the forward pass: embedding, blocks 0 .. L-1, head (final norm, and lm_head unless tied).
std::vector<ParamUnit> param_units(const ModelConfig& config);

/// In-memory names of a unit's parameters, for those who look one up.
namespace param_name {
inline constexpr const char* kEmbedding = "embed_tokens.weight";   // (V, C)
inline constexpr const char* kAttnInNorm = "attn_in_norm.weight";  // (C)
inline constexpr const char* kQkv = "qkv_proj.weight";             // (q_dim + 2 kv_dim, C): q, k, v rows
inline constexpr const char* kQkvBias = "qkv_proj.bias";
inline constexpr const char* kQNorm = "q_norm.weight";  // (HD) or (q_dim)
inline constexpr const char* kKNorm = "k_norm.weight";  // (HD) or (kv_dim)
// Of latent attention, instead of qkv
inline constexpr const char* kQA = "q_a_proj.weight";  // (LQ, C)
inline constexpr const char* kQABias = "q_a_proj.bias";
inline constexpr const char* kQANorm = "q_a_norm.weight";  // (LQ)
inline constexpr const char* kQB = "q_b_proj.weight";      // (q_dim, LQ); (q_dim, C) without a latent of q
inline constexpr const char* kKvA = "kv_a_proj.weight";    // (LK + dr, C)
inline constexpr const char* kKvABias = "kv_a_proj.bias";
inline constexpr const char* kKvANorm = "kv_a_norm.weight";  // (LK)
inline constexpr const char* kKvB = "kv_b_proj.weight";      // (NH (dn + dv), LK)
inline constexpr const char* kO = "o_proj.weight";           // (C, o_dim)
inline constexpr const char* kOBias = "o_proj.bias";
inline constexpr const char* kSinks = "sinks";  // (NH)
inline constexpr const char* kAttnOutNorm = "attn_out_norm.weight";
inline constexpr const char* kMlpInNorm = "mlp_in_norm.weight";
inline constexpr const char* kGateUp = "gate_up_proj.weight";  // (2F, C): gate, up rows
inline constexpr const char* kGateUpBias = "gate_up_proj.bias";
inline constexpr const char* kDown = "down_proj.weight";  // (C, F)
inline constexpr const char* kDownBias = "down_proj.bias";
// Of a mixture of experts; the shared expert has the names of an MLP.
inline constexpr const char* kRouter = "router.weight";  // (E, C)
inline constexpr const char* kRouterBias = "router.bias";
inline constexpr const char* kExpertsGateUp = "experts.gate_up_proj";  // (E, 2F, C): gate, up rows; or (E, C, 2F)
inline constexpr const char* kExpertsGateUpBias = "experts.gate_up_proj_bias";  // (E, 2F)
inline constexpr const char* kExpertsDown = "experts.down_proj";                // (E, C, F), or (E, F, C)
inline constexpr const char* kExpertsDownBias = "experts.down_proj_bias";       // (E, C)
inline constexpr const char* kSharedGate = "shared_expert_gate.weight";         // (1, C)
inline constexpr const char* kMlpOutNorm = "mlp_out_norm.weight";
inline constexpr const char* kFinalNorm = "final_norm.weight";
inline constexpr const char* kLmHead = "lm_head.weight";  // (V, C)
}  // namespace param_name

/// Of a layer beyond num_layers that predicts further tokens: not trained, not saved (DeepSeek-V3, GLM-4-MoE).
bool is_mtp_tensor(const ModelConfig& config, const std::string& hf_name);

/// Tensors that a checkpoint may hold though the model has no such parameter: "rotary_emb.inv_freq" buffers of old
/// checkpoints, a lm_head.weight that repeats a tied embedding, is_mtp_tensor. Anything else is an error.
bool is_harmless_extra_tensor(const ModelConfig& config, const std::string& hf_name);
