// Fuzzes the reader of CONFIG.json: any text is either refused with an Error, or gives options whose echo gives the
// same options again.

#include <cstdlib>

#include "layers/core/check.h"
#include "llama/run_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  RunConfig run;
  try {
    run = parse_run_config_json({reinterpret_cast<const char*>(data), size}, "fuzz.json");
  } catch (const Error&) {
    return 0;
  }
  const std::string echo = to_json(run).dump();
  if (to_json(parse_run_config_json(echo, "echo")).dump() != echo) std::abort();
  if (describe(run, 80).empty()) std::abort();
  try {
    validate_run_config(run);
  } catch (const Error&) {
  }
  return 0;
}
