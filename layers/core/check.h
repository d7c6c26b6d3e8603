// CHECK: the one way an error is raised. A message says what is wrong, the numbers, and the remedy.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

/// What every failure of this program throws. main() prints it once, with rank and host, and exits with 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

/// CHECK(condition, format, args...): throws Error with the formatted message unless the condition holds.
#define CHECK(condition, ...)      \
  do {                             \
    if (!(condition)) [[unlikely]] \
      fail(__VA_ARGS__);           \
  } while (false)
