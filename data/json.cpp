#include "data/json.h"

#include <unordered_set>
#include <vector>

#include "layers/core/check.h"

nlohmann::json parse_json(std::string_view text, const std::string& where) {
  using Event = nlohmann::json::parse_event_t;
  constexpr size_t kMaxDepth = 64;
  const size_t nul = text.find('\0');
  CHECK(nul == std::string_view::npos, "{}: not JSON: a NUL byte at offset {}", where, nul);
  CHECK(!text.starts_with("\xef\xbb\xbf"), "{}: not JSON: it begins with a byte order mark", where);

  std::vector<std::unordered_set<std::string>> keys;  // of each object that is open
  size_t depth = 0;
  const auto check = [&](int, Event event, const nlohmann::json& parsed) {
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens) CHECK(++depth <= kMaxDepth, "{}: JSON nested more than {} deep", where, kMaxDepth);
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::object_end || event == Event::array_end) depth--;
    if (event == Event::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      CHECK(keys.back().insert(key).second, "{}: the key '{}' comes twice", where, key);
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, check);
  } catch (const nlohmann::json::exception& e) {
    fail("{}: not JSON: {}", where, std::string_view(e.what()).substr(0, 300));  // it may quote a long token
  }
}

std::string dump_json(const nlohmann::json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}
