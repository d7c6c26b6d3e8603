// Strict JSON: what nlohmann/json accepts, without its leniencies (duplicate keys, bytes after a NUL, a byte order
// mark, nesting without end).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

enum class JsonComments { Refused, Allowed };  ///< // and /* */

/// An Error begins with `where` and names the key or the place.
nlohmann::json parse_json(std::string_view text, const std::string& where,
                          JsonComments comments = JsonComments::Refused);

/// As nlohmann's dump; bytes that are not UTF-8 (an odd file name) become U+FFFD instead of an exception. `indent` < 0:
/// one line. Here, so that the serializer is compiled once.
std::string dump_json(const nlohmann::json& value, int indent = -1);
