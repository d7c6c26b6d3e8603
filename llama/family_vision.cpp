// Vision-language models as rows of the table of families: the row of the text family with the same decoder, with the
// defaults of the model (transformers 5.24). Their text part is trained on text; what sees is kept as it is.
#include <algorithm>

#include "layers/core/check.h"
#include "llama/family.h"

namespace {

const DecoderNames kBeforeModel = {.prefix = "language_model.model.", .lm_head = "language_model.lm_head.weight"};
const DecoderNames kInModel = {.prefix = "model.language_model.", .lm_head = "lm_head.weight"};

Family row_of(const std::vector<Family>& families, std::string_view model_type) {
  const auto it =
      std::find_if(families.begin(), families.end(), [&](const Family& f) { return f.model_type == model_type; });
  CHECK(it != families.end(), "no family is called \"{}\"", model_type);
  return *it;
}

Family gemma3(const std::vector<Family>& families) {
  Family f = row_of(families, "gemma3_text");
  f.model_type = "gemma3", f.architecture = "Gemma3ForConditionalGeneration";
  f.vision = VisionRules{.text_family = "gemma3_text",
                         .text_type = "gemma3_text",
                         .mrope_section = {},
                         .image_token_key = "image_token_index",
                         .image_token = 262144,
                         .video_token = std::nullopt,
                         .names = kBeforeModel};
  return f;
}

/// Qwen2-VL and Qwen2.5-VL have one text part, a Qwen2.
Family qwen2_vl(const std::vector<Family>& families, const char* model_type, const char* architecture,
                const char* text_type) {
  Family f = row_of(families, "qwen2");
  f.model_type = model_type, f.architecture = architecture;
  f.defaults = {.vocab_size = 152064,
                .hidden_size = 8192,
                .intermediate_size = 29568,
                .num_layers = 80,
                .num_heads = 64,
                .num_kv_heads = 8,
                .max_position_embeddings = 32768,
                .norm_eps = 1e-5,
                .rope_theta = 1e6,
                .sliding_window = 4096};
  f.max_window_layers = 80;
  f.rope_types = {"default", "linear", "llama3", "yarn"};
  f.vision = VisionRules{.text_family = "qwen2",
                         .text_type = text_type,
                         .may_be_flat = true,
                         .mrope_section = {16, 24, 24},
                         .image_token_key = "image_token_id",
                         .image_token = 151655,
                         .video_token = 151656,
                         .names = {}};
  return f;
}

/// `text_family`: qwen3 or qwen3_moe.
Family qwen3_vl(const std::vector<Family>& families, const char* text_family) {
  Family f = row_of(families, text_family);
  f.model_type = "qwen3_vl", f.architecture = "Qwen3VLForConditionalGeneration";
  f.defaults.max_position_embeddings = 128000;
  f.defaults.rope_theta = 5e5;
  f.windows = WindowRule::Never, f.has_use_sliding_window_key = false;
  f.rope_types = {"default", "linear", "llama3", "yarn"};
  f.vision = VisionRules{.text_family = text_family,
                         .text_type = "qwen3_vl_text",
                         .mrope_section = {24, 20, 20},
                         .image_token_key = "image_token_id",
                         .image_token = 151655,
                         .video_token = 151656,
                         .names = kInModel};
  return f;
}

Family qwen3_vl_moe(const std::vector<Family>& families) {
  Family f = qwen3_vl(families, "qwen3_moe");
  f.model_type = "qwen3_vl_moe", f.architecture = "Qwen3VLMoeForConditionalGeneration";
  f.vision->text_type = "qwen3_vl_moe_text";
  f.defaults.intermediate_size = 5632;
  f.defaults.num_heads = f.defaults.num_kv_heads = 16;
  MoeRules& moe = *f.moe;
  moe.num_experts = 60, moe.top_k = 4, moe.width = 1408;
  moe.has_norm_topk_key = false;  // the weights of the experts of a token always add up to 1
  moe.is_fused = true;
  return f;
}

}  // namespace

std::vector<Family> vision_language_families(const std::vector<Family>& text_families) {
  return {gemma3(text_families),
          qwen2_vl(text_families, "qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
          qwen2_vl(text_families, "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
          qwen3_vl(text_families, "qwen3"), qwen3_vl_moe(text_families)};
}
