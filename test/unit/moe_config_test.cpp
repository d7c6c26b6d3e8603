// Mixtures of experts, sinks and latent attention in config.json: defaults, aliases, which layers, what is refused, and
// that what is saved is read back as it was.
#include "test/config_testing.h"

namespace {

using nlohmann::json;

/// The config.json of a family with all defaults, but for `patch`.
json of_family(const char* type, const json& patch = json::object()) {
  json hf = {{"model_type", type}};
  if (type == std::string("glm4_moe")) hf["head_dim"] = 128;  // its default width is no multiple of its heads
  if (!patch.is_null()) hf.update(patch);
  return hf;
}

std::string moe_layers(const ModelConfig& config) {
  std::string text;
  for (const LayerConfig& layer : config.layers) text += layer.is_moe ? 'e' : '.';
  return text;
}

TEST(MoeConfig, absent_keys_take_the_defaults_of_the_family) {
  const ModelConfig mixtral = parse(of_family("mixtral")), qwen2 = parse(of_family("qwen2_moe")),
                    qwen3 = parse(of_family("qwen3_moe")), glm = parse(of_family("glm4_moe")),
                    oss = parse(of_family("gpt_oss")), deepseek = parse(of_family("deepseek_v3"));
  EXPECT_EQ(mixtral.moe.router.num_experts, 8);
  EXPECT_EQ(mixtral.moe.router.top_k, 2);
  EXPECT_EQ(mixtral.moe.intermediate_size, 14336);
  EXPECT_EQ(mixtral.moe.router.score, RouterScore::SoftmaxSelected);
  EXPECT_EQ(qwen2.moe.router.num_experts, 60);
  EXPECT_EQ(qwen2.moe.shared_intermediate_size, 5632);
  EXPECT_TRUE(qwen2.moe.has_shared_gate && qwen2.qkv_bias && !qwen2.o_bias);
  EXPECT_EQ(qwen3.moe.router.score, RouterScore::SoftmaxAll);  // norm_topk_prob is false
  EXPECT_EQ(qwen3.moe.intermediate_size, 768);
  EXPECT_EQ(qwen3.head_dim, 64);
  EXPECT_EQ(moe_layers(glm).substr(0, 3), ".ee");
  EXPECT_EQ(glm.qk_norm, QkNorm::None);
  EXPECT_TRUE(oss.has_sinks && oss.qkv_bias && oss.o_bias && oss.moe.has_biases);
  EXPECT_EQ(oss.moe.gate.kind, GateKind::Clamped);
  EXPECT_EQ(oss.moe.gate.limit, 7);
  EXPECT_EQ(oss.ropes[0].type, "yarn");
  EXPECT_FALSE(oss.ropes[0].truncate);
  EXPECT_EQ(oss.layers[0].window, 128);
  EXPECT_EQ(oss.layers[1].window, 0);
  EXPECT_EQ(deepseek.head_dim, 192);
  EXPECT_EQ(deepseek.o_dim(), 128 * 128);
  EXPECT_EQ(deepseek.ropes[0].rotary_dim, 64);
  EXPECT_EQ(deepseek.ropes[0].pairing, RopePairing::Interleaved);
  EXPECT_EQ(deepseek.moe.router.num_groups, 8);
  EXPECT_EQ(deepseek.moe.router.scale, 2.5);
  EXPECT_EQ(moe_layers(deepseek).substr(0, 5), "...ee");
}

TEST(MoeConfig, the_temperature_of_yarn_is_in_the_scale_of_latent_attention) {
  const ModelConfig c = parse(of_family("deepseek_v3", {{"rope_scaling",
                                                         {{"type", "yarn"},
                                                          {"factor", 40},
                                                          {"mscale", 1.0},
                                                          {"mscale_all_dim", 1.0},
                                                          {"original_max_position_embeddings", 4096}}}}));
  EXPECT_NEAR(c.attention_scale, 0.13523378, 1e-8);
  EXPECT_EQ(make_rope_table(c.ropes[0], 1).attention_factor, 1);
}

TEST(MoeConfig, other_names_of_the_number_of_experts) {
  EXPECT_EQ(parse(of_family("qwen3_moe", {{"num_local_experts", 16}})).moe.router.num_experts, 16);
  EXPECT_EQ(parse(of_family("mixtral", {{"num_experts", 4}})).moe.router.num_experts, 4);
  EXPECT_EQ(parse(of_family("deepseek_v3", {{"num_local_experts", 16}, {"n_group", 4}})).moe.router.num_experts, 16);
  expect_refusal(of_family("mixtral", {{"num_experts", 4}, {"num_local_experts", 8}}),
                 {"num_experts", "another number"});
  expect_refusal(of_family("qwen2_moe", {{"num_local_experts", 4}}), {"num_local_experts", "ignores"});
  expect_refusal(of_family("qwen2", {{"num_experts", 4}}), {"num_experts", "no experts"});
}

TEST(MoeConfig, which_layers_have_experts) {
  const json four = {{"num_hidden_layers", 4}};
  const auto with = [&](json patch) {
    patch.update(four);
    return patch;
  };
  EXPECT_EQ(moe_layers(parse(of_family("qwen3_moe", with({{"decoder_sparse_step", 2}})))), ".e.e");
  EXPECT_EQ(moe_layers(parse(of_family("qwen3_moe", with({{"mlp_only_layers", {0, 3}}})))), ".ee.");
  EXPECT_EQ(moe_layers(parse(of_family("deepseek_v3", with({{"first_k_dense_replace", 0}})))), "eeee");
  const ModelConfig dense = parse(of_family("glm4_moe", with({{"first_k_dense_replace", 9}})));
  EXPECT_EQ(moe_layers(dense), "....");
  EXPECT_FALSE(dense.moe);
  expect_refusal(of_family("qwen3_moe", with({{"mlp_only_layers", {4}}})), {"mlp_only_layers", "4 is no layer of 4"});
}

TEST(MoeConfig, what_would_be_ignored_or_is_not_supported_is_refused) {
  const struct {
    const char* type;
    json patch;
    std::vector<std::string> parts;
  } kCases[] = {
      {"mixtral", {{"router_jitter_noise", 0.1}}, {"router_jitter_noise", "set it to 0.0"}},
      {"mixtral", {{"num_experts_per_tok", 9}}, {"num_experts_per_tok", "8 experts"}},
      {"glm4_moe", {{"output_router_logits", true}}, {"output_router_logits", "no load-balancing loss"}},
      {"deepseek_v3", {{"n_group", 7}}, {"n_group", "equal size"}},
      {"deepseek_v3", {{"topk_group", 9}}, {"topk_group"}},
      {"deepseek_v3", {{"num_key_value_heads", 8}}, {"num_key_value_heads", "latent attention"}},
      {"deepseek_v3", {{"v_head_dim", 200}}, {"v_head_dim", "wider"}},
      {"qwen2_moe", {{"use_sliding_window", true}}, {"use_sliding_window", "disagree"}},
      {"llama", {{"kv_lora_rank", 512}}, {"kv_lora_rank", "latent"}},
      {"gpt_oss", {{"quantization_config", {{"quant_method", "gptq"}}}}, {"quantization_config", "mxfp4"}},
      {"deepseek_v3",
       {{"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {64, 64}}}}},
       {"quantization_config", "[128, 128]"}},
  };
  for (const auto& c : kCases) expect_refusal(of_family(c.type, c.patch), c.parts);
}

TEST(MoeConfig, the_loss_of_the_load_is_on_when_the_config_asks_for_it) {
  EXPECT_EQ(parse(of_family("qwen3_moe")).moe.balance_coef, 0);
  EXPECT_EQ(parse(of_family("qwen3_moe", {{"output_router_logits", true}})).moe.balance_coef, 1e-3);
  EXPECT_EQ(
      parse(of_family("mixtral", {{"output_router_logits", true}, {"router_aux_loss_coef", 0.02}})).moe.balance_coef,
      0.02);
}

TEST(MoeConfig, what_is_saved_is_read_as_it_was) {
  for (const char* type : {"mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"}) {
    json patch = {{"num_hidden_layers", 5}};
    if (type != std::string("glm4_moe") && type != std::string("deepseek_v3")) patch["output_router_logits"] = true;
    if (type == std::string("qwen3_moe")) patch["mlp_only_layers"] = {1}, patch["norm_topk_prob"] = true;
    if (type == std::string("gpt_oss")) patch["quantization_config"] = {{"quant_method", "mxfp4"}};
    if (type == std::string("deepseek_v3")) patch["q_lora_rank"] = nullptr, patch["rope_interleave"] = false;
    const ModelConfig config = parse(of_family(type, patch));
    const json saved = config_to_save(config, "bfloat16");
    EXPECT_FALSE(saved.contains("quantization_config"));
    const ModelConfig again = parse_model_config(saved, "saved");
    EXPECT_EQ(config_to_save(again, "bfloat16"), saved) << type;
    EXPECT_EQ(moe_layers(again), moe_layers(config)) << type;
    EXPECT_EQ(again.moe.router.score, config.moe.router.score) << type;
    EXPECT_EQ(again.moe.balance_coef, config.moe.balance_coef) << type;
    EXPECT_EQ(again.attention_scale, config.attention_scale) << type;
  }
}

}  // namespace
