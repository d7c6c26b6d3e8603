#include "data/json.h"

#include <unordered_set>
#include <vector>

#include "layers/core/check.h"

namespace {

/// "optimizer.lr", cut to a length that fits a message.
std::string dotted(const std::vector<std::string>& path) {
  std::string text;
  for (const std::string& key : path) text += (text.empty() || key.empty() ? "" : ".") + key;
  return text.substr(0, 100);
}

/// nlohmann's message without its id: "[json.exception.parse_error.101] parse error at line 3, column 5: ..."
std::string_view reason_of(const nlohmann::json::exception& e) {
  const std::string_view what = e.what();
  const size_t end_of_id = what.find("] ");
  return what.substr(end_of_id == std::string_view::npos ? 0 : end_of_id + 2, 300);  // it may quote a long token
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& where, JsonComments comments) {
  using Event = nlohmann::json::parse_event_t;
  constexpr int kMaxDepth = 64;
  const size_t nul = text.find('\0');
  CHECK(nul == std::string_view::npos, "{}: not JSON: a NUL byte at offset {}", where, nul);
  CHECK(!text.starts_with("\xef\xbb\xbf"), "{}: not JSON: it begins with a byte order mark", where);

  std::vector<std::unordered_set<std::string>> keys;  // of the object at each depth
  std::vector<std::string> path;                      // the key at each depth
  const auto check = [&](int depth, Event event, const nlohmann::json& parsed) {
    CHECK(depth < kMaxDepth, "{}: nested deeper than {} levels", where, kMaxDepth);
    if (event == Event::object_start) {
      keys.resize(static_cast<size_t>(depth) + 1);
      keys.back().clear();
    }
    if (event == Event::key) {
      path.resize(static_cast<size_t>(depth));
      path.back() = parsed.get_ref<const std::string&>();
      CHECK(keys.at(static_cast<size_t>(depth) - 1).insert(path.back()).second, "{}: '{}' is given twice", where,
            dotted(path));
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, check, true, comments == JsonComments::Allowed);
  } catch (const nlohmann::json::exception& e) {
    fail("{}: not JSON: {}", where, reason_of(e));
  }
}

std::string dump_json(const nlohmann::json& value, int indent) {
  return value.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}
