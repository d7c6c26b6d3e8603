// Vision-language models: where config.json describes the text part, what is carried along, where a checkpoint has its
// decoder, and which tensors are kept as they are.
#include <algorithm>
#include <filesystem>

#include "layers/core/check.h"
#include "llama/config_reader.h"
#include "llama/frozen.h"
#include "test/config_testing.h"
#include "test/files.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// ---- config.json as the Hub has it

/// gemma-3-4b-it: most keys of its text part are absent.
const json kGemma3_4B =
    json::parse(R"json({"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
 "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
 "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
 "model_type": "gemma3_text", "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
 "sliding_window": 1024}, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "vision_config":
 {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
 "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false}})json");

/// Qwen2.5-VL-7B-Instruct: no text_config.
const json kQwen25_VL_7B = json::parse(R"json({"architectures": ["Qwen2_5_VLForConditionalGeneration"],
 "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 151652,
 "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656,
 "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
 "max_position_embeddings": 128000, "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28,
 "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
 "use_cache": true, "use_sliding_window": false, "vision_config": {"depth": 32, "hidden_act": "silu",
 "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584,
 "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
 "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2},
 "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064})json");

/// Qwen3-VL-8B-Instruct.
const json kQwen3_VL_8B = json::parse(R"json({"architectures": ["Qwen3VLForConditionalGeneration"],
 "image_token_id": 151655, "model_type": "qwen3_vl", "text_config": {"attention_bias": false, "attention_dropout": 0.0,
 "bos_token_id": 151643, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
 "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 262144,
 "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
 "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20],
 "rope_type": "default"}, "rope_theta": 5000000, "use_cache": true, "vocab_size": 151936},
 "tie_word_embeddings": false, "transformers_version": "4.57.0.dev0", "video_token_id": 151656, "vision_config":
 {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
 "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_vl", "num_heads": 16,
 "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2,
 "temporal_patch_size": 2}, "vision_end_token_id": 151653, "vision_start_token_id": 151652})json");

/// Qwen3-VL-30B-A3B-Instruct.
const json kQwen3_VL_30B = [] {
  json hf = kQwen3_VL_8B;
  hf["architectures"] = {"Qwen3VLMoeForConditionalGeneration"}, hf["model_type"] = "qwen3_vl_moe";
  hf["text_config"].update(json{{"model_type", "qwen3_vl_moe_text"},
                                {"hidden_size", 2048},
                                {"intermediate_size", 6144},
                                {"num_hidden_layers", 48},
                                {"num_key_value_heads", 4},
                                {"decoder_sparse_step", 1},
                                {"mlp_only_layers", json::array()},
                                {"moe_intermediate_size", 768},
                                {"norm_topk_prob", true},
                                {"num_experts", 128},
                                {"num_experts_per_tok", 8}});
  return hf;
}();

/// With `patch` applied at the top level, `text` in text_config.
json with(json hf, const json& patch, const json& text = json::object()) {
  hf.update(patch);
  if (!text.empty()) hf["text_config"].update(text);
  return hf;
}

/// The same with the keys of the text part in a text_config.
json nested(const json& flat) {
  json hf, text = flat;
  for (const char* key : {"architectures", "model_type", "vision_config", "image_token_id", "video_token_id",
                          "tie_word_embeddings", "torch_dtype"}) {
    hf[key] = flat.at(key);
    text.erase(key);
  }
  hf["text_config"] = text;
  return hf;
}

TEST(VisionConfig, the_text_part_of_published_models_has_its_number_of_parameters) {
  EXPECT_EQ(num_parameters(parse(kGemma3_4B)),
            4'300'079'472 - 416'866'032 - 1152 * 2560 - 1152);      // less SigLIP, projector
  EXPECT_EQ(num_parameters(parse(kQwen25_VL_7B)), 7'615'616'512);   // Qwen2.5-7B
  EXPECT_EQ(num_parameters(parse(kQwen3_VL_8B)), 8'190'735'360);    // Qwen3-8B
  EXPECT_EQ(num_parameters(parse(kQwen3_VL_30B)), 30'532'122'624);  // Qwen3-30B-A3B
}

TEST(VisionConfig, gemma3_leaves_most_keys_of_its_text_out) {
  const ModelConfig c = parse(kGemma3_4B);
  EXPECT_EQ(c.vocab_size, 262208);
  EXPECT_EQ(c.num_heads, 8);
  EXPECT_EQ(c.num_kv_heads, 4);
  EXPECT_EQ(c.head_dim, 256);
  EXPECT_EQ(c.attention_scale, 1.0 / 16);
  EXPECT_EQ(c.pad_token_id, 0);
  EXPECT_EQ(c.norm, NormKind::OnePlus);
  EXPECT_TRUE(c.tie_word_embeddings);
  EXPECT_EQ(c.layers[4].window, 1024);
  EXPECT_EQ(c.layers[5].window, 0);
  EXPECT_EQ(c.ropes[0].type, "linear");
  EXPECT_EQ(c.ropes[0].factor, 8.0);
  EXPECT_EQ(c.ropes[0].theta, 1e6);
  EXPECT_EQ(c.ropes[1].theta, 1e4);
  EXPECT_EQ(c.max_position_embeddings, 131072);
  EXPECT_EQ(c.image_tokens, (std::vector<int64_t>{262144}));
}

TEST(VisionConfig, positions_of_text_rotate_as_ever) {
  for (const json& hf : {kQwen25_VL_7B, kQwen3_VL_8B}) {
    const ModelConfig c = parse(hf);
    EXPECT_EQ(c.ropes[0].type, "default");
    EXPECT_EQ(c.ropes[0].rotary_dim, 128);
    EXPECT_EQ(c.image_tokens, (std::vector<int64_t>{151655, 151656}));
  }
  EXPECT_EQ(parse(kQwen25_VL_7B).ropes[0].theta, 1e6);
  EXPECT_EQ(parse(kQwen3_VL_8B).ropes[0].theta, 5e6);
  const json yarn = {
      {"type", "yarn"}, {"mrope_section", {16, 24, 24}}, {"factor", 4}, {"original_max_position_embeddings", 32768}};
  EXPECT_EQ(parse(with(kQwen25_VL_7B, {{"rope_scaling", yarn}})).ropes[0].factor, 4.0);
  expect_refusal({{"model_type", "qwen2"}, {"rope_scaling", {{"type", "mrope"}}}}, {"mrope", "qwen2"});
}

TEST(VisionConfig, absent_keys_of_the_text_take_the_defaults_of_transformers) {
  const ModelConfig qwen2 = parse({{"model_type", "qwen2_vl"}}), qwen25 = parse({{"model_type", "qwen2_5_vl"}});
  EXPECT_EQ(knobs(qwen2)["text_config"], knobs(qwen25)["text_config"]);
  EXPECT_EQ(qwen25.vocab_size, 152064);
  EXPECT_EQ(qwen25.norm_eps, 1e-5);
  EXPECT_EQ(qwen25.ropes[0].theta, 1e6);
  EXPECT_TRUE(qwen25.qkv_bias && !qwen25.o_bias);
  const ModelConfig windows = parse({{"model_type", "qwen2_5_vl"}, {"use_sliding_window", true}});
  EXPECT_EQ(windows.layers[79].window, 0);  // max_window_layers is 80
  const json empty = json::object();
  const ModelConfig qwen3 = parse({{"model_type", "qwen3_vl"}, {"text_config", empty}});
  EXPECT_EQ(qwen3.ropes[0].theta, 5e5);
  EXPECT_EQ(qwen3.max_position_embeddings, 128000);
  EXPECT_EQ(qwen3.qk_norm, QkNorm::PerHead);
  const ModelConfig moe = parse({{"model_type", "qwen3_vl_moe"}, {"text_config", empty}});
  EXPECT_EQ(moe.moe.router.num_experts, 60);
  EXPECT_EQ(moe.moe.router.top_k, 4);
  EXPECT_EQ(moe.moe.intermediate_size, 1408);
  EXPECT_EQ(moe.num_kv_heads, 16);
  EXPECT_EQ(moe.head_dim, 128);
  // The key that Qwen3-MoE has is not read.
  const json unnormalised = with(kQwen3_VL_30B, empty, {{"norm_topk_prob", false}});
  EXPECT_EQ(parse(unnormalised).moe.router.score, RouterScore::SoftmaxSelected);
}

TEST(VisionConfig, keys_of_the_text_may_stand_at_the_top_level_for_qwen2_vl_alone) {
  EXPECT_EQ(knobs(parse(kQwen25_VL_7B)), knobs(parse(nested(kQwen25_VL_7B))));
  json flat = kGemma3_4B;
  flat.update(flat["text_config"]);
  flat["model_type"] = "gemma3";
  flat.erase("text_config");
  expect_refusal(flat, {"text_config", "needs it"});
  // Where there is a text_config, what stands beside it does not count.
  EXPECT_EQ(parse(with(nested(kQwen25_VL_7B), {{"hidden_size", 8}})).hidden_size, 3584);
}

TEST(VisionConfig, embeddings_are_tied_as_the_top_level_says_else_as_text_config_says) {
  const auto tied = [](const json& hf) { return parse(hf).tie_word_embeddings; };
  EXPECT_FALSE(tied(with(kGemma3_4B, {{"tie_word_embeddings", false}}, {{"tie_word_embeddings", true}})));
  EXPECT_FALSE(tied(with(kGemma3_4B, json::object(), {{"tie_word_embeddings", false}})));
  json silent = kQwen3_VL_8B;
  silent.erase("tie_word_embeddings");
  EXPECT_FALSE(tied(silent));
  EXPECT_TRUE(tied(with(silent, json::object(), {{"tie_word_embeddings", true}})));
  // Each version of transformers reads one of the two.
  const json saved =
      config_to_save(parse(with(kGemma3_4B, json::object(), {{"tie_word_embeddings", false}})), "float32");
  EXPECT_EQ(saved["tie_word_embeddings"], false);
  EXPECT_EQ(saved["text_config"]["tie_word_embeddings"], false);
}

TEST(VisionConfig, what_is_not_supported_is_refused) {
  expect_refusal(with(kGemma3_4B, {{"architectures", {"Gemma3ForCausalLM"}}}), {"architectures", "Gemma3ForCond"});
  expect_refusal(with(kGemma3_4B, json::object(), {{"model_type", "llama"}}),
                 {"text_config.model_type", "gemma3_text"});
  expect_refusal(with(kGemma3_4B, {{"text_config", 7}}), {"text_config", "object"});
  expect_refusal(with(kGemma3_4B, json::object(), {{"hidden_size", "x"}}), {"text_config.hidden_size"});
  expect_refusal(with(kGemma3_4B, json::object(), {{"use_bidirectional_attention", true}}), {"use_bidirectional"});
  expect_refusal(with(kQwen3_VL_8B, {{"quantization_config", {{"quant_method", "awq"}}}}), {"quantization_config"});
  expect_refusal(with(kQwen3_VL_8B, {{"image_token_id", "<image>"}}), {"image_token_id"});
  expect_refusal(with(kQwen25_VL_7B, {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2}}}}), {"dynamic"});
}

// ---- what is saved

TEST(VisionConfig, what_is_saved_reads_back_and_all_around_the_text_is_as_it_was) {
  for (const json& hf : {kGemma3_4B, kQwen25_VL_7B, nested(kQwen25_VL_7B), kQwen3_VL_8B, kQwen3_VL_30B}) {
    const json saved = config_to_save(parse(hf), "float32");
    EXPECT_EQ(knobs(parse(saved)), knobs(parse(hf)));
    EXPECT_EQ(config_to_save(parse(saved), "float32"), saved);
    EXPECT_EQ(saved.contains("text_config"), hf.contains("text_config"));
    EXPECT_EQ(saved["architectures"], hf["architectures"]);
    EXPECT_EQ(saved["torch_dtype"], "float32");
    if (!hf.contains("text_config")) {
      EXPECT_EQ(saved["vision_config"], hf["vision_config"]);
      continue;
    }
    for (const auto& [key, value] : hf.items()) {
      const bool is_changed = key == "text_config" || key == "torch_dtype";
      EXPECT_TRUE(is_changed || saved[key] == value) << key;
    }
    for (const auto& [key, value] : saved.items()) {
      const bool is_added = key == "dtype" || key == "torch_dtype" || key == "tie_word_embeddings";
      EXPECT_TRUE(is_added || hf.contains(key)) << key << " belongs into text_config";
    }
  }
}

TEST(VisionConfig, sections_of_positions_are_carried_along_in_both_layouts) {
  const json saved = config_to_save(parse(kQwen3_VL_8B), "bfloat16")["text_config"];
  const json scaling = {{"rope_type", "default"}, {"mrope_section", {24, 20, 20}}, {"mrope_interleaved", true}};
  json parameters = scaling;
  parameters["rope_theta"] = 5e6;
  EXPECT_EQ(saved["rope_scaling"], scaling);
  EXPECT_EQ(saved["rope_parameters"], parameters);
  EXPECT_EQ(saved["dtype"], "bfloat16");
  // transformers 4 has no default.
  const json silent = config_to_save(parse({{"model_type", "qwen2_5_vl"}}), "float32");
  EXPECT_EQ(silent["rope_scaling"], (json{{"rope_type", "default"}, {"mrope_section", {16, 24, 24}}}));
  const json gemma = config_to_save(parse(kGemma3_4B), "float32")["text_config"];
  EXPECT_EQ(gemma["rope_scaling"], (json{{"rope_type", "linear"}, {"factor", 8.0}}));
}

// ---- tensors

std::vector<std::string> names_of_text(const ModelConfig& config) {
  std::vector<std::string> names;
  for (const ParamUnit& unit : param_units(config)) {
    for (const ParamSpec& p : unit.params) {
      for (const DiskTensor& d : p.disk) names.push_back(d.hf_name);
    }
  }
  return names;
}

TEST(VisionTensors, the_decoder_is_where_the_checkpoint_has_it) {
  const struct {
    const char *fixture, *prefix, *head, *vision;
    DType dtype;
  } kCases[] = {
      {"gemma3", "language_model.model.", "language_model.lm_head.weight", "vision_tower.vision_model.", DType::F16},
      {"gemma3_untied", "model.language_model.", "lm_head.weight", "model.vision_tower.", DType::F32},
      {"qwen2_5_vl", "model.", "lm_head.weight", "visual.", DType::BF16},
      {"qwen2_vl", "model.language_model.", "lm_head.weight", "model.visual.", DType::F32},
      {"qwen3_vl", "model.language_model.", "lm_head.weight", "model.visual.", DType::F32},
      {"qwen3_vl_moe", "model.language_model.", "lm_head.weight", "model.visual.", DType::F32},
  };
  for (const auto& c : kCases) {
    const fs::path path = fs::path("test/fixtures") / c.fixture;
    const ModelConfig config = load_model_config(path);
    EXPECT_EQ(config.names.prefix, c.prefix) << c.fixture;
    if (!config.tie_word_embeddings) {
      EXPECT_EQ(config.names.lm_head, c.head) << c.fixture;
    }
    std::vector<std::string> names = names_of_text(config);
    const SafetensorsDirectory directory(path);
    int64_t sees = 0;
    for (const TensorToWrite& tensor : frozen_tensors(config)) {
      const bool is_projector = tensor.name.find("multi_modal_projector") != std::string::npos;
      EXPECT_TRUE(is_projector || tensor.name.starts_with(c.vision)) << tensor.name;
      EXPECT_EQ(tensor.dtype, c.dtype) << tensor.name;
      EXPECT_EQ(tensor.shape, directory.info(tensor.name).shape) << tensor.name;
      names.push_back(tensor.name);
      sees++;
    }
    EXPECT_GE(sees, 18) << c.fixture;
    std::sort(names.begin(), names.end());
    EXPECT_EQ(names, directory.names()) << c.fixture;
  }
}

TEST(VisionTensors, experts_are_read_as_their_shape_says) {
  const fs::path path = "test/fixtures/qwen3_vl_moe";
  EXPECT_EQ(load_model_config(path).moe.layout, WeightLayout::InOut);
  const std::string name = "model.language_model.layers.0.mlp.experts.gate_up_proj";
  std::vector<TensorToWrite> tensors;
  const SafetensorsDirectory published(path);
  for (const std::string& each : published.names()) tensors.push_back({each, DType::F32, published.info(each).shape});
  for (TensorToWrite& tensor : tensors) {
    if (tensor.name == name) std::swap(tensor.shape[1], tensor.shape[2]);
  }
  const TempDir dir;
  SafetensorsWriter(dir / "model.safetensors", tensors).finish();
  fs::copy_file(path / "config.json", dir / "config.json");
  const ModelConfig saved_by_5 = load_model_config(dir.path());
  EXPECT_EQ(saved_by_5.moe.layout, WeightLayout::OutIn);
  EXPECT_TRUE(saved_by_5.moe.is_fused_on_disk);
}

TEST(VisionTensors, a_checkpoint_of_text_alone_is_refused_with_the_family_to_name) {
  const fs::path path = "test/fixtures/qwen3_vl";
  const TempDir dir;
  std::vector<TensorToWrite> tensors;
  for (const std::string& name : names_of_text(load_model_config(path))) tensors.push_back({name, DType::F32, {1}});
  SafetensorsWriter(dir / "model.safetensors", tensors).finish();
  fs::copy_file(path / "config.json", dir / "config.json");
  const std::string message = error_of([&] { load_model_config(dir.path()); });
  EXPECT_NE(message.find("text only; write a config.json of model_type qwen3 with"), std::string::npos) << message;
}

}  // namespace
