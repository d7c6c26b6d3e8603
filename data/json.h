// Strict JSON: what nlohmann/json accepts, without its leniencies (duplicate keys, bytes after a NUL, a byte order
// mark, nesting without end).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

/// An Error begins with `where` and names the key or the place.
nlohmann::json parse_json(std::string_view text, const std::string& where);
