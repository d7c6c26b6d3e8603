// Reading and writing the mixture of experts of a config.json.
#pragma once

#include "llama/config_reader.h"
#include "llama/family.h"

/// The mixture of a family that has one, and which of config.layers have it. Needs intermediate_size and layers.
void read_moe(ModelConfig& config, const ConfigReader& reader, const Family& family);

/// Its keys, for transformers 4 and 5.
void save_moe(nlohmann::json& out, const ModelConfig& config, const Family& family);
