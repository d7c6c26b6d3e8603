// What config.json may not say, and how it is refused: by file, key and remedy.
#include "llama/config.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "llama/config_reader.h"
#include "test/config_testing.h"
#include "test/hf_configs.h"

namespace fs = std::filesystem;
using nlohmann::json;

TEST(ConfigRefusals, model_types_are_refused_by_name_with_the_list_of_supported_ones) {
  const std::string supported =
      "llama, mistral, qwen2, qwen3, smollm3, olmo2, phi3, gemma2, gemma3_text, mixtral, qwen2_moe, qwen3_moe, "
      "glm4_moe, gpt_oss, deepseek_v3, cohere2, glm, glm4, granite, gemma3, qwen2_vl, qwen2_5_vl, qwen3_vl, "
      "qwen3_vl_moe";
  for (const char* type : {"olmoe", "phimoe", "cohere", "granitemoe", "deepseek_v2", "gpt2"}) {
    expect_refusal(kLlama31_8B.v4, {{"model_type", type}}, {fmt::format("\"model_type\" is \"{}\"", type), supported});
  }
  for (const char* type : {"mamba", "mamba2", "rwkv", "lfm2", "qwen3_next", "jamba", "falcon_mamba", "recurrent_gemma",
                           "bamba", "granitemoehybrid", "zamba"}) {
    expect_refusal(kLlama31_8B.v4, {{"model_type", type}},
                   {fmt::format("\"{}\"", type), "recurrence, linear attention or convolution", supported});
  }
  for (const char* type : {"gemma3n", "qwen2_5_omni", "mllama", "llama4"}) {
    expect_refusal(kLlama31_8B.v4, {{"model_type", type}},
                   {fmt::format("\"{}\"", type), "use a text-only checkpoint", supported});
  }
  expect_refusal(kLlama31_8B.v4, {{"model_type", "some_vlm"}, {"text_config", {{"hidden_size", 8}}}},
                 {"use a text-only checkpoint"});
  expect_refusal(kLlama31_8B.v4, {{"model_type", "some_vlm"}, {"vision_config", {{"hidden_size", 8}}}},
                 {"use a text-only checkpoint"});
  EXPECT_NE(error_of([] { parse(kLlama31_8B.v4, {}, {"model_type"}); }).find("no \"model_type\""), std::string::npos);
}

TEST(ConfigRefusals, other_heads_are_refused) {
  expect_refusal(kLlama31_8B.v4, {{"architectures", {"LlamaForSequenceClassification"}}},
                 {"architectures", "LlamaForSequenceClassification", "LlamaForCausalLM"});
  EXPECT_NO_THROW(parse(kLlama31_8B.v4, {{"architectures", {"LLaMAForCausalLM"}}}));
  EXPECT_NO_THROW(parse(kLlama31_8B.v4, {{"architectures", nullptr}}));
}

TEST(ConfigRefusals, keys_that_change_the_maths_are_refused_where_they_have_an_effect) {
  struct Case {
    const char* key;
    json value;
    const char* part;
    json harmless;
  };
  const std::vector<Case> cases = {
      {"quantization_config", {{"quant_method", "gptq"}}, "quantised", nullptr},
      {"attention_dropout", 0.1, "set it to 0.0", 0.0},
      {"resid_pdrop", 0.1, "set it to 0.0", 0},
      {"embd_pdrop", "much", "set it to 0.0", nullptr},
      {"use_bidirectional_attention", true, "causal", false},
      {"is_causal", false, "causal", true},
      {"num_local_experts", 8, "experts", 0},
      {"num_experts", 1, "experts", nullptr},
      {"kv_lora_rank", 512, "MLA", nullptr},
      {"alibi", true, "ALiBi", false},
      {"clip_qkv", 8.0, "clipping", nullptr},
      {"rope_interleaved", true, "halves", false},
      {"embedding_multiplier", 12.0, "ignores it", 1.0},
      {"residual_multiplier", 0.22, "ignores it", 1},
      {"attention_multiplier", 0.1, "ignores it", 1.0},
      {"logits_scaling", 8.0, "ignores it", 1.0},
      {"logit_scale", 0.0625, "ignores it", 1.0},
      {"use_parallel_block", true, "ignores it", false},
      {"attn_logit_softcapping", 50.0, "ignores it", nullptr},
      {"final_logit_softcapping", 30.0, "ignores it", nullptr},
      {"query_pre_attn_scalar", 256, "ignores it", nullptr},
      {"use_qk_norm", true, "ignores it", false},
      {"sliding_window", 4096, "ignores it", nullptr},
      {"no_rope_layers", json::array({1, 0}), "ignores it", nullptr},
      {"lm_head_bias", true, "bias of the head", false},
      {"compression_config", {{"format", "pack-quantized"}}, "compressed", nullptr},
      {"hidden_dropout", 0.1, "set it to 0.0", 0.0},
      {"is_encoder_decoder", true, "causal", false},
      {"add_cross_attention", true, "causal", false},
      {"n_routed_experts", 64, "experts", 0},
      {"moe_num_experts", 64, "experts", 0},
      {"q_lora_rank", 1536, "MLA", nullptr},
      {"rope_interleave", true, "halves", false},
      {"attention_chunk_size", 8192, "no layer of layer_types is chunked_attention", nullptr},
      {"scale_emb", 12, "multipliers", 1},
      {"scale_depth", 1.4, "multipliers", 1.0},
      {"final_logit_softcap", 30.0, "final_logit_softcapping", 0},
      {"cross_attention_layers", json::array({3}), "cross-attention", nullptr},
      {"block_configs", json::array({json::object()}), "different shapes", nullptr},
      {"qk_layernorm", true, "ignores it", false},
  };
  for (const Case& c : cases) {
    expect_refusal(kLlama31_8B.v4, {{c.key, c.value}}, {fmt::format("\"{}\" is ", c.key), c.part});
    EXPECT_NO_THROW(parse(kLlama31_8B.v4, {{c.key, c.harmless}})) << c.key;
  }
  expect_refusal(kGemma3_1B.v4, {{"attn_logit_softcapping", 50.0}}, {"ignores it"});
  expect_refusal(kMistral7B_v01.v4, {{"attention_bias", true}}, {"ignores it"});
  expect_refusal(kMistral7B_v01.v4, {{"mlp_bias", true}}, {"ignores it"});
  // Heeded or harmless in one family, ignored in its neighbour.
  for (const char* key : {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}) {
    expect_refusal(kCommandR7B.v4, {{key, 8.0}}, {fmt::format("\"{}\" is 8.0", key), "ignores it"});
    expect_refusal(kGranite31_2B.v4, {{key, nullptr}}, {fmt::format("\"{}\" is null", key), "expected a number"});
    expect_refusal(kGranite31_2B.v4, {{key, 0}}, {fmt::format("\"{}\" is 0", key), "expected a number"});
  }
  expect_refusal(kGranite31_2B.v4, {{"logit_scale", 0.25}}, {"ignores it"});
  expect_refusal(kCommandR7B.v4, {{"logit_scale", 0.0}}, {"above 0"});
  expect_refusal(kCommandR7B.v4, {{"rms_norm_eps", 1e-6}}, {"ignores it"});
  expect_refusal(kCommandR7B.v4, {{"use_parallel_block", false}}, {"ignores it"});
  expect_refusal(kCommandR7B.v4, {{"use_qk_norm", true}}, {"ignores it"});
  expect_refusal(kCommandR7B.v4, {{"mlp_bias", true}}, {"ignores it"});
  expect_refusal(kGLM4_9B_0414.v4, {{"sliding_window", 4096}}, {"ignores it"});
  expect_refusal(kGLM4_9B_0414.v4, {{"rope_interleave", false}}, {"neighbours"});
  EXPECT_NO_THROW(parse(kGLM4_9B_0414.v4, {{"rope_interleave", true}}));
  EXPECT_NO_THROW(parse(kLlama31_8B.v4, {{"some_key_of_somebody", {1, 2, 3}}}));
}

TEST(ConfigRefusals, activations_other_than_the_family_has) {
  expect_refusal(kLlama31_8B.v4, {{"hidden_act", "gelu"}}, {"\"hidden_act\" is \"gelu\"", "silu"});
  expect_refusal(kGemma2_2B.v4, {{"hidden_activation", "gelu"}},
                 {"\"hidden_activation\" is \"gelu\"", "gelu_pytorch_tanh"});
  EXPECT_NO_THROW(parse(kGemma2_2B.v4, {{"hidden_act", "gelu"}}));  // not read there
}

TEST(ConfigRefusals, layer_types_other_than_attention) {
  const auto types = [](const char* odd) {
    json list(std::vector<std::string>(28, "full_attention"));
    list[3] = odd;
    return json{{"layer_types", list}};
  };
  for (const char* odd : {"linear_attention", "conv", "mamba"}) {
    expect_refusal(kQwen3_06B.v4, types(odd),
                   {"layer 3 is", odd, "only full_attention, sliding_attention and chunked_attention"});
  }
  expect_refusal(kQwen3_06B.v4, types("chunked_attention"),
                 {"\"attention_chunk_size\"", "layer 3", "needs its tokens"});
  expect_refusal(kQwen3_06B.v4, {{"layer_types", {"full_attention"}}}, {"list of 28"});
  expect_refusal(kQwen3_06B.v4, types("sliding_attention"), {"\"sliding_window\" is null", "use_sliding_window true"});
  expect_refusal(kMistral7B_v03.v4, {{"layer_types", std::vector<std::string>(32, "sliding_attention")}},
                 {"ignores it"});
  EXPECT_NO_THROW(parse(kMistral7B_v03.v4, {{"layer_types", std::vector<std::string>(32, "full_attention")}}));
}

TEST(ConfigRefusals, sizes_that_no_model_has) {
  for (const json& bad :
       json::array({0, -1, 4096.5, "4096", true, 1e300, 18446744073709551615u, json::array({1}), json::object()})) {
    for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                            "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
      expect_refusal(kLlama31_8B.v4, {{key, bad}}, {fmt::format("\"{}\" is ", key), "expected a whole number"});
    }
  }
  expect_refusal(kLlama31_8B.v4, {{"num_key_value_heads", 5}},
                 {"\"num_key_value_heads\" is 5", "must divide num_attention_heads, which is 32"});
  expect_refusal(kLlama31_8B.v4, {{"hidden_size", 4100}}, {"\"hidden_size\" is 4100", "not a multiple"});
  expect_refusal(kLlama31_8B.v4, {{"head_dim", 65536}, {"num_attention_heads", 4096}}, {"4096 heads", "65536"});
  expect_refusal(kLlama31_8B.v4, {{"head_dim", 63}}, {"rotary width must be even", "63"});
  expect_refusal(kPhi3_mini_128k.v4, {{"partial_rotary_factor", 0.01}, {"rope_scaling", nullptr}},
                 {"at least 2, it is 0"});
}

TEST(ConfigRefusals, values_of_the_wrong_kind_or_out_of_range) {
  expect_refusal(kLlama31_8B.v4, {{"tie_word_embeddings", "yes"}}, {"\"tie_word_embeddings\"", "true or false"});
  expect_refusal(kLlama31_8B.v4, {{"rms_norm_eps", 2}}, {"\"rms_norm_eps\" is 2", "at most 1"});
  expect_refusal(kLlama31_8B.v4, {{"rope_theta", 1}}, {"\"rope_theta\" is 1", "above 1"});
  expect_refusal(kLlama31_8B.v4, {{"pad_token_id", 18446744073709551615u}},
                 {"\"pad_token_id\" is 18446744073709551615"});
  expect_refusal(kGemma2_2B.v4, {{"query_pre_attn_scalar", 256.5}}, {"\"query_pre_attn_scalar\" is 256.5", "whole"});
  const std::string long_message = error_of([] { parse(kLlama31_8B.v4, {{"hidden_act", std::string(1 << 20, 'x')}}); });
  EXPECT_NE(long_message.find("\"hidden_act\""), std::string::npos);
  EXPECT_LT(long_message.size(), 300u) << "a value is cut short";
}

TEST(ConfigRefusals, lists_of_layers_that_do_not_rotate) {
  expect_refusal(kSmolLM3_3B.v4, {{"no_rope_layers", {1, 0}}}, {"no_rope_layers", "list of 36 numbers"});
  std::vector<int> flags(36, 1);
  flags[5] = 2;
  expect_refusal(kSmolLM3_3B.v4, {{"no_rope_layers", flags}}, {"no_rope_layers", "element 5 is 2"});
}

TEST(ConfigRefusals, rotary_embeddings_that_cannot_be_made) {
  const auto scaling = [](const json& dict) { return json{{"rope_scaling", dict}}; };
  expect_refusal(
      kLlama31_8B.v4, scaling({{"rope_type", "proportional"}}),
      {"\"rope_scaling.rope_type\" is \"proportional\"", "default, linear, dynamic, llama3, yarn, longrope"});
  expect_refusal(kLlama31_8B.v4, scaling({{"type", "su"}, {"factor", 2.0}}), {"\"rope_scaling.type\" is \"su\""});
  expect_refusal(kLlama31_8B.v4, scaling({{"factor", 2.0}}), {"\"rope_scaling.factor\" is 2.0", "no \"rope_type\""});
  expect_refusal(kLlama31_8B.v4, scaling({{"rope_type", "linear"}}), {"\"rope_scaling.factor\" is absent"});
  expect_refusal(kLlama31_8B.v4, scaling({{"rope_type", "yarn"}}), {"\"rope_scaling.factor\" is absent"});
  expect_refusal(kLlama31_8B.v4, scaling({{"rope_type", "linear"}, {"factor", -1}}), {"\"rope_scaling.factor\" is -1"});
  expect_refusal(
      kLlama31_8B.v4,
      scaling({{"rope_type", "llama3"}, {"factor", 8.0}, {"low_freq_factor", 4.0}, {"high_freq_factor", 4.0}}),
      {"high_freq_factor", "more than low_freq_factor"});
  expect_refusal(kLlama31_8B.v4, scaling({{"rope_type", "llama3"}, {"factor", 8.0}, {"high_freq_factor", 4.0}}),
                 {"\"rope_scaling.low_freq_factor\" is absent"});
  expect_refusal(kLlama31_8B.v4, scaling({{"rope_type", "longrope"}, {"factor", 8.0}, {"short_factor", {1.0, 2.0}}}),
                 {"short_factor", "list of 64 numbers", "has 2"});
  expect_refusal(kLlama31_8B.v4, scaling({{"full_attention", {{"rope_type", "default"}}}}),
                 {"one rotary table for all layers"});
  expect_refusal(kLlama31_8B.v4, {{"rope_scaling", "linear"}},
                 {"\"rope_scaling\" is \"linear\"", "expected an object"});
  expect_refusal(kLlama31_8B.v4, {{"rope_theta", 0}}, {"\"rope_theta\" is 0"});
  expect_refusal(kOLMo2_7B.v4, scaling({{"rope_type", "yarn"}, {"factor", 4.0}}),
                 {"not a rotary embedding that is supported for olmo2"});
  expect_refusal(kPhi3_mini_128k.v4, scaling({{"rope_type", "linear"}, {"factor", 4.0}}),
                 {"supported for phi3", "longrope"});
  expect_refusal(kGemma3_1B.v4, {{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}}}},
                 {"ignores a flat one"});
  expect_refusal(kGemma3_1B.v4, scaling({{"type", "linear"}, {"factor", 8.0}}), {"rename the key"});
  expect_refusal(kGemma3_1B.v4, scaling({{"full_attention", {{"rope_type", "default"}}}}),
                 {"not a dict for each layer type"});
  expect_refusal(kGemma3_1B.v4, scaling({{"rope_type", "yarn"}, {"factor", 8.0}, {"truncate", false}}),
                 {"\"rope_scaling.truncate\" is false"});
  json original = scaling({{"rope_type", "yarn"}, {"factor", 8.0}});
  original["original_max_position_embeddings"] = 4096;
  expect_refusal(kGemma3_1B.v4, original, {"\"original_max_position_embeddings\" is 4096", "move it there"});
  expect_refusal(kGemma3_1B.v4,
                 {{"rope_parameters",
                   {{"full_attention", {{"rope_type", "default"}}},
                    {"sliding_attention", {{"rope_type", "linear"}, {"factor", 8.0}}}}}},
                 {"rope_parameters.sliding_attention has type \"linear\""});
  expect_refusal(kLlama31_8B.v4, scaling({{"rope_type", "linear"}, {"factor", 0}}), {"\"rope_scaling.factor\" is 0"});
  expect_refusal(kLlama31_8B.v4, scaling({{"rope_type", "yarn"}, {"factor", 4.0}, {"beta_fast", 1}, {"beta_slow", 32}}),
                 {"\"rope_scaling.beta_fast\" is 1", "more than beta_slow"});
  json dynamic = scaling({{"rope_type", "dynamic"}, {"factor", 4.0}});
  dynamic["head_dim"] = 2;
  expect_refusal(kLlama31_8B.v4, dynamic, {"\"head_dim\" is 2", "above 2"});
  expect_refusal(kOLMo2_7B.v4, scaling({{"rope_type", "linear"}, {"factor", 1.0}}),
                 {"\"rope_scaling.factor\" is 1", "more than 1"});
  json phi = json::parse(kPhi3_mini_128k.v4)["rope_scaling"];
  phi["long_factor"][7] = 1e300;
  expect_refusal(kPhi3_mini_128k.v4, scaling(phi), {"frequency 7 of 48 is 0", "fp32 cannot hold"});
  phi["long_factor"][7] = 0;
  expect_refusal(kPhi3_mini_128k.v4, scaling(phi), {"\"rope_scaling.long_factor\"", "element 7 is 0"});
  phi["attention_factor"] = 1.5;
  expect_refusal(kPhi3_mini_128k.v4, scaling(phi), {"\"rope_scaling.attention_factor\" is 1.5"});
}

TEST(ConfigRefusals, windows_that_mean_two_things) {
  expect_refusal(kMistral7B_v01.v4, {{"use_sliding_window", false}},
                 {"use_sliding_window", "set sliding_window to null"});
  expect_refusal(kMistral7B_v01.v4, {{"sliding_window", 0}}, {"\"sliding_window\" is 0"});
  expect_refusal(kGemma2_2B.v4, {{"sliding_window", nullptr}}, {"layer 0 is a sliding_attention layer"});
  expect_refusal(kCommandR7B.v4, {{"sliding_window", nullptr}}, {"layer 0 is a sliding_attention layer"});
}

TEST(ConfigRefusals, files_that_are_not_there_or_not_json) {
  const std::string missing = error_of([] { load_model_config("no/such/dir"); });
  EXPECT_NE(missing.find("no/such/dir"), std::string::npos);
  EXPECT_NE(missing.find("there is no such file"), std::string::npos);
  const fs::path dir = fs::path(testing::TempDir()) / "config_test";
  fs::create_directories(dir);
  const auto with_text = [&](const std::string& text) {
    std::ofstream(dir / "config.json") << text;
    return error_of([&] { load_model_config(dir); });
  };
  EXPECT_NE(with_text("{\"model_type\": \"llama\",\n}").find("line 2"), std::string::npos);
  EXPECT_NE(with_text("").find("not JSON"), std::string::npos);
  EXPECT_NE(with_text("[1]").find("one object"), std::string::npos);
  EXPECT_NE(with_text(std::string(1 << 20, '[')).find("nested deeper"), std::string::npos);
  EXPECT_NE(with_text("{\"x\": 1e999}").find("not JSON"), std::string::npos);
  EXPECT_NE(with_text("{\"rms_norm_eps\": NaN}").find("not JSON"), std::string::npos);
  EXPECT_NE(with_text(std::string(17 << 20, ' ')).find("more than the 16777216"), std::string::npos);
  EXPECT_EQ(with_text(kLlama31_8B.v4), "");
  fs::remove_all(dir);
}
