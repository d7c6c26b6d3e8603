// Numbers as people write them: 128k, 2M, 64Ki, 3.8M, 1_000_000, 1e-5.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

// k (or K), M, G, T are powers of 1000; Ki, Mi, Gi, Ti powers of 1024; `_` may stand between digits.

/// The value if `text` is such a number and a whole one that fits: "3.8M" is 3800000; "1.5" and "128 k" are none.
std::optional<int64_t> parse_human_int64(std::string_view text);
std::optional<uint64_t> parse_human_uint64(std::string_view text);
/// The nearest double; none when it would be infinite.
std::optional<double> parse_human_double(std::string_view text);
