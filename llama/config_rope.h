// Reading the rotary embedding of a config.json: both layouts (`rope_theta` + `rope_scaling`, and `rope_parameters`).
#pragma once

#include <vector>

#include "llama/config_reader.h"
#include "llama/family.h"

/// The rotary tables of a model: one, or for a family with local tables {global, local}. Needs head_dim and
/// max_position_embeddings of `config`.
std::vector<RopeConfig> read_ropes(const ConfigReader& reader, const Family& family, const ModelConfig& config);
