// The list of parameters: counts of published models, names and shapes on disk, the fused layout in memory.
#include "llama/params.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "llama/frozen.h"

#include "llama/config_reader.h"
#include "test/config_testing.h"
#include "test/hf_configs.h"

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

std::map<std::string, Shape> disk_tensors(const ModelConfig& config) {
  std::map<std::string, Shape> tensors;
  for (const ParamUnit& unit : param_units(config)) {
    for (const ParamSpec& p : unit.params) {
      for (const DiskTensor& d : p.disk) EXPECT_TRUE(tensors.emplace(d.hf_name, d.shape).second) << d.hf_name;
    }
  }
  return tensors;
}

std::vector<std::string> names(const ParamUnit& unit) {
  std::vector<std::string> list;
  for (const ParamSpec& p : unit.params) list.push_back(p.name);
  return list;
}

const ParamSpec& find(const ParamUnit& unit, const std::string& name) {
  for (const ParamSpec& p : unit.params) {
    if (p.name == name) return p;
  }
  fail("{} has no {}", unit.name, name);
}

/// Name and shape of each tensor in the model*.safetensors of a checkpoint.
std::map<std::string, std::vector<int64_t>> tensors_on_disk(const fs::path& dir) {
  std::map<std::string, std::vector<int64_t>> tensors;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("model") || !name.ends_with(".safetensors")) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    uint64_t size = 0;
    file.read(reinterpret_cast<char*>(&size), sizeof size);
    std::string header(size, ' ');
    file.read(header.data(), static_cast<std::streamsize>(size));
    const json tensors_of_file = json::parse(header);
    for (const auto& [tensor, about] : tensors_of_file.items()) {
      if (tensor != "__metadata__") tensors[tensor] = about["shape"].get<std::vector<int64_t>>();
    }
  }
  return tensors;
}

}  // namespace

TEST(Params, published_models_have_their_published_number_of_parameters) {
  const std::map<std::string, int64_t> published = {
      {"Llama31_8B", 8'030'261'248},    {"Llama32_1B", 1'235'814'400},     {"Mistral7B_v01", 7'241'732'096},
      {"Mistral7B_v03", 7'248'023'552}, {"Qwen25_05B", 494'032'768},       {"Qwen25_7B", 7'615'616'512},
      {"Qwen3_06B", 596'049'920},       {"Qwen3_8B", 8'190'735'360},       {"SmolLM3_3B", 3'075'098'624},
      {"OLMo2_7B", 7'298'617'344},      {"Phi3_mini_128k", 3'821'079'552}, {"Phi4_mini", 3'836'021'760},
      {"Gemma2_2B", 2'614'341'888},     {"Gemma3_1B", 999'885'952},        {"CommandR7B", 8'028'033'024},
      {"GLM4_9B_Chat", 9'399'951'360},  {"GLM4_9B_0414", 9'400'094'720},   {"Granite31_2B", 2'533'525'504}};
  for (const PublishedModel* model : kPublishedModels)
    EXPECT_EQ(num_parameters(parse(model->v4)), published.at(model->name)) << model->name;
}

TEST(Params, mixtures_of_experts_have_their_published_number_of_parameters) {
  const std::map<std::string, int64_t> published = {
      {"mixtral_8x7b", 46'702'792'704}, {"qwen1.5_moe_a2.7b", 14'315'784'192}, {"qwen3_30b_a3b", 30'532'122'624},
      {"gpt_oss_20b", 20'914'757'184},  {"glm_4.5_air", 106'852'245'504},      {"deepseek_v3", 671'026'404'352}};
  for (const auto& [name, parameters] : published) {
    EXPECT_EQ(num_parameters(load_model_config("configs/models/" + name + ".json")), parameters) << name;
  }
}

TEST(Params, fixtures_hold_exactly_the_listed_tensors) {
  int64_t checkpoints = 0;
  for (const auto& entry : fs::directory_iterator("test/fixtures")) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    const auto on_disk = tensors_on_disk(entry.path());
    if (on_disk.empty()) continue;
    checkpoints++;
    const ModelConfig config = load_model_config(entry.path());
    if (config.hf.contains("quantization_config")) continue;  // other tensors: quantized_test.cpp
    std::map<std::string, std::vector<int64_t>> listed;
    for (const auto& [name, shape] : disk_tensors(config)) listed[name] = {shape.begin(), shape.end()};
    for (const TensorToWrite& frozen : frozen_tensors(config)) listed[frozen.name] = frozen.shape;
    for (const auto& [name, shape] : on_disk) {
      const auto it = listed.find(name);
      if (it == listed.end()) {
        EXPECT_TRUE(is_harmless_extra_tensor(config, name)) << entry.path() << " " << name;
        continue;
      }
      EXPECT_EQ(it->second, shape) << entry.path() << " " << name;
      listed.erase(it);
    }
    EXPECT_TRUE(listed.empty()) << entry.path() << " lacks " << (listed.empty() ? "" : listed.begin()->first);
  }
  EXPECT_GE(checkpoints, 1);
}

TEST(Params, disk_tensors_cover_each_parameter_in_order) {
  for (const PublishedModel* model : kPublishedModels) {
    for (const ParamUnit& unit : param_units(parse(model->v4))) {
      for (const ParamSpec& p : unit.params) {
        int64_t next = 0;
        for (const DiskTensor& d : p.disk) {
          EXPECT_EQ(d.offset, next) << model->name << " " << d.hf_name;
          next += d.shape.numel();
        }
        EXPECT_EQ(next, p.shape.numel()) << model->name << " " << unit.name << " " << p.name;
      }
    }
  }
}

TEST(Params, units_follow_the_forward_pass) {
  const auto units = param_units(parse(kMistral7B_v03.v4));
  ASSERT_EQ(units.size(), 34u);
  EXPECT_EQ(units[0].name, "embedding");
  EXPECT_EQ(units[1].name, "block 0");
  EXPECT_EQ(units[32].name, "block 31");
  EXPECT_EQ(units[33].name, "head");
  EXPECT_EQ(names(units[0]), (std::vector<std::string>{"embed_tokens.weight"}));
  EXPECT_EQ(names(units[1]),
            (std::vector<std::string>{"attn_in_norm.weight", "qkv_proj.weight", "o_proj.weight", "mlp_in_norm.weight",
                                      "gate_up_proj.weight", "down_proj.weight"}));
  EXPECT_EQ(names(units[33]), (std::vector<std::string>{"final_norm.weight", "lm_head.weight"}));
}

TEST(Params, a_tied_head_has_no_weight_of_its_own) {
  EXPECT_EQ(names(param_units(parse(kLlama32_1B.v4)).back()), (std::vector<std::string>{"final_norm.weight"}));
}

TEST(Params, q_k_and_v_are_row_ranges_of_one_weight_and_one_bias) {
  const ParamUnit block = param_units(parse(kQwen25_05B.v4))[4];
  const ParamSpec& qkv = find(block, param_name::kQkv);
  EXPECT_EQ(qkv.shape, (Shape{896 + 128 + 128, 896}));
  ASSERT_EQ(qkv.disk.size(), 3u);
  EXPECT_EQ(qkv.disk[0].hf_name, "model.layers.3.self_attn.q_proj.weight");
  EXPECT_EQ(qkv.disk[1].hf_name, "model.layers.3.self_attn.k_proj.weight");
  EXPECT_EQ(qkv.disk[1].shape, (Shape{128, 896}));
  EXPECT_EQ(qkv.disk[1].offset, 896 * 896);
  EXPECT_EQ(qkv.disk[2].hf_name, "model.layers.3.self_attn.v_proj.weight");
  EXPECT_EQ(qkv.disk[2].offset, (896 + 128) * 896);
  const ParamSpec& bias = find(block, param_name::kQkvBias);
  EXPECT_EQ(bias.shape, (Shape{1152}));
  EXPECT_EQ(bias.init, Init::Zero);
  EXPECT_EQ(bias.disk[2].hf_name, "model.layers.3.self_attn.v_proj.bias");
  EXPECT_EQ(bias.disk[2].offset, 1024);
  EXPECT_THROW(find(block, param_name::kOBias), Error);  // Qwen2 has none on o
  const ParamSpec& gate_up = find(block, param_name::kGateUp);
  EXPECT_EQ(gate_up.shape, (Shape{2 * 4864, 896}));
  EXPECT_EQ(gate_up.disk[0].hf_name, "model.layers.3.mlp.gate_proj.weight");
  EXPECT_EQ(gate_up.disk[1].hf_name, "model.layers.3.mlp.up_proj.weight");
}

TEST(Params, phi3_is_fused_on_disk_too) {
  const auto units = param_units(parse(kPhi4_mini.v4));
  const ParamSpec& qkv = find(units[1], param_name::kQkv);
  ASSERT_EQ(qkv.disk.size(), 1u);
  EXPECT_EQ(qkv.disk[0].hf_name, "model.layers.0.self_attn.qkv_proj.weight");
  EXPECT_EQ(qkv.disk[0].shape, (Shape{(24 + 8 + 8) * 128, 3072}));
  const ParamSpec& gate_up = find(units[1], param_name::kGateUp);
  ASSERT_EQ(gate_up.disk.size(), 1u);
  EXPECT_EQ(gate_up.disk[0].hf_name, "model.layers.0.mlp.gate_up_proj.weight");
}

TEST(Params, glm_has_q_k_and_v_apart_and_gate_up_in_one_on_disk) {
  const auto glm = disk_tensors(parse(kGLM4_9B_Chat.v4));
  EXPECT_EQ(glm.at("model.layers.0.self_attn.q_proj.weight"), (Shape{4096, 4096}));
  EXPECT_EQ(glm.at("model.layers.0.self_attn.k_proj.bias"), (Shape{256}));
  EXPECT_EQ(glm.count("model.layers.0.self_attn.o_proj.bias"), 0u);
  EXPECT_EQ(glm.at("model.layers.0.mlp.gate_up_proj.weight"), (Shape{2 * 13696, 4096}));
  EXPECT_EQ(glm.count("model.layers.0.mlp.gate_proj.weight"), 0u);
}

TEST(Params, norms_are_where_the_family_has_them) {
  const auto gemma = disk_tensors(parse(kGemma3_1B.v4));
  for (const char* norm :
       {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}) {
    EXPECT_EQ(gemma.at(fmt::format("model.layers.7.{}.weight", norm)), (Shape{1152}));
  }
  EXPECT_EQ(gemma.at("model.layers.7.self_attn.q_norm.weight"), (Shape{256}));
  EXPECT_EQ(gemma.at("model.layers.7.self_attn.k_norm.weight"), (Shape{256}));

  const auto olmo = disk_tensors(parse(kOLMo2_7B.v4, {{"num_key_value_heads", 8}}));
  EXPECT_EQ(olmo.at("model.layers.0.self_attn.q_norm.weight"), (Shape{4096}));
  EXPECT_EQ(olmo.at("model.layers.0.self_attn.k_norm.weight"), (Shape{1024}));
  EXPECT_EQ(olmo.count("model.layers.0.input_layernorm.weight"), 0u);

  const ParamUnit block = param_units(parse(kGemma2_2B.v4))[1];
  EXPECT_EQ(find(block, param_name::kAttnOutNorm).disk[0].hf_name, "model.layers.0.post_attention_layernorm.weight");
  EXPECT_EQ(find(block, param_name::kMlpInNorm).disk[0].hf_name, "model.layers.0.pre_feedforward_layernorm.weight");
  const ParamUnit glm4 = param_units(parse(kGLM4_9B_0414.v4))[1];
  EXPECT_EQ(find(glm4, param_name::kAttnInNorm).disk[0].hf_name, "model.layers.0.input_layernorm.weight");
  EXPECT_EQ(find(glm4, param_name::kAttnOutNorm).disk[0].hf_name, "model.layers.0.post_self_attn_layernorm.weight");
  EXPECT_EQ(find(glm4, param_name::kMlpInNorm).disk[0].hf_name, "model.layers.0.post_attention_layernorm.weight");
  EXPECT_EQ(find(glm4, param_name::kMlpOutNorm).disk[0].hf_name, "model.layers.0.post_mlp_layernorm.weight");
  EXPECT_EQ(names(param_units(parse(kCommandR7B.v4))[1]),
            (std::vector<std::string>{"attn_in_norm.weight", "qkv_proj.weight", "o_proj.weight", "gate_up_proj.weight",
                                      "down_proj.weight"}));
  const ParamUnit llama = param_units(parse(kLlama31_8B.v4))[1];
  EXPECT_EQ(find(llama, param_name::kMlpInNorm).disk[0].hf_name, "model.layers.0.post_attention_layernorm.weight");
}

TEST(Params, a_fresh_norm_multiplies_by_one) {
  for (const PublishedModel* model : kPublishedModels) {
    const ModelConfig config = parse(model->v4);
    for (const ParamUnit& unit : param_units(config)) {
      for (const ParamSpec& p : unit.params) {
        if (p.name.find("norm") == std::string::npos) continue;
        EXPECT_EQ(p.init, config.norm == NormKind::OnePlus ? Init::Zero : Init::One) << model->name << " " << p.name;
      }
    }
  }
}

TEST(Params, biases_are_where_the_config_says) {
  const auto with = [](const char* text, const json& patch) { return disk_tensors(parse(text, patch)); };
  const auto llama = with(kLlama31_8B.v4, {{"attention_bias", true}, {"mlp_bias", true}});
  for (const char* module : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
    EXPECT_EQ(llama.count(fmt::format("model.layers.31.{}.bias", module)), 1u) << module;
  }
  const auto qwen3 = with(kQwen3_06B.v4, {{"attention_bias", true}});
  EXPECT_EQ(qwen3.count("model.layers.0.self_attn.o_proj.bias"), 1u);
  EXPECT_EQ(qwen3.count("model.layers.0.mlp.down_proj.bias"), 0u);
  for (const auto& [name, shape] : with(kQwen3_06B.v4, json::object())) EXPECT_FALSE(name.ends_with(".bias")) << name;
}

TEST(Params, only_known_leftovers_are_harmless) {
  const ModelConfig untied = parse(kLlama31_8B.v4), tied = parse(kLlama32_1B.v4);
  EXPECT_TRUE(is_harmless_extra_tensor(untied, "model.layers.3.self_attn.rotary_emb.inv_freq"));
  EXPECT_TRUE(is_harmless_extra_tensor(untied, "model.rotary_emb.inv_freq"));
  EXPECT_TRUE(is_harmless_extra_tensor(tied, "lm_head.weight"));
  EXPECT_FALSE(is_harmless_extra_tensor(untied, "lm_head.weight"));
  EXPECT_FALSE(is_harmless_extra_tensor(tied, "model.layers.3.self_attn.q_proj.bias"));
  EXPECT_FALSE(is_harmless_extra_tensor(tied, "xinv_freq"));
  // Of the 3 layers of this fixture none predicts further tokens: a checkpoint may have them behind.
  const ModelConfig glm = load_model_config("test/fixtures/glm4_moe");
  EXPECT_TRUE(is_mtp_tensor(glm, "model.layers.3.eh_proj.weight"));
  EXPECT_TRUE(is_harmless_extra_tensor(glm, "model.layers.3.eh_proj.weight"));
  EXPECT_FALSE(is_mtp_tensor(glm, "model.layers.2.eh_proj.weight"));
  EXPECT_FALSE(is_mtp_tensor(untied, "model.layers.99.eh_proj.weight"));
}
