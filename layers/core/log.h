// What a person reads: lines, tables and progress on the console, and numbers in units. Only rank 0's console is
// enabled; on anything but a terminal the output is plain lines, with nothing that moves.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "layers/core/check.h"

/// "999", "1.23k", "45.6M": three digits, powers of 1000.
std::string format_count(double count);
/// "512 B", "3.42 GiB": three digits, powers of 1024.
std::string format_bytes(double bytes);
/// "0.32 s", "12.3 s", "3m05s", "1h02m", "2d03h"; "?" when it is not a finite, positive time.
std::string format_duration(double seconds);

/// Aligned columns.
class Table {
 public:
  enum class Align { Left, Right };
  struct Column {
    std::string title;
    Align align = Align::Left;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  /// One cell a column.
  void row(std::vector<std::string> cells);
  /// A line across, before a total.
  void rule() { rows_.emplace_back(); }
  std::string str() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;  ///< an empty one is a rule
};

/// Every line goes to one stream at once, so that their order is the order of events and nothing is lost in a crash.
class Console {
 public:
  Console(FILE* out, bool is_terminal, bool is_enabled);
  /// Standard output.
  static Console standard(bool is_enabled);

  template <class... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) {
    if (is_enabled_) print(fmt::format(format, std::forward<Args>(args)...));
  }
  /// "warning: ..."
  template <class... Args>
  void warning(fmt::format_string<Args...> format, Args&&... args) {
    if (is_enabled_) print_warning(fmt::format(format, std::forward<Args>(args)...));
  }
  /// An empty line and the title of what follows.
  void heading(std::string_view title);
  void table(const Table& table) { print(table.str()); }
  /// `text` as it is, with a line break at its end if it has none.
  void print(std::string_view text);
  /// On a terminal, shows `line` until the next output; elsewhere nothing. Cut to the width.
  void show(std::string_view line);

  bool is_enabled() const { return is_enabled_; }
  bool is_terminal() const { return is_terminal_; }
  /// Columns of the terminal; 100 elsewhere.
  int width() const;

 private:
  void print_warning(const std::string& text);
  void write(std::string_view text);

  FILE* out_;
  bool is_terminal_, is_enabled_;
  bool is_line_shown_ = false;
};

/// Progress of something long: a bar with rate and remaining time on a terminal, and one line at the end everywhere.
///   loading      [##########----------] 50%  3.42 GiB / 6.84 GiB  1.21 GiB/s  eta 2.83 s
///   loading      6.84 GiB in 5.66 s (1.21 GiB/s)
/// Not thread-safe: one thread reports.
class Progress {
 public:
  enum class Unit { Count, Bytes };

  /// `total` 0: unknown, no bar.
  Progress(Console& console, std::string what, int64_t total, Unit unit = Unit::Count);
  Progress(const Progress&) = delete;
  /// Takes the bar away; prints nothing unless finish() did.
  ~Progress();

  /// Cheap: redraws at most ten times a second.
  void update(int64_t done);
  void finish(int64_t done);
  double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  /// The two lines, for given numbers.
  std::string bar(int64_t done, double elapsed_s) const;
  std::string summary(int64_t done, double elapsed_s) const;

 private:
  using Clock = std::chrono::steady_clock;
  std::string amount(double x) const { return unit_ == Unit::Bytes ? format_bytes(x) : format_count(x); }

  Console& console_;
  std::string what_;
  int64_t total_;
  Unit unit_;
  Clock::time_point start_ = Clock::now(), last_drawn_ = start_;
};
