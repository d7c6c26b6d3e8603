// Reading config.json of every family in both layouts, and what is written back. What is refused:
// config_refusals_test.cpp.
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

namespace {

std::string windows(const ModelConfig& config) {
  std::string text;
  for (const LayerConfig& layer : config.layers) text += layer.window > 0 ? 'w' : '.';
  return text;
}

std::string ropes(const ModelConfig& config) {
  std::string text;
  for (const LayerConfig& layer : config.layers) text += layer.rope < 0 ? '-' : static_cast<char>('0' + layer.rope);
  return text;
}

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; i++) all += text;
  return all;
}

}  // namespace

// ---- the published models

TEST(Config, both_layouts_describe_the_same_model) {
  for (const PublishedModel* model : kPublishedModels)
    EXPECT_EQ(knobs(parse(model->v4)), knobs(parse(model->v5))) << model->name;
}

TEST(Config, fixtures_in_both_layouts_describe_the_same_model) {
  for (const auto& entry : fs::directory_iterator("test/fixtures")) {
    const fs::path v5 = entry.path() / "config.json", v4 = entry.path() / "config_v4.json";
    if (!fs::exists(v4)) continue;
    EXPECT_EQ(knobs(load_model_config(v5)), knobs(load_model_config(v4))) << entry.path();
  }
}

TEST(Config, what_is_saved_reads_back_as_the_same_model) {
  for (const PublishedModel* model : kPublishedModels) {
    const ModelConfig config = parse(model->v4);
    const json saved = config_to_save(config, "bfloat16");
    const ModelConfig again = parse_model_config(saved, model->name);
    EXPECT_EQ(knobs(config), knobs(again)) << model->name;
    EXPECT_EQ(config_to_save(again, "bfloat16"), saved) << model->name;
  }
}

TEST(Config, llama31_8b) {
  const ModelConfig c = parse(kLlama31_8B.v4);
  EXPECT_EQ(c.model_type, "llama");
  EXPECT_EQ(c.vocab_size, 128256);
  EXPECT_EQ(c.hidden_size, 4096);
  EXPECT_EQ(c.intermediate_size, 14336);
  EXPECT_EQ(c.num_layers, 32);
  EXPECT_EQ(c.num_heads, 32);
  EXPECT_EQ(c.num_kv_heads, 8);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_EQ(c.qkv_dim(), 6144);
  EXPECT_EQ(c.norm_eps, 1e-5);
  EXPECT_EQ(c.norm, NormKind::Plain);
  EXPECT_EQ(c.attention_scale, 1 / std::sqrt(128.0));
  EXPECT_FALSE(c.tie_word_embeddings || c.qkv_bias || c.o_bias || c.mlp_bias);
  EXPECT_EQ(c.pad_token_id, -1);
  EXPECT_EQ(c.embed_scale, 1);
  EXPECT_EQ(windows(c), std::string(32, '.'));
  ASSERT_EQ(c.ropes.size(), 1u);
  const RopeConfig& rope = c.ropes[0];
  EXPECT_EQ(rope.type, "llama3");
  EXPECT_EQ(rope.theta, 500000);
  EXPECT_EQ(rope.rotary_dim, 128);
  EXPECT_EQ(rope.factor, 8.0);
  EXPECT_EQ(rope.low_freq_factor, 1);
  EXPECT_EQ(rope.high_freq_factor, 4);
  EXPECT_EQ(rope.original_max_position_embeddings, 8192);
  EXPECT_EQ(rope.max_position_embeddings, 131072);
}

TEST(Config, mistral_has_a_window_on_every_layer_and_4096_when_the_key_is_absent) {
  EXPECT_EQ(windows(parse(kMistral7B_v01.v4)), std::string(32, 'w'));
  EXPECT_EQ(parse(kMistral7B_v01.v4).layers[31].window, 4096);
  EXPECT_EQ(windows(parse(kMistral7B_v03.v4)), std::string(32, '.'));
  EXPECT_EQ(parse(kMistral7B_v03.v4, {}, {"sliding_window"}).layers[0].window, 4096);
}

TEST(Config, qwen2_has_biases_on_q_k_and_v_and_no_window_unless_switched_on) {
  const ModelConfig c = parse(kQwen25_7B.v4);
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_FALSE(c.o_bias);
  EXPECT_EQ(windows(c), std::string(28, '.'));
  EXPECT_EQ(c.ropes[0].type, "yarn");
  EXPECT_EQ(c.ropes[0].original_max_position_embeddings, 32768);
  const ModelConfig on =
      parse(kQwen25_7B.v4, {{"use_sliding_window", true}, {"max_window_layers", 20}, {"sliding_window", 512}});
  EXPECT_EQ(windows(on), std::string(20, '.') + std::string(8, 'w'));
  EXPECT_EQ(on.layers[20].window, 512);
  EXPECT_EQ(windows(parse(kQwen25_7B.v4, {{"use_sliding_window", true}, {"sliding_window", nullptr}})),
            std::string(28, '.'));
}

TEST(Config, qwen3_norms_heads_and_its_head_dim_is_128_when_absent) {
  const ModelConfig c = parse(kQwen3_06B.v4, {}, {"head_dim"});
  EXPECT_EQ(c.head_dim, 128);  // hidden_size / num_attention_heads is 64
  EXPECT_EQ(c.qk_norm, QkNorm::PerHead);
  EXPECT_EQ(parse(kQwen3_06B.v4, {{"head_dim", nullptr}}).head_dim, 64);
}

TEST(Config, smollm3_lists_the_layers_that_do_rotate) {
  const ModelConfig c = parse(kSmolLM3_3B.v4);
  EXPECT_EQ(ropes(c), repeated("000-", 9));
  EXPECT_TRUE(c.tie_word_embeddings);  // the key is absent, the default is true
  EXPECT_EQ(ropes(parse(kSmolLM3_3B.v4, {{"no_rope_layers", nullptr}, {"no_rope_layer_interval", 3}})),
            repeated("00-", 12));
  const json inverted = {{"no_rope_layers", std::vector<int>(36, 0)}};
  EXPECT_EQ(ropes(parse(kSmolLM3_3B.v4, inverted)), std::string(36, '-'));
  const json window = {{"use_sliding_window", true}, {"sliding_window", 64}, {"layer_types", nullptr}};
  EXPECT_EQ(windows(parse(kSmolLM3_3B.v4, window)), repeated("...w", 9));
}

TEST(Config, olmo2_norms_the_outputs_and_the_whole_projections) {
  const ModelConfig c = parse(kOLMo2_7B.v4);
  EXPECT_EQ(c.norm, NormKind::LateCast);
  EXPECT_EQ(c.qk_norm, QkNorm::Full);
  EXPECT_EQ(c.norms.attn_in, "");
  EXPECT_EQ(c.norms.attn_out, "post_attention_layernorm");
  EXPECT_EQ(c.norms.mlp_in, "");
  EXPECT_EQ(c.norms.mlp_out, "post_feedforward_layernorm");
}

TEST(Config, phi3_is_fused_on_disk_rotates_a_part_and_knows_su_as_longrope) {
  const ModelConfig c = parse(kPhi3_mini_128k.v4);
  EXPECT_TRUE(c.fused_qkv_on_disk && c.fused_gate_up_on_disk);
  EXPECT_EQ(c.ropes[0].type, "longrope");
  EXPECT_EQ(c.ropes[0].rotary_dim, 96);
  EXPECT_EQ(c.ropes[0].original_max_position_embeddings, 4096);
  EXPECT_EQ(c.layers[5].window, 262144);
  const ModelConfig phi4 = parse(kPhi4_mini.v4);
  EXPECT_EQ(phi4.head_dim, 128);
  EXPECT_EQ(phi4.ropes[0].rotary_dim, 96);
  EXPECT_EQ(phi4.ropes[0].short_factor.size(), 48u);
}

TEST(Config, gemma2_has_sandwich_norms_softcaps_and_windows_on_even_layers) {
  const ModelConfig c = parse(kGemma2_2B.v4);
  EXPECT_EQ(c.norm, NormKind::OnePlus);
  EXPECT_EQ(c.norms.attn_out, "post_attention_layernorm");
  EXPECT_EQ(c.norms.mlp_in, "pre_feedforward_layernorm");
  EXPECT_EQ(c.activation, Activation::GeGluTanh);
  EXPECT_EQ(c.embed_scale, std::sqrt(2304.0));
  EXPECT_EQ(c.attention_scale, 1.0 / 16);
  EXPECT_EQ(c.attention_softcap, 50);
  EXPECT_EQ(c.final_softcap, 30);
  EXPECT_TRUE(c.tie_word_embeddings);
  EXPECT_EQ(c.pad_token_id, 0);
  EXPECT_EQ(windows(c), repeated("w.", 13));
  const ModelConfig plain = parse(
      kGemma2_2B.v4,
      {{"attn_logit_softcapping", nullptr}, {"final_logit_softcapping", nullptr}, {"query_pre_attn_scalar", 144}});
  EXPECT_EQ(plain.attention_softcap, 0);
  EXPECT_EQ(plain.final_softcap, 0);
  EXPECT_EQ(plain.attention_scale, 1.0 / 12);
}

TEST(Config, gemma3_has_a_local_rotary_table_on_windowed_layers) {
  const ModelConfig c = parse(kGemma3_1B.v4);
  EXPECT_EQ(windows(c), repeated("wwwww.", 4) + "ww");
  EXPECT_EQ(ropes(c), repeated("111110", 4) + "11");
  ASSERT_EQ(c.ropes.size(), 2u);
  EXPECT_EQ(c.ropes[0].theta, 1e6);
  EXPECT_EQ(c.ropes[1].theta, 1e4);
  EXPECT_EQ(c.qk_norm, QkNorm::PerHead);
  EXPECT_EQ(c.attention_softcap, 0);
  const json scaled = {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}};
  const ModelConfig far = parse(kGemma3_1B.v4, scaled);
  EXPECT_EQ(far.ropes[0].type, "linear");
  EXPECT_EQ(far.ropes[1].type, "default");
  EXPECT_EQ(windows(parse(kGemma3_1B.v4, {{"sliding_window_pattern", 2}})), repeated("w.", 13));
}

TEST(Config, cohere2_has_parallel_blocks_and_rotates_only_in_windows) {
  const ModelConfig c = parse(kCommandR7B.v4);
  EXPECT_TRUE(c.parallel_block);
  EXPECT_EQ(c.norm, NormKind::LayerNorm);
  EXPECT_EQ(c.norm_eps, 1e-5);
  EXPECT_EQ(parse(kCommandR7B.v4, {{"layer_norm_eps", 1e-3}}).norm_eps, 1e-3);
  EXPECT_EQ(c.norms.attn_in, "input_layernorm");
  EXPECT_EQ(c.norms.attn_out + c.norms.mlp_in + c.norms.mlp_out, "");
  EXPECT_EQ(c.logit_scale, 0.25);
  EXPECT_TRUE(c.tie_word_embeddings);  // the key is absent, the default is true
  EXPECT_EQ(c.layers[0].window, 4096);
  EXPECT_EQ(windows(c), repeated("www.", 8));
  EXPECT_EQ(ropes(c), repeated("000-", 8));
  EXPECT_EQ(c.ropes[0].pairing, RopePairing::Interleaved);
  EXPECT_EQ(c.ropes[0].rotary_dim, 128);
  EXPECT_FALSE(c.qkv_bias || c.o_bias);
  const ModelConfig biased = parse(kCommandR7B.v4, {{"attention_bias", true}});
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias);
  EXPECT_EQ(ropes(parse(kCommandR7B.v4, {{"sliding_window_pattern", 2}})), repeated("0-", 16));
  std::vector<std::string> types(32, "full_attention");
  EXPECT_EQ(ropes(parse(kCommandR7B.v4, {{"layer_types", types}, {"sliding_window", nullptr}})), std::string(32, '-'));
  types[5] = "sliding_attention";
  EXPECT_EQ(ropes(parse(kCommandR7B.v4, {{"layer_types", types}})), "-----0" + std::string(26, '-'));
  EXPECT_EQ(parse(kCommandR7B.v4, {}, {"head_dim"}).head_dim, 128);
}

TEST(Config, glm_rotates_neighbours_in_half_of_a_head) {
  const ModelConfig c = parse(kGLM4_9B_Chat.v4);  // without partial_rotary_factor
  EXPECT_EQ(c.ropes[0].pairing, RopePairing::Interleaved);
  EXPECT_EQ(c.ropes[0].rotary_dim, 64);
  EXPECT_EQ(parse(kGLM4_9B_Chat.v4, {{"partial_rotary_factor", 0.25}}).ropes[0].rotary_dim, 32);
  EXPECT_EQ(parse(kGLM4_9B_Chat.v4, {{"partial_rotary_factor", nullptr}}).ropes[0].rotary_dim, 128);
  const json inside = {{"rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 0.75}}}};
  EXPECT_EQ(parse(kGLM4_9B_Chat.v4, inside).ropes[0].rotary_dim, 96);
  const json yarn = {{"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}}};  // not Phi-3's name of longrope
  EXPECT_EQ(parse(kGLM4_9B_Chat.v4, yarn).ropes[0].type, "yarn");
  EXPECT_TRUE(c.qkv_bias);
  EXPECT_FALSE(c.o_bias);
  EXPECT_TRUE(parse(kGLM4_9B_Chat.v4, {}, {"attention_bias"}).qkv_bias);
  EXPECT_FALSE(parse(kGLM4_9B_Chat.v4, {{"attention_bias", false}}).qkv_bias);
  EXPECT_FALSE(c.fused_qkv_on_disk);
  EXPECT_TRUE(c.fused_gate_up_on_disk);
  EXPECT_EQ(c.norms.attn_out, "");
  EXPECT_EQ(parse(kGLM4_9B_Chat.v4, {}, {"head_dim"}).head_dim, 128);
  EXPECT_EQ(parse(kGLM4_9B_Chat.v4, {{"num_attention_heads", 64}, {"head_dim", nullptr}}).head_dim, 64);
}

TEST(Config, glm4_has_sandwich_norms_under_names_of_its_own) {
  const ModelConfig c = parse(kGLM4_9B_0414.v4);
  EXPECT_EQ(c.norm, NormKind::Plain);
  EXPECT_EQ(c.norms.attn_in, "input_layernorm");
  EXPECT_EQ(c.norms.attn_out, "post_self_attn_layernorm");
  EXPECT_EQ(c.norms.mlp_in, "post_attention_layernorm");
  EXPECT_EQ(c.norms.mlp_out, "post_mlp_layernorm");
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_EQ(c.ropes[0].rotary_dim, 64);
}

TEST(Config, granite_has_four_multipliers) {
  const ModelConfig c = parse(kGranite31_2B.v4);
  EXPECT_EQ(c.embed_scale, 12);
  EXPECT_EQ(c.residual_multiplier, 0.22);
  EXPECT_EQ(c.attention_scale, 0.015625);
  EXPECT_EQ(c.logit_scale, 0.125);
  EXPECT_EQ(c.head_dim, 64);
  EXPECT_DOUBLE_EQ(c.stream_scale(), 12 / 0.22);
  EXPECT_DOUBLE_EQ(c.stream_eps(), 1e-5 / (0.22 * 0.22));
  const ModelConfig plain = parse(
      kGranite31_2B.v4, {}, {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"});
  EXPECT_EQ(plain.stream_scale(), 1);
  EXPECT_EQ(plain.stream_eps(), 1e-5);
  EXPECT_EQ(plain.attention_scale, 1);  // not head_dim^-0.5
  EXPECT_EQ(plain.logit_scale, 1);
  const ModelConfig biased = parse(kGranite31_2B.v4, {{"attention_bias", true}, {"mlp_bias", true}});
  EXPECT_TRUE(biased.qkv_bias && biased.o_bias && biased.mlp_bias);
}

// ---- reading rules

TEST(Config, absent_keys_take_the_defaults_of_the_family) {
  const auto only = [](const char* type) { return parse_model_config({{"model_type", type}}, "test"); };
  const ModelConfig llama = only("llama");
  EXPECT_EQ(llama.num_kv_heads, 32);
  EXPECT_EQ(llama.norm_eps, 1e-6);
  EXPECT_EQ(llama.max_position_embeddings, 2048);
  EXPECT_EQ(only("mistral").num_kv_heads, 8);
  EXPECT_EQ(only("phi3").pad_token_id, 32000);
  EXPECT_EQ(only("olmo2").pad_token_id, 1);
  EXPECT_EQ(only("smollm3").pad_token_id, 128004);
  EXPECT_EQ(only("smollm3").ropes[0].theta, 2e6);
  EXPECT_EQ(only("gemma3_text").ropes[0].theta, 1e6);
  EXPECT_EQ(only("gemma2").attention_softcap, 50);
  EXPECT_EQ(only("cohere2").pad_token_id, 0);
  EXPECT_EQ(only("cohere2").logit_scale, 0.0625);
  EXPECT_EQ(only("cohere2").num_kv_heads, 64);
  EXPECT_EQ(windows(only("cohere2")), repeated("www.", 10));
  for (const char* type : {"glm", "glm4"}) {
    EXPECT_EQ(only(type).pad_token_id, 151329);
    EXPECT_EQ(only(type).norm_eps, 1.5625e-7);
    EXPECT_EQ(only(type).num_kv_heads, 2);
    EXPECT_EQ(only(type).max_position_embeddings, 131072);
    EXPECT_TRUE(only(type).qkv_bias);
  }
  EXPECT_EQ(only("granite").pad_token_id, -1);
  EXPECT_EQ(only("granite").max_position_embeddings, 2048);
  EXPECT_FALSE(only("granite").tie_word_embeddings);
}

TEST(Config, null_is_not_absent) {
  EXPECT_EQ(parse(kMistral7B_v01.v4, {{"num_key_value_heads", nullptr}}).num_kv_heads, 32);
  EXPECT_EQ(parse(kLlama31_8B.v4, {{"head_dim", nullptr}}).head_dim, 128);
  EXPECT_EQ(parse(kOLMo2_7B.v4, {{"pad_token_id", nullptr}}).pad_token_id, -1);
  expect_refusal(kLlama31_8B.v4, {{"hidden_size", nullptr}}, {"\"hidden_size\" is null", "whole number"});
  expect_refusal(kLlama31_8B.v4, {{"rms_norm_eps", nullptr}}, {"\"rms_norm_eps\" is null", "number"});
}

TEST(Config, a_negative_pad_token_counts_from_the_end_as_in_torch) {
  EXPECT_EQ(parse(kLlama31_8B.v4, {{"pad_token_id", -1}}).pad_token_id, 128255);
  expect_refusal(kLlama31_8B.v4, {{"pad_token_id", 128256}}, {"\"pad_token_id\" is 128256"});
  expect_refusal(kPhi3_mini_128k.v4, {{"pad_token_id", -32065}}, {"pad_token_id"});
  const std::string message = error_of([] { parse(kPhi3_mini_128k.v4, {{"vocab_size", 512}}, {"pad_token_id"}); });
  EXPECT_NE(message.find("write \"pad_token_id\": null"), std::string::npos) << message;
}

TEST(Config, rope_scaling_replaces_rope_parameters_whole_and_theta_inside_wins) {
  const json both = {{"rope_theta", 2e4},
                     {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}},
                     {"rope_parameters", {{"rope_type", "dynamic"}, {"factor", 3.0}, {"rope_theta", 7e4}}}};
  const RopeConfig a = parse(kLlama31_8B.v4, both).ropes[0];
  EXPECT_EQ(a.type, "linear");
  EXPECT_EQ(a.theta, 2e4);
  const RopeConfig b = parse(kLlama31_8B.v4, both, {"rope_scaling"}).ropes[0];
  EXPECT_EQ(b.type, "dynamic");
  EXPECT_EQ(b.theta, 7e4);
  EXPECT_EQ(parse(kLlama31_8B.v4, {{"rope_scaling", json::object()}}).ropes[0].type, "default");
  EXPECT_EQ(parse(kLlama31_8B.v4, {{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}}).ropes[0].type, "linear");
}

TEST(Config, original_positions_at_the_top_win_over_those_in_the_dict) {
  EXPECT_EQ(
      parse(kLlama31_8B.v4, {{"original_max_position_embeddings", 4096}}).ropes[0].original_max_position_embeddings,
      4096);
  const json no_original = {{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}}};
  EXPECT_EQ(parse(kLlama31_8B.v4, no_original).ropes[0].original_max_position_embeddings, 131072);
}

TEST(Config, yarn_reads_null_betas_as_defaults_and_a_null_factor_as_derived) {
  const json yarn = {{"rope_scaling",
                      {{"rope_type", "yarn"},
                       {"factor", nullptr},
                       {"beta_fast", nullptr},
                       {"beta_slow", 0},
                       {"truncate", false},
                       {"original_max_position_embeddings", 4096}}}};
  const RopeConfig rope = parse(kQwen25_7B.v4, yarn).ropes[0];
  EXPECT_FALSE(rope.factor.has_value());
  EXPECT_EQ(rope.beta_fast, 32);
  EXPECT_EQ(rope.beta_slow, 1);
  EXPECT_FALSE(rope.truncate);
  EXPECT_EQ(config_to_save(parse(kQwen25_7B.v4, yarn), "float32")["rope_scaling"]["factor"], 8.0);
}

TEST(Config, a_partial_rotary_factor_counts_only_where_the_family_heeds_it) {
  EXPECT_EQ(parse(kMistral7B_v03.v4, {{"partial_rotary_factor", 0.5}}).ropes[0].rotary_dim, 128);
  EXPECT_EQ(parse(kPhi3_mini_128k.v4, {{"partial_rotary_factor", 0.5}, {"rope_scaling", nullptr}}).ropes[0].rotary_dim,
            48);
  expect_refusal(kLlama31_8B.v4, {{"partial_rotary_factor", 0.5}},
                 {"\"partial_rotary_factor\" is 0.5", "cannot rotate a part"});
}

TEST(Config, layer_types_win_over_derivation) {
  json types = json::array();
  for (int l = 0; l < 26; l++) types.push_back(l < 3 ? "full_attention" : "sliding_attention");
  EXPECT_EQ(windows(parse(kGemma2_2B.v4, {{"layer_types", types}})), "..." + std::string(23, 'w'));
  EXPECT_EQ(ropes(parse(kGemma3_1B.v4, {{"layer_types", types}})), "000" + std::string(23, '1'));
}

TEST(Config, layers_may_attend_within_chunks) {
  json types(std::vector<std::string>(28, "full_attention"));
  types[3] = "chunked_attention";
  const ModelConfig c = parse(kQwen3_06B.v4, {{"layer_types", types}, {"attention_chunk_size", 8192}});
  for (size_t l = 0; l < 28; l++) EXPECT_EQ(c.layers[l].chunk, l == 3 ? 8192 : 0);
  EXPECT_EQ(c.layers[3].window, 0);
  const json saved = config_to_save(c, "bfloat16");
  EXPECT_EQ(saved.at("layer_types"), types);
  EXPECT_EQ(saved.at("attention_chunk_size"), 8192);
  expect_refusal(kQwen3_06B.v4, {{"layer_types", types}, {"attention_chunk_size", 0}},
                 {"\"attention_chunk_size\" is 0"});
  // Where a layer's type decides about its rotary embedding, this type says nothing.
  json of_gemma(std::vector<std::string>(26, "chunked_attention"));
  expect_refusal(kGemma3_1B.v4, {{"layer_types", of_gemma}, {"attention_chunk_size", 64}}, {"no rotary embedding"});
  expect_refusal(kLlama31_8B.v4, {{"layer_types", json(std::vector<std::string>(32, "chunked_attention"))}},
                 {"ignores it"});
}

TEST(Config, the_older_name_of_silu_is_accepted) {
  EXPECT_EQ(parse(kLlama31_8B.v4, {{"hidden_act", "swish"}}).activation, Activation::SwiGlu);
}

// ---- writing

TEST(ConfigSave, floats_have_a_point_and_whole_numbers_have_none) {
  const json saved = config_to_save(parse(kGemma2_2B.v4, {{"final_logit_softcapping", 30},
                                                          {"query_pre_attn_scalar", 256.0},
                                                          {"rope_theta", 10000},
                                                          {"initializer_range", 1},
                                                          {"attention_dropout", 0}}),
                                    "bfloat16");
  for (const char* key : {"rms_norm_eps", "initializer_range", "final_logit_softcapping", "attn_logit_softcapping",
                          "rope_theta", "attention_dropout"}) {
    EXPECT_TRUE(saved[key].is_number_float()) << key;
  }
  for (const char* key : {"query_pre_attn_scalar", "hidden_size", "head_dim", "sliding_window", "pad_token_id",
                          "max_position_embeddings"}) {
    EXPECT_TRUE(saved[key].is_number_integer()) << key;
  }
  EXPECT_EQ(json(30.0).dump(), "30.0");  // the library keeps the point
}

TEST(ConfigSave, both_layouts_and_both_dtype_keys_are_written) {
  const json saved = config_to_save(parse(kLlama31_8B.v5), "bfloat16");
  EXPECT_EQ(saved["torch_dtype"], "bfloat16");
  EXPECT_EQ(saved["dtype"], "bfloat16");
  EXPECT_EQ(saved["rope_theta"], 500000.0);
  EXPECT_EQ(saved["rope_scaling"]["rope_type"], "llama3");
  EXPECT_FALSE(saved["rope_scaling"].contains("rope_theta"));
  EXPECT_EQ(saved["rope_parameters"]["rope_theta"], 500000.0);
  EXPECT_EQ(saved["rope_parameters"]["factor"], 8.0);
  EXPECT_EQ(saved["tie_word_embeddings"], false);
  EXPECT_TRUE(saved["pad_token_id"].is_null());
  EXPECT_THROW(config_to_save(parse(kLlama31_8B.v5), "float16"), Error);
}

TEST(ConfigSave, windows_that_were_switched_on_stay_on) {
  const json on = {{"use_sliding_window", true}, {"max_window_layers", 20}, {"sliding_window", 512}};
  const ModelConfig config = parse(kQwen25_7B.v4, on);
  const json saved = config_to_save(config, "float32");
  EXPECT_EQ(saved["use_sliding_window"], true);
  EXPECT_EQ(windows(parse_model_config(saved, "saved")), windows(config));
}

TEST(ConfigSave, gemma_keeps_a_window_that_no_layer_uses_because_transformers_wants_a_number) {
  const json full = {{"layer_types", std::vector<std::string>(26, "full_attention")}, {"sliding_window", nullptr}};
  EXPECT_EQ(config_to_save(parse(kGemma2_2B.v4, full), "float32")["sliding_window"], 4096);
}

TEST(ConfigSave, a_rotary_key_that_was_ignored_is_not_carried_along) {
  const json saved = config_to_save(parse(kMistral7B_v03.v4, {{"partial_rotary_factor", 0.5}}), "float32");
  EXPECT_FALSE(saved.contains("partial_rotary_factor"));
}

TEST(ConfigSave, phi3_has_exactly_the_three_keys_that_transformers_4_takes) {
  const json saved = config_to_save(parse(kPhi4_mini.v5), "bfloat16");
  EXPECT_EQ(saved["rope_scaling"].size(), 3u);
  EXPECT_EQ(saved["rope_scaling"]["type"], "longrope");
  EXPECT_EQ(saved["original_max_position_embeddings"], 4096);
  EXPECT_EQ(saved["partial_rotary_factor"], 0.75);
  EXPECT_EQ(saved["rope_parameters"]["partial_rotary_factor"], 0.75);
}

TEST(ConfigSave, a_partial_factor_that_rounds_down_is_nudged_up) {
  const ModelConfig c =
      parse(kPhi3_mini_128k.v4, {{"head_dim", 98}, {"partial_rotary_factor", 0.0205}, {"rope_scaling", nullptr}});
  ASSERT_EQ(c.ropes[0].rotary_dim, 2);  // 98 * (2.0 / 98) is 1.9999999999999998
  const double saved = config_to_save(c, "float32")["partial_rotary_factor"];
  EXPECT_EQ(static_cast<int>(98 * saved), 2);
}

TEST(ConfigSave, olmo2_scaling_has_the_two_keys_that_transformers_4_takes) {
  const json saved =
      config_to_save(parse(kOLMo2_7B.v4, {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}}}}), "float32");
  EXPECT_EQ(saved["rope_scaling"], (json{{"type", "linear"}, {"factor", 2.0}}));
}

TEST(ConfigSave, gemma3_has_a_dict_for_each_layer_type) {
  const json saved = config_to_save(parse(kGemma3_1B.v4), "bfloat16");
  EXPECT_EQ(saved["rope_local_base_freq"], 10000.0);
  EXPECT_EQ(saved["rope_parameters"]["full_attention"]["rope_theta"], 1e6);
  EXPECT_EQ(saved["rope_parameters"]["sliding_attention"]["rope_theta"], 1e4);
  EXPECT_EQ(saved["layer_types"][4], "sliding_attention");
  EXPECT_EQ(saved["layer_types"][5], "full_attention");
}

TEST(ConfigSave, cohere2_has_its_own_eps_and_the_scale_of_its_logits) {
  const json saved = config_to_save(parse(kCommandR7B.v4, {{"logit_scale", 1}}), "bfloat16");
  EXPECT_TRUE(saved["logit_scale"].is_number_float());  // transformers 5 refuses 1
  EXPECT_EQ(saved["layer_norm_eps"], 1e-5);
  EXPECT_FALSE(saved.contains("rms_norm_eps"));
  EXPECT_EQ(saved["layer_types"][2], "sliding_attention");
  EXPECT_EQ(saved["layer_types"][3], "full_attention");
  EXPECT_EQ(saved["sliding_window"], 4096);
}

TEST(ConfigSave, glm_says_which_part_of_a_head_rotates_in_both_layouts) {
  const json saved = config_to_save(parse(kGLM4_9B_Chat.v4), "bfloat16");
  EXPECT_EQ(saved["partial_rotary_factor"], 0.5);
  EXPECT_EQ(saved["rope_parameters"]["partial_rotary_factor"], 0.5);
  EXPECT_EQ(saved["attention_bias"], true);
  EXPECT_EQ(config_to_save(parse(kGLM4_9B_0414.v4), "float32")["attention_bias"], false);
}

TEST(ConfigSave, granite_has_the_multipliers_that_were_read) {
  const json saved = config_to_save(parse(kGranite31_2B.v4, {{"embedding_multiplier", 12}}), "bfloat16");
  EXPECT_EQ(saved["embedding_multiplier"], 12.0);
  EXPECT_TRUE(saved["embedding_multiplier"].is_number_float());
  EXPECT_EQ(saved["residual_multiplier"], 0.22);
  EXPECT_EQ(saved["attention_multiplier"], 0.015625);
  EXPECT_EQ(saved["logits_scaling"], 8.0);
  EXPECT_EQ(saved["rms_norm_eps"], 1e-5);
}

TEST(ConfigSave, unknown_keys_are_carried_along) {
  const json others = {{"somebodys_key", {{"a", 1}}}, {"text_config", {{"b", 2}}}};
  const json saved = config_to_save(parse(kPhi3_mini_128k.v4, others), "float32");
  EXPECT_EQ(saved["text_config"], others["text_config"]);  // of a model without vision: nothing
  EXPECT_EQ(saved["somebodys_key"]["a"], 1);
  EXPECT_EQ(saved["auto_map"]["AutoModelForCausalLM"], "modeling_phi3.Phi3ForCausalLM");
}
