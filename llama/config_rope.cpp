// The rules by which transformers reads rotary embeddings. A non-empty `rope_scaling` replaces `rope_parameters` whole;
// theta and partial_rotary_factor come from inside the dict, else from the top level, else from the family.
#include "llama/config_rope.h"

#include <algorithm>

namespace {

constexpr double kMaxTheta = 1e30, kMaxFactor = 1e9;
constexpr int64_t kMaxPositions = int64_t{1} << 40;

std::string listed(const std::vector<std::string_view>& names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

/// "default" when the dict names no type; "su" and "yarn" are older names of Phi-3's longrope.
std::string read_type(const ConfigReader& dict, const Family& family) {
  const char* key = dict.find("rope_type") ? "rope_type" : "type";
  std::string type = dict.text(key, "");
  if (type.empty()) {
    for (const char* scaling : {"factor", "low_freq_factor", "short_factor", "long_factor"}) {
      if (!dict.has(scaling)) continue;
      dict.refuse(scaling, "but there is no \"rope_type\" beside it, so transformers ignores it; name the type ({})",
                  listed(family.rope_types));
    }
    return "default";
  }
  const bool is_phi3 = family.rope_scaling_keys == RopeScalingKeys::TypeAndLists;
  if (is_phi3 && (type == "su" || type == "yarn")) type = "longrope";
  if (family.vision && !family.vision->mrope_section.empty() && type == "mrope") type = "default";
  if (std::find(family.rope_types.begin(), family.rope_types.end(), type) == family.rope_types.end()) {
    dict.refuse(key, "not a rotary embedding that is supported for {}: {}", family.model_type,
                listed(family.rope_types));
  }
  return type;
}

/// O: the top-level key (with Phi-3's default), else the one in the dict, else P.
int64_t read_original_positions(const ConfigReader& top, const ConfigReader& dict, const Family& family, int64_t P) {
  const char* key = "original_max_position_embeddings";
  const auto in_dict = dict.optional_integer(key, P, 2, kMaxPositions, true);
  if (family.local_rope_theta) {
    if (top.has(key)) {
      top.refuse(key, "transformers 5 reads it inside rope_scaling only for {}: move it there", family.model_type);
    }
    return in_dict.value_or(P);
  }
  if (top.has(key)) return top.integer(key, 0, 2, kMaxPositions, true);
  return family.original_max_position_embeddings ? family.original_max_position_embeddings : in_dict.value_or(P);
}

void read_llama3(RopeConfig& rope, const ConfigReader& dict) {
  for (const char* key : {"low_freq_factor", "high_freq_factor"}) {
    if (!dict.has(key)) dict.refuse(key, "rope type llama3 needs it");
  }
  rope.low_freq_factor = dict.number("low_freq_factor", 0, 0, kMaxFactor, true);
  rope.high_freq_factor = dict.number("high_freq_factor", 0, 0, kMaxFactor, true);
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    dict.refuse("high_freq_factor", "expected more than low_freq_factor, {}", rope.low_freq_factor);
  }
}

void read_yarn(RopeConfig& rope, const ConfigReader& dict, const Family& family) {
  const auto beta = [&](const char* key, double fallback) {
    const double value = dict.optional_number(key, fallback, 0, kMaxFactor).value_or(0);
    return value == 0 ? fallback : value;
  };
  rope.beta_fast = beta("beta_fast", 32);
  rope.beta_slow = beta("beta_slow", 1);
  if (rope.beta_fast <= rope.beta_slow) dict.refuse("beta_fast", "expected more than beta_slow, {}", rope.beta_slow);
  rope.truncate = dict.boolean("truncate", true);
  if (!rope.truncate && family.local_rope_theta) {
    dict.refuse("truncate", "transformers 5 does not read it for {}: remove it", family.model_type);
  }
  rope.mscale = dict.optional_number("mscale", std::nullopt, 0, kMaxFactor);
  rope.mscale_all_dim = dict.optional_number("mscale_all_dim", std::nullopt, 0, kMaxFactor);
}

/// Refuses what a saved config.json could not tell transformers 4.
void check_scaling_keys(const RopeConfig& rope, const ConfigReader& dict, const Family& family) {
  if (family.rope_scaling_keys == RopeScalingKeys::TypeAndFactor && *rope.factor <= 1) {
    dict.refuse("factor", "expected more than 1: transformers 4 opens no other {} file", family.model_type);
  }
  if (family.rope_scaling_keys != RopeScalingKeys::TypeAndLists) return;
  for (const char* key : {"factor", "attention_factor"}) {
    if (!dict.has(key)) continue;
    dict.refuse(key,
                "transformers 4 opens no {} file with it: remove it, and the factor is max_position_embeddings / {}",
                family.model_type, rope.original_max_position_embeddings);
  }
}

/// Everything but theta and the rotated width, from `dict`.
void read_scaling(RopeConfig& rope, const ConfigReader& top, const ConfigReader& dict, const Family& family) {
  rope.type = read_type(dict, family);
  if (rope.type == "default") return;
  const bool has_lists = rope.type == "longrope", may_derive = rope.type == "yarn" || has_lists;
  if (!has_lists && !dict.find("factor")) dict.refuse("factor", "rope type {} needs it", rope.type);
  if (!may_derive && !dict.has("factor")) dict.refuse("factor", "rope type {} needs a number", rope.type);
  rope.factor = dict.optional_number("factor", std::nullopt, 0, kMaxFactor, true);
  if (rope.type == "linear" || rope.type == "dynamic") return check_scaling_keys(rope, dict, family);

  rope.original_max_position_embeddings = read_original_positions(top, dict, family, rope.max_position_embeddings);
  if (rope.type == "llama3") return read_llama3(rope, dict);
  rope.attention_factor = dict.optional_number("attention_factor", std::nullopt, 0, kMaxFactor, true);
  if (rope.type == "yarn") return read_yarn(rope, dict, family);
  check_scaling_keys(rope, dict, family);
}

/// r: int(head_dim * partial_rotary_factor). With type "default", only some families heed the factor.
int64_t read_rotary_dim(const ConfigReader& top, const ConfigReader& dict, const Family& family, const RopeConfig& rope,
                        int64_t head_dim) {
  const char* key = "partial_rotary_factor";
  const ConfigReader& holder = dict.find(key) ? dict : top;
  double partial = holder.optional_number(key, family.defaults.partial_rotary_factor, 0, 1, true).value_or(1.0);
  if (!family.rotates_partially && partial != 1.0) {
    if (rope.type != "default") holder.refuse(key, "{} cannot rotate a part of a head", family.model_type);
    partial = 1.0;
  }
  const int64_t r = static_cast<int64_t>(static_cast<double>(head_dim) * partial);
  CHECK(r >= 2 && r % 2 == 0, "{}: the rotary width must be even and at least 2, it is {} (head_dim {}, {} {})",
        top.where(), r, head_dim, key, partial);
  if (rope.type == "dynamic" && r < 4) top.refuse("head_dim", "rope type dynamic needs a rotary width above 2");
  return r;
}

/// Where mrope_section is absent, transformers 5 has a default, and 4 needs it.
nlohmann::json read_mrope(const ConfigReader& dict, const VisionRules& vision) {
  nlohmann::json mrope = nlohmann::json::object();
  if (vision.mrope_section.empty()) return mrope;
  mrope["mrope_section"] = vision.mrope_section;
  for (const char* key : {"mrope_section", "mrope_interleaved"}) {
    if (dict.has(key)) mrope[key] = *dict.find(key);
  }
  return mrope;
}

RopeConfig read_rope(const ConfigReader& top, const ConfigReader& dict, const Family& family,
                     const ModelConfig& config) {
  RopeConfig rope;
  rope.pairing = family.rope_pairing;
  rope.max_position_embeddings = config.max_position_embeddings;
  rope.theta = dict.number("rope_theta", top.number("rope_theta", family.defaults.rope_theta, 1, kMaxTheta, true), 1,
                           kMaxTheta, true);
  if (family.scaled_rope && !dict.has("rope_type") && !dict.has("type")) {
    const double theta = rope.theta;
    rope = *family.scaled_rope;
    rope.theta = theta, rope.max_position_embeddings = config.max_position_embeddings;
  } else {
    read_scaling(rope, top, dict, family);
  }
  if (family.vision) rope.mrope = read_mrope(dict, *family.vision);
  rope.rotary_dim = config.mla ? config.mla.rope : read_rotary_dim(top, dict, family, rope, config.head_dim);
  if (config.mla && !top.boolean("rope_interleave", true)) rope.pairing = RopePairing::HalfSplit;
  if (rope.type == "longrope") {
    const size_t half = static_cast<size_t>(rope.rotary_dim / 2);
    rope.short_factor = dict.positive_numbers("short_factor", half);
    rope.long_factor = dict.positive_numbers("long_factor", half);
  }
  return rope;
}

bool is_nested(const ConfigReader& dict) {
  return dict.find("full_attention") || dict.find("sliding_attention");
}

/// One table for all layers.
std::vector<RopeConfig> read_shared(const ConfigReader& top, const Family& family, const ModelConfig& config) {
  static const nlohmann::json kEmpty = nlohmann::json::object();
  std::optional<ConfigReader> dict = top.child("rope_scaling");
  const char* key = dict ? "rope_scaling" : "rope_parameters";
  if (!dict) dict = top.child("rope_parameters");
  if (dict && is_nested(*dict)) {
    top.refuse(key, "{} has one rotary table for all layers: give its keys without a layer type around them",
               family.model_type);
  }
  return {read_rope(top, dict ? *dict : ConfigReader(kEmpty, top.where()), family, config)};
}

/// {global, local}: rope_parameters holds a dict for each layer type, and rope_scaling is merged into the global one.
std::vector<RopeConfig> read_global_and_local(const ConfigReader& top, const Family& family,
                                              const ModelConfig& config) {
  const std::optional<ConfigReader> parameters = top.child("rope_parameters"), scaling = top.child("rope_scaling");
  if (parameters && !is_nested(*parameters)) {
    top.refuse(
        "rope_parameters",
        "{} wants one dict for \"full_attention\" and one for \"sliding_attention\"; transformers ignores a flat one",
        family.model_type);
  }
  nlohmann::json full = nlohmann::json::object(), sliding = nlohmann::json::object();
  if (parameters) {
    if (const auto dict = parameters->child("full_attention")) full = dict->object();
    if (const auto dict = parameters->child("sliding_attention")) sliding = dict->object();
  }
  if (scaling) {
    if (is_nested(*scaling))
      top.refuse("rope_scaling", "expected the keys of the full_attention layers, not a dict for each layer type");
    if (scaling->find("type") && !scaling->find("rope_type"))
      scaling->refuse("type", "transformers 5 reads \"rope_type\" only for {}: rename the key", family.model_type);
    full.update(scaling->object());
  }
  const std::string prefix = scaling ? "rope_scaling" : "rope_parameters.full_attention";
  std::vector<RopeConfig> ropes = {read_rope(top, ConfigReader(full, top.where(), prefix), family, config)};

  const ConfigReader local_dict(sliding, top.where(), "rope_parameters.sliding_attention");
  RopeConfig local;
  local.type = read_type(local_dict, family);
  CHECK(local.type == "default",
        "{}: rope_parameters.sliding_attention has type \"{}\"; only \"default\" can be saved for transformers 4",
        top.where(), local.type);
  local.max_position_embeddings = config.max_position_embeddings;
  local.theta =
      local_dict.number("rope_theta", top.number("rope_local_base_freq", family.local_rope_theta, 1, kMaxTheta, true),
                        1, kMaxTheta, true);
  local.rotary_dim = config.head_dim;
  ropes.push_back(local);
  return ropes;
}

}  // namespace

std::vector<RopeConfig> read_ropes(const ConfigReader& reader, const Family& family, const ModelConfig& config) {
  std::vector<RopeConfig> ropes =
      family.local_rope_theta ? read_global_and_local(reader, family, config) : read_shared(reader, family, config);
  for (const RopeConfig& rope : ropes) {
    for (const int64_t tokens : {int64_t{1}, rope.original_max_position_embeddings + 1}) {
      try {
        make_rope_table(rope, tokens);
      } catch (const Error& e) {
        fail("{}: {}", reader.where(), e.what());
      }
    }
  }
  return ropes;
}
