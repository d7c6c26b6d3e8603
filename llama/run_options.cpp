#include "llama/run_options.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "data/json.h"
#include "layers/core/check.h"
#include "llama/human_number.h"

using nlohmann::json;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kLongestShown = 80;  ///< of a value or key in a message

}  // namespace

// ---- What is legal

std::string Range::str() const {
  if (min > -kInfinity && max < kInfinity) {
    return fmt::format("in {}{}, {}{}", min_is_legal ? '[' : '(', min, max, max_is_legal ? ']' : ')');
  }
  return min > -kInfinity ? fmt::format("{} {}", min_is_legal ? ">=" : ">", min) : "";
}

std::string Option::section() const {
  const std::string_view all = key;
  return std::string(all.substr(0, all.find('.')));
}

std::string Option::name() const {
  const std::string_view all = key;
  return std::string(all.substr(all.find('.') + 1));
}

bool Option::is_list() const {
  return std::holds_alternative<std::vector<std::string>*>(value) ||
         std::holds_alternative<std::vector<SourceConfig>*>(value);
}

bool Option::is_nullable() const {
  return std::holds_alternative<std::optional<int64_t>*>(value) ||
         std::holds_alternative<std::optional<double>*>(value) || std::holds_alternative<NullableText>(value);
}

namespace {

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

std::string joined(const std::vector<const char*>& choices) {
  std::string s;
  for (size_t i = 0; i < choices.size(); i++) {
    s += (i == 0 ? "" : (i + 1 == choices.size() ? " or " : ", ")) + std::string(choices[i]);
  }
  return s;
}

/// The value as JSON, short enough for a message.
std::string shown(const json& value) {
  const std::string s = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return s.size() <= kLongestShown ? s : s.substr(0, kLongestShown) + "...";
}

}  // namespace

std::string Option::expected() const {
  const auto number = [&](std::string what) { return range.str().empty() ? what : what + " " + range.str(); };
  const std::string what =
      std::visit(Overloaded{
                     [](bool*) -> std::string { return "true or false"; },
                     [&](int64_t*) -> std::string { return number("an integer"); },
                     [&](uint64_t*) -> std::string { return number("an integer >= 0"); },
                     [&](std::optional<int64_t>*) -> std::string { return number("an integer"); },
                     [&](double*) -> std::string { return number("a number"); },
                     [&](std::optional<double>*) -> std::string { return number("a number"); },
                     [&](BetaPair) -> std::string { return number("two numbers"); },
                     [&](std::string*) -> std::string { return choices.empty() ? "a text" : joined(choices); },
                     [](NullableText) -> std::string { return "a text"; },
                     [](std::vector<std::string>*) -> std::string { return "a list of texts"; },
                     [](std::vector<SourceConfig>*) -> std::string {
                       return R"(a list of paths or of {"path": text, "weight": number in (0, 1e6]})";
                     },
                 },
                 value);
  return is_nullable() ? what + " or null" : what;
}

// ---- Reading a value. Each returns whether `v` was legal.

namespace {

bool read_double(double& x, const json& v, const Range& range) {
  std::optional<double> number;
  if (v.is_number()) number = v.get<double>();
  if (v.is_string()) number = parse_human_double(v.get_ref<const std::string&>());
  if (!number || !std::isfinite(*number) || !range.contains(*number)) return false;
  x = *number;
  return true;
}

template <class Int>
bool read_integer(Int& x, const json& v, const Range& range) {
  // JSON's numbers are read as text, so that 1e3 is an integer and nothing is rounded on the way.
  const std::string text = v.is_string() ? v.get<std::string>() : v.is_number() ? v.dump() : "";
  std::optional<Int> number;
  if constexpr (std::is_signed_v<Int>) {
    number = parse_human_int64(text);
  } else {
    number = parse_human_uint64(text);
  }
  if (!number || !range.contains(static_cast<double>(*number))) return false;
  x = *number;
  return true;
}

bool read_text(std::string& x, const json& v) {
  if (!v.is_string()) return false;
  const std::string& text = v.get_ref<const std::string&>();
  if (text.empty() || text.find('\0') != std::string::npos) return false;
  x = text;
  return true;
}

/// A text stands for a list of one.
json as_list(const json& v) {
  return v.is_array() ? v : json::array({v});
}

bool read_source(SourceConfig& source, const json& v) {
  if (v.is_string()) return read_text(source.path, v);
  if (!v.is_object() || !v.contains("path") || v.size() > 2) return false;
  if (v.size() == 2 && !v.contains("weight")) return false;
  return read_text(source.path, v["path"]) &&
         (v.size() == 1 || read_double(source.weight, v["weight"], {.min = 0, .max = 1e6, .min_is_legal = false}));
}

template <class T, class Read>
bool read_list(std::vector<T>& list, const json& v, Read&& read) {
  std::vector<T> items;
  for (const json& item : as_list(v)) {
    if (!read(items.emplace_back(), item)) return false;
  }
  list = std::move(items);
  return true;
}

template <class T, class Read>
bool read_optional(std::optional<T>& x, const json& v, Read&& read) {
  T number{};
  if (!v.is_null() && !read(number, v)) return false;
  x = v.is_null() ? std::nullopt : std::optional<T>(number);
  return true;
}

bool read_betas(BetaPair b, const json& v, const Range& range) {
  return v.is_array() && v.size() == 2 && read_double(*b.beta1, v[0], range) && read_double(*b.beta2, v[1], range);
}

}  // namespace

void read_option(const Option& option, const json& v, const std::string& where) {
  const auto number = [&](double& x, const json& j) { return read_double(x, j, option.range); };
  const auto integer = [&](auto& x, const json& j) { return read_integer(x, j, option.range); };
  const auto text = [&](std::string& x, const json& j) {
    const auto& c = option.choices;
    return (c.empty() || (j.is_string() && std::find(c.begin(), c.end(), j.get<std::string>()) != c.end())) &&
           read_text(x, j);
  };
  const bool is_legal =
      std::visit(Overloaded{
                     [&](bool* x) { return v.is_boolean() && (*x = v.get<bool>(), true); },
                     [&](int64_t* x) { return integer(*x, v); },
                     [&](uint64_t* x) { return integer(*x, v); },
                     [&](double* x) { return number(*x, v); },
                     [&](std::string* x) { return text(*x, v); },
                     [&](std::optional<int64_t>* x) { return read_optional(*x, v, integer); },
                     [&](std::optional<double>* x) { return read_optional(*x, v, number); },
                     [&](NullableText x) { return v.is_null() ? (x.text->clear(), true) : read_text(*x.text, v); },
                     [&](BetaPair x) { return read_betas(x, v, option.range); },
                     [&](std::vector<std::string>* x) { return read_list(*x, v, read_text); },
                     [&](std::vector<SourceConfig>* x) { return read_list(*x, v, read_source); },
                 },
                 option.value);
  CHECK(is_legal, "{} = {} ({}): expected {}", option.key, shown(v), where, option.expected());
}

json write_option(const Option& option) {
  return std::visit(Overloaded{
                        [](auto* x) { return json(*x); },
                        []<class T>(std::optional<T>* x) { return *x ? json(**x) : json(); },
                        [](NullableText x) { return x.text->empty() ? json() : json(*x.text); },
                        [](BetaPair x) {
                          return json({*x.beta1, *x.beta2});
                        },
                        [](std::vector<SourceConfig>* x) {
                          json list = json::array();
                          for (const SourceConfig& s : *x) {
                            list.push_back(s.weight == 1 ? json(s.path) : json{{"path", s.path}, {"weight", s.weight}});
                          }
                          return list;
                        },
                    },
                    option.value);
}

// ---- From the command line

namespace {

/// Text that looks like JSON must be JSON: a glob that starts with a bracket is written ./[ab]*.jsonl.
json from_argument(const std::string& key, const std::string& text) {
  const bool looks_like_json = !text.empty() && (text[0] == '[' || text[0] == '{');
  return looks_like_json ? parse_json(text, "--" + key, JsonComments::Allowed) : json(text);
}

json list_from_arguments(const std::string& key, const std::vector<std::string>& arguments) {
  json list = json::array();
  if (arguments.size() == 1 && arguments[0] == "null") return list;
  for (const std::string& a : arguments) {
    for (const json& item : as_list(from_argument(key, a))) list.push_back(item);
  }
  return list;
}

}  // namespace

json option_from_arguments(const Option& option, const std::vector<std::string>& arguments) {
  if (option.is_list()) return list_from_arguments(option.key, arguments);
  const std::string& text = arguments.at(0);
  if (std::holds_alternative<BetaPair>(option.value)) {
    const size_t comma = text.find(',');
    const bool is_pair = arguments.size() == 1 && comma != std::string::npos && text[0] != '[';
    if (is_pair) return json::array({text.substr(0, comma), text.substr(comma + 1)});
    return list_from_arguments(option.key, arguments);
  }
  if (option.is_nullable() && text == "null") return json();
  if (std::holds_alternative<bool*>(option.value) && (text == "true" || text == "false")) return json(text == "true");
  return json(text);
}

// ---- Unknown keys

namespace {

/// Levenshtein distance: insertions, deletions and replacements that turn a into b.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string nearest_key(const std::string& key) {
  const std::string_view asked = std::string_view(key).substr(0, kLongestShown);
  const std::string_view asked_name = asked.substr(asked.find('.') == std::string::npos ? 0 : asked.find('.') + 1);
  std::string nearest;
  size_t best = std::string::npos;
  const auto offer = [&](const std::string& candidate, size_t distance) {
    if (distance < best) best = distance, nearest = candidate;
  };
  RunConfig run;
  for (const Option& o : options_of(run)) {
    offer(o.key, edit_distance(asked, o.key));
    offer(o.key, edit_distance(asked_name, o.name()) + 1);  // the right name in the wrong section, or in none
    const bool is_cut = asked_name.size() >= 3 && o.name().starts_with(asked_name);  // warmup for warmup_steps
    if (is_cut) offer(o.key, asked.starts_with(o.section()) ? 1 : 2);
  }
  if (asked == asked_name) {
    for (const Section& s : option_sections()) offer(s.name, edit_distance(asked, s.name));
  }
  return nearest;
}
