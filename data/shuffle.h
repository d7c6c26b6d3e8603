// Permutation: a pseudo-random order of 0 .. n-1 that takes no memory. Element i is a pure function of (seed, name,
// counter, i), so that any point of an epoch is found without walking to it.
//
// A Feistel network over b bits (2^b >= n) is a bijection of [0, 2^b) whatever its round function; walking its cycle
// until it falls below n makes it one of [0, n) (Black & Rogaway, 2002). Round keys come from Philox.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>

#include "layers/core/rng.h"

class Permutation {
 public:
  /// The order of n elements that belongs to (seed, name, counter): "documents", epoch.
  Permutation(uint64_t n, uint64_t seed, std::string_view name, uint64_t counter) : n_(n) {
    const Philox rng(seed, hash_name(name));
    for (size_t round = 0; round < kRounds; round++) {
      const auto words = rng.words(counter * kRounds + round);
      keys_[round] = (uint64_t{words[0]} << 32) | words[1];
    }
    // At least 8 bits: with fewer, the few permutations that the network can make would show.
    const int bits = std::max(8, static_cast<int>(std::bit_width(n > 0 ? n - 1 : 0)));
    high_bits_ = bits / 2;
    low_bits_ = bits - high_bits_;
  }

  uint64_t size() const { return n_; }

  /// i < size().
  uint64_t operator()(uint64_t i) const {
    if (n_ <= 1) return i;
    do {
      i = encrypt(i);
    } while (i >= n_);
    return i;
  }

 private:
  static constexpr size_t kRounds = 8;

  // (high, low) -> (low, high ^ f(low)), the two halves taking turns.
  uint64_t encrypt(uint64_t x) const {
    const uint64_t low_mask = (uint64_t{1} << low_bits_) - 1, high_mask = (uint64_t{1} << high_bits_) - 1;
    uint64_t low = x & low_mask, high = x >> low_bits_;
    for (size_t round = 0; round < kRounds; round += 2) {
      high ^= mix(low ^ keys_[round]) & high_mask;
      low ^= mix(high ^ keys_[round + 1]) & low_mask;
    }
    return (high << low_bits_) | low;
  }

  // The finalizer of MurmurHash3 (public domain): every bit of x reaches every bit of the result.
  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDull;
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ull;
    return x ^ (x >> 33);
  }

  uint64_t n_;
  std::array<uint64_t, kRounds> keys_;
  int low_bits_, high_bits_;
};
