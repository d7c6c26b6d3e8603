#include "llama/human_number.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <string>

namespace {

/// (-1)^negative * digits * 10^exponent * 1024^binary_prefix, exactly what the text says.
struct Decimal {
  bool negative = false;
  std::string digits;  ///< no leading zeros; empty = 0
  int exponent = 0;
  int binary_prefix = 0;
};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Takes digits, with `_` between two of them, off the front of `text`; false if there are none.
bool take_digits(std::string_view& text, std::string& digits) {
  size_t i = 0;
  while (i < text.size()) {
    const bool is_separator = text[i] == '_' && i > 0 && is_digit(text[i - 1]) && i + 1 < text.size();
    if (!is_digit(text[i]) && !(is_separator && is_digit(text[i + 1]))) break;
    if (is_digit(text[i])) digits += text[i];
    i++;
  }
  text.remove_prefix(i);
  return i > 0;
}

bool take_exponent(std::string_view& text, int& exponent) {
  if (text.empty() || (text[0] != 'e' && text[0] != 'E')) return true;
  text.remove_prefix(1);
  if (!text.empty() && text[0] == '+') text.remove_prefix(1);
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, exponent);
  if (error != std::errc() || std::abs(exponent) > 1000) return false;
  text.remove_prefix(static_cast<size_t>(stop - text.data()));
  return true;
}

bool take_prefix(std::string_view text, Decimal& d) {
  if (text.empty()) return true;
  const size_t power = std::string_view("kMGT").find(text[0] == 'K' ? 'k' : text[0]);
  if (power == std::string_view::npos) return false;
  if (text.size() == 1) d.exponent += 3 * static_cast<int>(power + 1);
  if (text.size() == 2 && text[1] == 'i') d.binary_prefix = static_cast<int>(power + 1);
  return text.size() == 1 || d.binary_prefix > 0;
}

std::optional<Decimal> parse_decimal(std::string_view text) {
  constexpr size_t kLongest = 400;  // longer than any double written out
  if (text.empty() || text.size() > kLongest) return std::nullopt;
  Decimal d;
  if (text[0] == '-' || text[0] == '+') {
    d.negative = text[0] == '-';
    text.remove_prefix(1);
  }
  if (!take_digits(text, d.digits)) return std::nullopt;
  if (!text.empty() && text[0] == '.') {
    text.remove_prefix(1);
    const size_t whole = d.digits.size();
    if (!take_digits(text, d.digits)) return std::nullopt;
    d.exponent = -static_cast<int>(d.digits.size() - whole);
  }
  int written_exponent = 0;
  if (!take_exponent(text, written_exponent)) return std::nullopt;
  d.exponent += written_exponent;
  if (!take_prefix(text, d)) return std::nullopt;
  d.digits.erase(0, d.digits.find_first_not_of('0'));
  while (!d.digits.empty() && d.digits.back() == '0') d.digits.pop_back(), d.exponent++;
  return d;
}

template <class Int>
std::optional<Int> to_integer(std::string_view text) {
  const std::optional<Decimal> d = parse_decimal(text);
  if (!d) return std::nullopt;
  if (d->digits.empty()) return Int{0};
  // 20 digits hold every 64-bit integer; with 1024^4 the product stays below 2^107.
  if (d->digits.size() > 20 || d->exponent > 20) return std::nullopt;
  __int128 value = 0;
  for (const char c : d->digits) value = value * 10 + (c - '0');
  value <<= 10 * d->binary_prefix;
  for (int e = d->exponent; e < 0; e++) {
    if (value % 10 != 0) return std::nullopt;
    value /= 10;
  }
  constexpr __int128 kLargest = std::numeric_limits<uint64_t>::max();
  for (int e = 0; e < d->exponent; e++) {
    value *= 10;
    if (value > kLargest) return std::nullopt;
  }
  if (d->negative) value = -value;
  if (value < std::numeric_limits<Int>::min() || value > std::numeric_limits<Int>::max()) return std::nullopt;
  return static_cast<Int>(value);
}

}  // namespace

std::optional<int64_t> parse_human_int64(std::string_view text) {
  return to_integer<int64_t>(text);
}

std::optional<uint64_t> parse_human_uint64(std::string_view text) {
  return to_integer<uint64_t>(text);
}

std::optional<double> parse_human_double(std::string_view text) {
  const std::optional<Decimal> d = parse_decimal(text);
  if (!d) return std::nullopt;
  if (d->digits.empty()) return d->negative ? -0.0 : 0.0;
  const std::string plain = (d->negative ? "-" : "") + d->digits + "e" + std::to_string(d->exponent);
  double value = 0;
  const auto [stop, error] = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (error != std::errc()) return std::nullopt;
  value = std::ldexp(value, 10 * d->binary_prefix);
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}
