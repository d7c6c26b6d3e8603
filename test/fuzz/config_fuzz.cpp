// libFuzzer: any bytes as a config.json either give a model or throw Error; and a model that is read can be listed,
// saved, and read again as the same model.
//
//   clang++ -std=c++20 -g -O1 -I. -fsanitize=fuzzer,address,undefined test/fuzz/config_fuzz.cpp \
//     llama/{config,config_reader,config_rope,config_save,family,params,rope_tables}.cpp -lfmt -o config_fuzz
//   ./config_fuzz -max_total_time=60 -rss_limit_mb=1024 -timeout=5 test/fuzz/corpus/config
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "data/json.h"
#include "llama/config_reader.h"
#include "llama/params.h"

namespace {

void require(bool condition, const char* claim) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s\n", claim);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  ModelConfig config;
  try {
    config = parse_model_config(parse_json(text, "fuzz"), "fuzz");
  } catch (const Error&) {
    return 0;
  }
  const auto units = param_units(config);
  require(units.size() == static_cast<size_t>(config.num_layers) + 2, "a unit for the embedding, each block, the head");
  int64_t total = 0;
  for (const ParamUnit& unit : units) {
    for (const ParamSpec& p : unit.params) {
      require(p.shape.numel() > 0, "sizes do not overflow");
      total += p.shape.numel();
    }
  }
  require(total > 0 && total < (int64_t{1} << 60), "the number of parameters does not overflow");
  const nlohmann::json saved = config_to_save(config, "float32");
  const ModelConfig again = parse_model_config(parse_json(saved.dump(), "saved"), "saved");
  require(config_to_save(again, "float32") == saved, "a saved config.json reads back as the same model");
  return 0;
}
