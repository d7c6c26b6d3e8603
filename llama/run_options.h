// The table of options: each is declared once. Internal to run_config.
#pragma once

#include <limits>
#include <variant>

#include "llama/run_config.h"

/// A text that may be null; null is the empty text.
struct NullableText {
  std::string* text;
};

/// optimizer.betas: two numbers under one key.
struct BetaPair {
  double *beta1, *beta2;
};

/// Where an option's value lives; the type says how it is read and written.
using OptionValue =
    std::variant<bool*, int64_t*, uint64_t*, double*, std::string*, std::optional<int64_t>*, std::optional<double>*,
                 NullableText, BetaPair, std::vector<std::string>*, std::vector<SourceConfig>*>;

/// Legal numbers.
struct Range {
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  bool min_is_legal = true, max_is_legal = true;

  bool contains(double x) const { return (min_is_legal ? x >= min : x > min) && (max_is_legal ? x <= max : x < max); }
  /// ">= 1", "in [0, 1)"; empty when every number is legal.
  std::string str() const;
};

struct Option {
  const char* key;    ///< "data.seq_len"
  OptionValue value;  ///< a place in the RunConfig that the table was made for
  const char* help;
  std::vector<const char*> choices = {};  ///< of a text; empty = any
  Range range = {};                       ///< of a number
  /// Why this run does not use the option; null when it does.
  const char* (*unused)(const RunConfig&) = [](const RunConfig&) -> const char* { return nullptr; };

  std::string section() const;
  std::string name() const;
  bool is_list() const;
  bool is_nullable() const;
  /// "an integer >= 2", "cosine, linear, constant or wsd", "a text or null".
  std::string expected() const;
};

struct Section {
  const char* name;
  const char* help;
};

const std::vector<Section>& option_sections();

/// Every option, in the order of the documentation, bound to `run`.
std::vector<Option> options_of(RunConfig& run);

/// Sets the option; an Error names the key, `where`, the value and what is expected.
void read_option(const Option& option, const nlohmann::json& value, const std::string& where);

/// What read_option would read back.
nlohmann::json write_option(const Option& option);

/// The arguments after --key as the JSON that CONFIG.json would hold.
nlohmann::json option_from_arguments(const Option& option, const std::vector<std::string>& arguments);

/// The known key (or section) that is most like `key`.
std::string nearest_key(const std::string& key);

/// What --help and a start without options print.
std::string usage_text();
std::string help_text();
