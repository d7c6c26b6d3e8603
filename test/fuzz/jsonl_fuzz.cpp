// Fuzzes the JSONL reader: one input is one line. Whatever it is, the parser accepts it or throws Error; and what it
// accepts, a full JSON parser reads as the same numbers (where it does not refuse bytes that are not UTF-8, or a number
// beyond double in a value that is skipped). Half a surrogate pair in a skipped text is JSON, and what Python's json
// writes for bytes that were not UTF-8; nlohmann refuses it, so it is given another escape instead.
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "data/jsonl.h"

namespace {

/// `line` with \uD800 to \uDFFF, in any case of letters, turned into \u0041.
std::string without_surrogates(std::string line) {
  constexpr std::string_view kSecondDigits = "89abcdefABCDEF";
  for (size_t at = line.find("\\u"); at != std::string::npos && at + 6 <= line.size(); at = line.find("\\u", at + 1)) {
    if (line[at + 2] != 'd' && line[at + 2] != 'D') continue;
    if (kSecondDigits.find(line[at + 3]) != std::string_view::npos) line.replace(at, 6, "\\u0041");
  }
  return line;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string line(reinterpret_cast<const char*>(data), size);
  JsonlDocument document;
  try {
    parse_jsonl_line(line, document);
  } catch (const Error&) {
    return 0;
  }
  for (const uint8_t byte : std::basic_string_view<uint8_t>(data, size)) {
    if (byte >= 0x80) return 0;
  }
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(without_surrogates(line));
  } catch (const nlohmann::json::out_of_range&) {
    return 0;
  } catch (const nlohmann::json::parse_error&) {
    std::abort();
  }
  if (json.at("input_ids").get<std::vector<int32_t>>() != document.input_ids) std::abort();
  if (json.contains("labels") != document.has_labels) std::abort();
  if (document.has_labels && json.at("labels").get<std::vector<int32_t>>() != document.labels) std::abort();
  if (document.num_loss_tokens() < 0) std::abort();
  return 0;
}
