// ConfigReader: typed reads from a config.json object. Each error names the file, the key, its value, what was
// expected, and the remedy where there is one. An absent key is the caller's default; an explicit null is not absent.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "layers/core/check.h"

class ConfigReader {
 public:
  /// `object` outlives the reader. `path` is the key that holds it, "" at the top level.
  ConfigReader(const nlohmann::json& object, std::string where, std::string path = "");

  const std::string& where() const { return where_; }
  const nlohmann::json& object() const { return *object_; }

  /// The value, or null when there is no such key.
  const nlohmann::json* find(const char* key) const;
  /// The key is there and not null.
  bool has(const char* key) const;

  /// A whole number in [low, high]; null is an error. `accepts_float` takes 4096.0 too.
  int64_t integer(const char* key, int64_t if_absent, int64_t low, int64_t high, bool accepts_float = false) const;
  /// The same, and null means none.
  std::optional<int64_t> optional_integer(const char* key, std::optional<int64_t> if_absent, int64_t low, int64_t high,
                                          bool accepts_float = false) const;
  /// A number in [low, high], or above low when `above_low`.
  double number(const char* key, double if_absent, double low, double high, bool above_low = false) const;
  std::optional<double> optional_number(const char* key, std::optional<double> if_absent, double low, double high,
                                        bool above_low = false) const;
  bool boolean(const char* key, bool if_absent) const;
  std::string text(const char* key, std::string if_absent) const;
  /// An array of numbers above 0.
  std::vector<double> positive_numbers(const char* key, size_t count) const;
  /// A reader of the object under `key`; none when absent, null or empty.
  std::optional<ConfigReader> child(const char* key) const;

  /// Throws: "config.json: "rope_scaling.factor" is -1: " and the message.
  template <class... Args>
  [[noreturn]] void refuse(const char* key, fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: \"{}\" is {}: {}", where_, path_ + key, find(key) ? shown(*find(key)) : "absent",
         fmt::format(format, std::forward<Args>(args)...));
  }

  /// The value as JSON, shortened for a message.
  static std::string shown(const nlohmann::json& value);

 private:
  const nlohmann::json* object_;
  std::string where_, path_;
};
