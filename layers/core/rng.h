// Philox4x32-10 (Salmon et al., 2011): a counter-based generator. Element i of stream s is a pure function of
// (seed, s, i), so that initial weights do not depend on the world size or on the order of evaluation.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

/// FNV-1a: a stable 64-bit id for a name, or of bytes that follow those of hash `h`.
constexpr uint64_t hash_name(std::string_view name, uint64_t h = 0xcbf29ce484222325ull) {
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return h;
}

class Philox {
 public:
  Philox(uint64_t seed, uint64_t stream) : key_{seed}, stream_{stream} {}

  /// Four independent 32-bit words for counter i.
  std::array<uint32_t, 4> words(uint64_t i) const {
    std::array<uint32_t, 4> c = {static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32),
                                 static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)};
    uint32_t k0 = static_cast<uint32_t>(key_), k1 = static_cast<uint32_t>(key_ >> 32);
    for (int round = 0; round < 10; round++) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
      c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return c;
  }

  /// Uniform in (0, 1).
  double uniform(uint64_t i) const { return (static_cast<double>(words(i)[0]) + 0.5) * 0x1p-32; }

  /// Uniform integer in [0, n).
  uint64_t below(uint64_t i, uint64_t n) const {
    const auto w = words(i);
    const uint64_t r = (uint64_t{w[0]} << 32) | w[1];
    return static_cast<uint64_t>((static_cast<unsigned __int128>(r) * n) >> 64);
  }

  /// Standard normal (Box-Muller); element i uses counter i alone.
  double normal(uint64_t i) const {
    const auto w = words(i);
    const double u = (static_cast<double>(w[0]) + 0.5) * 0x1p-32;
    const double v = (static_cast<double>(w[1]) + 0.5) * 0x1p-32;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * 3.14159265358979323846 * v);
  }

 private:
  uint64_t key_;
  uint64_t stream_;
};
