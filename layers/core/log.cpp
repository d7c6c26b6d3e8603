#include "layers/core/log.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include <sys/ioctl.h>
#include <unistd.h>

// ---- Numbers in units

namespace {

/// Three digits: 1.23, 12.3, 123. The precision is that of the rounded value: 9.996 is 10.0.
std::string three_digits(double x) {
  const int decimals = std::abs(x) < 9.995 ? 2 : (std::abs(x) < 99.95 ? 1 : 0);
  return fmt::format("{:.{}f}", x, decimals);
}

/// x in the largest of `units` that leaves at least 1, stepping where three digits would round up to `base`.
std::string in_units(double x, double base, const std::array<const char*, 6>& units) {
  if (!std::isfinite(x)) return "?";
  size_t i = 0;
  while (std::abs(x) >= base - 0.5 && i + 1 < units.size()) x /= base, i++;
  return (i == 0 ? fmt::format("{:.0f}", x) : three_digits(x)) + units[i];
}

/// Columns of UTF-8 text: bytes that do not continue a character.
size_t columns_of(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string padded(const std::string& text, size_t columns, Table::Align align) {
  const std::string space(columns - std::min(columns, columns_of(text)), ' ');
  return align == Table::Align::Right ? space + text : text + space;
}

}  // namespace

std::string format_count(double count) {
  return in_units(count, 1000, {"", "k", "M", "G", "T", "P"});
}

std::string format_bytes(double bytes) {
  return in_units(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 1e10) return "?";
  if (seconds < 59.95) return three_digits(seconds) + " s";
  const int64_t s = std::llround(seconds);
  if (s < 3600) return fmt::format("{}m{:02}s", s / 60, s % 60);
  const int64_t m = std::llround(seconds / 60);
  if (m < 24 * 60) return fmt::format("{}h{:02}m", m / 60, m % 60);
  const int64_t h = std::llround(seconds / 3600);
  return fmt::format("{}d{:02}h", h / 24, h % 24);
}

// ---- Table

void Table::row(std::vector<std::string> cells) {
  CHECK(cells.size() == columns_.size(), "a table of {} columns got a row of {} cells", columns_.size(), cells.size());
  rows_.push_back(std::move(cells));
}

std::string Table::str() const {
  std::vector<size_t> widths;
  for (size_t c = 0; c < columns_.size(); c++) {
    widths.push_back(columns_of(columns_[c].title));
    for (const auto& cells : rows_) {
      if (!cells.empty()) widths[c] = std::max(widths[c], columns_of(cells[c]));
    }
  }
  const auto line = [&](auto&& cell) {
    std::string s;
    for (size_t c = 0; c < columns_.size(); c++) {
      s += (c ? "  " : "") + padded(cell(c), widths[c], columns_[c].align);
    }
    return s.erase(s.find_last_not_of(' ') + 1) + "\n";
  };
  const std::string across = line([&](size_t c) { return std::string(widths[c], '-'); });
  std::string text = line([&](size_t c) { return columns_[c].title; }) + across;
  for (const auto& cells : rows_) text += cells.empty() ? across : line([&](size_t c) { return cells[c]; });
  return text;
}

// ---- Console

Console::Console(FILE* out, bool is_terminal, bool is_enabled)
    : out_(out), is_terminal_(is_terminal), is_enabled_(is_enabled) {}

Console Console::standard(bool is_enabled) {
  const char* term = std::getenv("TERM");
  const bool is_dumb = term != nullptr && std::string_view(term) == "dumb";
  // mpirun gives a rank a terminal of its own, which has no width, and writes what comes to wherever it likes.
  winsize size{};
  const bool is_terminal = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return Console(stdout, is_terminal && !is_dumb, is_enabled);
}

int Console::width() const {
  constexpr int kDefault = 100;
  winsize size{};
  if (!is_terminal_ || ioctl(fileno(out_), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kDefault;
  return size.ws_col;
}

void Console::write(std::string_view text) {
  if (!is_enabled_) return;
  // A console that cannot be written to (a closed pipe) must not stop the training.
  std::fwrite(text.data(), 1, text.size(), out_);
  std::fflush(out_);
}

void Console::print(std::string_view text) {
  std::string out = is_line_shown_ ? "\r\033[K" : "";  // to the first column, erase the line
  is_line_shown_ = false;
  out += text;
  if (!text.ends_with('\n')) out += '\n';
  write(out);
}

void Console::print_warning(const std::string& text) {
  print((is_terminal_ ? "\033[33mwarning:\033[0m " : "warning: ") + text);
}

void Console::heading(std::string_view title) {
  print(fmt::format("\n{}{}{}", is_terminal_ ? "\033[1m" : "", title, is_terminal_ ? "\033[0m" : ""));
}

void Console::show(std::string_view line) {
  if (!is_terminal_ || (line.empty() && !is_line_shown_)) return;
  write("\r\033[K");
  write(line.substr(0, static_cast<size_t>(std::max(0, width() - 1))));
  is_line_shown_ = !line.empty();
}

// ---- Progress

Progress::Progress(Console& console, std::string what, int64_t total, Unit unit)
    : console_(console), what_(std::move(what)), total_(total), unit_(unit) {}

Progress::~Progress() {
  console_.show("");
}

void Progress::update(int64_t done) {
  if (!console_.is_terminal() || !console_.is_enabled()) return;
  const Clock::time_point now = Clock::now();
  if (now - last_drawn_ < std::chrono::milliseconds(100)) return;
  last_drawn_ = now;
  console_.show(bar(done, elapsed_s()));
}

void Progress::finish(int64_t done) {
  console_.print(summary(done, elapsed_s()));
}

std::string Progress::bar(int64_t done, double elapsed_s) const {
  const double rate = elapsed_s > 0 ? static_cast<double>(done) / elapsed_s : 0;
  if (total_ <= 0) return fmt::format("{:<12} {}  {}/s", what_, amount(double(done)), amount(rate));
  constexpr int kBarWidth = 20;
  const double share = std::clamp(double(done) / double(total_), 0.0, 1.0);
  const auto filled = static_cast<size_t>(share * kBarWidth);
  const double remaining_s = rate > 0 ? static_cast<double>(total_ - done) / rate : -1;
  return fmt::format("{:<12} [{}{}] {:>3.0f}%  {} / {}  {}/s  eta {}", what_, std::string(filled, '#'),
                     std::string(kBarWidth - filled, '-'), std::floor(100 * share), amount(double(done)),
                     amount(double(total_)), amount(rate), format_duration(remaining_s));
}

std::string Progress::summary(int64_t done, double elapsed_s) const {
  std::string line = fmt::format("{:<12} {} in {}", what_, amount(double(done)), format_duration(elapsed_s));
  if (elapsed_s > 0) line += fmt::format(" ({}/s)", amount(double(done) / elapsed_s));
  return line;
}
