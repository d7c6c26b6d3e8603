// For tests of config.json: what is read, what would be saved, what is refused.
#pragma once

#include <gtest/gtest.h>

#include "llama/config.h"
#include "llama/params.h"
#include "test/testing.h"

inline ModelConfig parse(const nlohmann::json& hf) {
  return parse_model_config(hf, "dir/config.json");
}

/// The keys of `patch` replace those of `text`; the `absent` ones are gone.
inline nlohmann::json patched(const char* text, const nlohmann::json& patch,
                              const std::vector<std::string>& absent = {}) {
  nlohmann::json hf = nlohmann::json::parse(text);
  if (!patch.is_null()) hf.update(patch);
  for (const std::string& key : absent) hf.erase(key);
  return hf;
}
inline ModelConfig parse(const char* text, const nlohmann::json& patch = nlohmann::json::object(),
                         const std::vector<std::string>& absent = {}) {
  return parse(patched(text, patch, absent));
}

/// Every knob, as JSON: what would be saved if nothing were carried along.
inline nlohmann::json knobs(ModelConfig config) {
  config.hf = nlohmann::json::object();
  return config_to_save(config, "bfloat16");
}

/// Of all that is trained.
inline int64_t num_parameters(const ModelConfig& config) {
  int64_t n = 0;
  for (const ParamUnit& unit : param_units(config)) {
    for (const ParamSpec& p : unit.params) n += p.shape.numel();
  }
  return n;
}

/// The message names the file, and holds every one of `parts`.
inline void expect_refusal(const nlohmann::json& hf, const std::vector<std::string>& parts) {
  const std::string message = error_of([&] { parse(hf); });
  EXPECT_NE(message.find("dir/config.json"), std::string::npos) << message;
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << part << "\n  " << message;
}
inline void expect_refusal(const char* text, const nlohmann::json& patch, const std::vector<std::string>& parts) {
  SCOPED_TRACE(patch.dump());
  expect_refusal(patched(text, patch), parts);
}
