// Typed reads from config.json. Contract: config_reader.h.
#include "llama/config_reader.h"

#include <cmath>

using nlohmann::json;

namespace {

constexpr size_t kMaxShown = 60;

/// A JSON number as int64_t, if it is one that fits.
std::optional<int64_t> as_integer(const json& value, bool accepts_float) {
  constexpr double kExact = 9007199254740992.0;  // 2^53: the whole numbers that a double holds
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!accepts_float || !value.is_number_float()) return std::nullopt;
  const double x = value.get<double>();
  if (x != std::floor(x) || std::fabs(x) > kExact) return std::nullopt;
  return static_cast<int64_t>(x);
}

}  // namespace

ConfigReader::ConfigReader(const json& object, std::string where, std::string path)
    : object_(&object), where_(std::move(where)), path_(path.empty() ? "" : std::move(path) + ".") {
  CHECK(object.is_object(), "{}: a config.json holds one object, this is {} {}", where_, object.is_array() ? "an" : "a",
        object.type_name());
}

const json* ConfigReader::find(const char* key) const {
  const auto it = object_->find(key);
  return it == object_->end() ? nullptr : &*it;
}

bool ConfigReader::has(const char* key) const {
  const json* value = find(key);
  return value && !value->is_null();
}

std::optional<int64_t> ConfigReader::optional_integer(const char* key, std::optional<int64_t> if_absent, int64_t low,
                                                      int64_t high, bool accepts_float) const {
  const json* value = find(key);
  if (!value) return if_absent;
  if (value->is_null()) return std::nullopt;
  const std::optional<int64_t> n = as_integer(*value, accepts_float);
  if (!n || *n < low || *n > high) refuse(key, "expected a whole number from {} to {}", low, high);
  return n;
}

int64_t ConfigReader::integer(const char* key, int64_t if_absent, int64_t low, int64_t high, bool accepts_float) const {
  const std::optional<int64_t> n = optional_integer(key, if_absent, low, high, accepts_float);
  if (!n) refuse(key, "expected a whole number from {} to {}", low, high);
  return *n;
}

std::optional<double> ConfigReader::optional_number(const char* key, std::optional<double> if_absent, double low,
                                                    double high, bool above_low) const {
  const json* value = find(key);
  if (!value) return if_absent;
  if (value->is_null()) return std::nullopt;
  const double x = value->is_number() ? value->get<double>() : std::nan("");
  if (!(above_low ? x > low : x >= low) || !(x <= high)) {
    refuse(key, "expected a number {} {} and at most {}", above_low ? "above" : "of at least", low, high);
  }
  return x;
}

double ConfigReader::number(const char* key, double if_absent, double low, double high, bool above_low) const {
  const std::optional<double> x = optional_number(key, if_absent, low, high, above_low);
  if (!x) refuse(key, "expected a number {} {} and at most {}", above_low ? "above" : "of at least", low, high);
  return *x;
}

bool ConfigReader::boolean(const char* key, bool if_absent) const {
  const json* value = find(key);
  if (!value) return if_absent;
  if (!value->is_boolean()) refuse(key, "expected true or false");
  return value->get<bool>();
}

std::string ConfigReader::text(const char* key, std::string if_absent) const {
  const json* value = find(key);
  if (!value) return if_absent;
  if (!value->is_string()) refuse(key, "expected a string");
  return value->get<std::string>();
}

std::vector<double> ConfigReader::positive_numbers(const char* key, size_t count) const {
  const json* value = find(key);
  if (!value || !value->is_array() || value->size() != count) {
    refuse(key, "expected a list of {} numbers (half of the rotary width){}", count,
           value && value->is_array() ? fmt::format(", this one has {}", value->size()) : "");
  }
  std::vector<double> numbers;
  for (const json& element : *value) {
    const double x = element.is_number() ? element.get<double>() : std::nan("");
    if (!(x > 0) || !std::isfinite(x))
      refuse(key, "element {} is {}, expected a number above 0", numbers.size(), shown(element));
    numbers.push_back(x);
  }
  return numbers;
}

std::optional<ConfigReader> ConfigReader::child(const char* key) const {
  const json* value = find(key);
  if (!value || value->is_null()) return std::nullopt;
  if (!value->is_object()) refuse(key, "expected an object or null");
  if (value->empty()) return std::nullopt;
  return ConfigReader(*value, where_, path_ + key);
}

std::string ConfigReader::shown(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}
