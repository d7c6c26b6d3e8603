#include "layers/core/log.h"

#include <gtest/gtest.h>

#include <limits>

namespace {

/// A console that writes into memory.
class Captured {
 public:
  explicit Captured(bool is_terminal, bool is_enabled = true)
      : file_(open_memstream(&text_, &size_)), console_(file_, is_terminal, is_enabled) {}
  ~Captured() {
    std::fclose(file_);
    std::free(text_);
  }
  Console& console() { return console_; }
  std::string text() {
    std::fflush(file_);
    return std::string(text_, size_);
  }

 private:
  char* text_ = nullptr;
  size_t size_ = 0;
  FILE* file_;
  Console console_;
};

TEST(Format, counts_have_three_digits_and_the_right_unit) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1.00k");
  EXPECT_EQ(format_count(1234567), "1.23M");
  EXPECT_EQ(format_count(45600000), "45.6M");
  EXPECT_EQ(format_count(999600), "1.00M");
  EXPECT_EQ(format_count(9996), "10.0k");
  EXPECT_EQ(format_count(-1500), "-1.50k");
  EXPECT_EQ(format_count(8e9), "8.00G");
  EXPECT_EQ(format_count(1e30), "1000000000000000P");
  EXPECT_EQ(format_count(std::numeric_limits<double>::quiet_NaN()), "?");
}

TEST(Format, bytes_are_binary) {
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(3.42 * 0x1p30), "3.42 GiB");
  EXPECT_EQ(format_bytes(1023.9 * 1024), "1.00 MiB");
}

TEST(Format, durations_have_two_units) {
  EXPECT_EQ(format_duration(0), "0.00 s");
  EXPECT_EQ(format_duration(0.32), "0.32 s");
  EXPECT_EQ(format_duration(12.34), "12.3 s");
  EXPECT_EQ(format_duration(59.99), "1m00s");
  EXPECT_EQ(format_duration(185), "3m05s");
  EXPECT_EQ(format_duration(3599.9), "1h00m");
  EXPECT_EQ(format_duration(3720), "1h02m");
  EXPECT_EQ(format_duration(86399), "1d00h");
  EXPECT_EQ(format_duration(2 * 86400 + 3 * 3600), "2d03h");
  EXPECT_EQ(format_duration(-1), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::quiet_NaN()), "?");
}

TEST(Table, columns_are_aligned) {
  Table table({{"tensor"}, {"MiB", Table::Align::Right}});
  table.row({"qkv", "1.5"});
  table.row({"größe", "123.0"});  // two characters of two bytes each
  table.rule();
  table.row({"total", "124.5"});
  EXPECT_EQ(table.str(),
            "tensor    MiB\n"
            "------  -----\n"
            "qkv       1.5\n"
            "größe   123.0\n"
            "------  -----\n"
            "total   124.5\n");
  EXPECT_THROW(table.row({"one"}), Error);
}

TEST(Console, lines_that_are_not_for_a_terminal_hold_no_control_characters) {
  Captured c(false);
  c.console().heading("Model");
  c.console().info("{} parameters", 7);
  c.console().warning("careful");
  Progress progress(c.console(), "loading", 100);
  progress.update(50);
  c.console().show("moving");
  EXPECT_EQ(c.text(), "\nModel\n7 parameters\nwarning: careful\n");
  progress.finish(100);
  EXPECT_EQ(c.text().find("\nModel\n7 parameters\nwarning: careful\nloading      100 in "), 0u) << c.text();
  for (const char x : c.text()) EXPECT_TRUE(x == '\n' || x >= ' ');
}

TEST(Console, a_shown_line_is_erased_before_the_next_output) {
  Captured c(true);
  c.console().show("moving");
  c.console().info("done");
  c.console().info("more");
  EXPECT_EQ(c.text(), "\r\033[Kmoving\r\033[Kdone\nmore\n");
}

TEST(Console, a_shown_line_is_cut_to_the_width) {
  Captured c(true);
  c.console().show(std::string(1000, 'x'));
  const std::string text = c.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), 'x'), c.console().width() - 1);
}

TEST(Console, other_ranks_are_silent) {
  for (const bool is_terminal : {false, true}) {
    Captured c(is_terminal, false);
    c.console().info("{}", 1);
    c.console().warning("x");
    c.console().heading("x");
    c.console().table(Table({{"x"}}));
    c.console().show("x");
    Progress progress(c.console(), "loading", 100);
    progress.update(1);
    progress.finish(100);
    EXPECT_EQ(c.text(), "");
  }
}

TEST(Console, what_cannot_be_written_does_not_throw) {
  FILE* full = std::fopen("/dev/full", "w");
  if (full == nullptr) GTEST_SKIP() << "no /dev/full";
  Console console(full, false, true);
  EXPECT_NO_THROW(console.info("{}", 1));
  std::fclose(full);
}

TEST(Progress, bar_and_summary) {
  Captured c(true);
  const Progress bytes(c.console(), "loading", 2048, Progress::Unit::Bytes);
  EXPECT_EQ(bytes.bar(1024, 2.0), "loading      [##########----------]  50%  1.00 KiB / 2.00 KiB  512 B/s  eta 2.00 s");
  EXPECT_EQ(bytes.summary(2048, 2.0), "loading      2.00 KiB in 2.00 s (1.00 KiB/s)");
  EXPECT_EQ(bytes.bar(0, 0.0), "loading      [--------------------]   0%  0 B / 2.00 KiB  0 B/s  eta ?");
  EXPECT_EQ(bytes.bar(2047, 1.0).find("loading      [###################-]  99%"), 0u) << "not done is not 100%";
  EXPECT_EQ(bytes.bar(4096, 1.0).find("loading      [####################] 100%"), 0u);
  const Progress unknown(c.console(), "indexing", 0);
  EXPECT_EQ(unknown.bar(1500, 1.0), "indexing     1.50k  1.50k/s");
}

TEST(Progress, redraws_at_most_ten_times_a_second_and_leaves_nothing_behind) {
  Captured c(true);
  const auto start = std::chrono::steady_clock::now();
  {
    Progress progress(c.console(), "loading", 1000);
    for (int i = 0; i < 1000; i++) progress.update(i);
  }
  const double elapsed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string text = c.text();
  EXPECT_LE(std::count(text.begin(), text.end(), '['), 2 * (1 + static_cast<int64_t>(elapsed_s * 10)) + 1);
  EXPECT_TRUE(text.empty() || text.ends_with("\r\033[K")) << text;
}

}  // namespace
