#include "data/shuffle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <vector>

#include "data/epoch_order.h"

namespace {

std::vector<uint64_t> order_of(uint64_t n, uint64_t seed, uint64_t counter) {
  const Permutation p(n, seed, "documents", counter);
  std::vector<uint64_t> order;
  for (uint64_t i = 0; i < n; i++) order.push_back(p(i));
  return order;
}

TEST(Permutation, is_a_bijection_for_every_n) {
  for (uint64_t n = 0; n <= 2000; n++) {
    const auto order = order_of(n, n, 3);
    std::vector<bool> seen(n, false);
    for (const uint64_t i : order) {
      ASSERT_LT(i, n);
      ASSERT_FALSE(seen[i]);
      seen[i] = true;
    }
  }
}

TEST(Permutation, large_n_stays_in_range_without_memory) {
  for (const uint64_t n : {uint64_t{1} << 32, (uint64_t{1} << 40) + 12345, (uint64_t{1} << 62) - 1}) {
    const Permutation p(n, 1, "documents", 0);
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < 1000; i++) seen.insert(p(n - 1 - i * (n / 1001)));
    EXPECT_EQ(seen.size(), 1000u);
    EXPECT_LT(*seen.rbegin(), n);
  }
}

TEST(Permutation, depends_on_seed_name_and_counter_and_on_nothing_else) {
  EXPECT_EQ(order_of(1000, 1, 1), order_of(1000, 1, 1));
  EXPECT_NE(order_of(1000, 1, 1), order_of(1000, 2, 1));
  EXPECT_NE(order_of(1000, 1, 1), order_of(1000, 1, 2));
  EXPECT_NE(Permutation(1000, 1, "rows", 1)(5), Permutation(1000, 1, "documents", 1)(5));
}

// Where element i goes is uniform: counts over many seeds are within 5 standard deviations of their mean. That holds
// for small n, where a Feistel network of few bits would fail, too.
TEST(Permutation, every_element_goes_everywhere_equally_often) {
  constexpr int kTrials = 10000;
  for (const uint64_t n : {2, 3, 5, 16, 40}) {
    std::vector<std::vector<int>> counts(n, std::vector<int>(n, 0));
    int rising = 0;
    for (int trial = 0; trial < kTrials; trial++) {
      const Permutation p(n, static_cast<uint64_t>(trial), "documents", 7);
      for (uint64_t i = 0; i < n; i++) counts[i][p(i)]++;
      rising += p(0) < p(1);
    }
    const double q = 1.0 / static_cast<double>(n), mean = kTrials * q, deviation = std::sqrt(kTrials * q * (1 - q));
    for (const auto& row : counts) {
      for (const int count : row) EXPECT_NEAR(count, mean, 5 * deviation) << n;
    }
    EXPECT_NEAR(rising, kTrials / 2, 5 * std::sqrt(kTrials / 4.0)) << n;
  }
}

TEST(Permutation, all_orders_of_four_come_equally_often) {
  constexpr int kTrials = 12000;
  std::map<std::vector<uint64_t>, int> counts;
  for (int trial = 0; trial < kTrials; trial++) counts[order_of(4, 5, static_cast<uint64_t>(trial))]++;
  EXPECT_EQ(counts.size(), 24u);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 500, 5 * std::sqrt(500.0));
}

// A Feistel network of 4 bits would make even orders of 16 only.
TEST(Permutation, half_of_all_orders_are_odd) {
  constexpr int kTrials = 2000;
  int odd = 0;
  for (int trial = 0; trial < kTrials; trial++) {
    const auto order = order_of(16, 5, static_cast<uint64_t>(trial));
    int inversions = 0;
    for (size_t i = 0; i < 16; i++) {
      for (size_t j = i + 1; j < 16; j++) inversions += order[i] > order[j];
    }
    odd += inversions % 2;
  }
  EXPECT_NEAR(odd, kTrials / 2, 5 * std::sqrt(kTrials / 4.0));
}

// Two epochs share about one place in n (as random orders do), and neighbours do not stay neighbours.
TEST(Permutation, epochs_are_unrelated) {
  constexpr uint64_t kN = 10000;
  int same = 0, neighbours = 0;
  for (uint64_t epoch = 0; epoch < 20; epoch++) {
    const auto a = order_of(kN, 1, epoch), b = order_of(kN, 1, epoch + 1);
    for (uint64_t i = 0; i < kN; i++) same += a[i] == b[i];
    for (uint64_t i = 0; i + 1 < kN; i++) neighbours += a[i] + 1 == a[i + 1];
  }
  // Both are Poisson with mean 20.
  EXPECT_NEAR(same, 20, 5 * std::sqrt(20.0));
  EXPECT_NEAR(neighbours, 20, 5 * std::sqrt(20.0));
}

std::map<int64_t, int64_t> copies_in(const EpochOrder& order) {
  std::map<int64_t, int64_t> copies;
  for (int64_t i = 0; i < order.size(); i++) copies[order.document(i)]++;
  return copies;
}

TEST(EpochOrder, every_epoch_has_another_order_unless_it_is_not_shuffled) {
  const std::vector<DocumentRange> sources = {{0, 100, 1}};
  for (const bool shuffle : {false, true}) {
    const EpochOrder first(sources, 5, 0, shuffle), second(sources, 5, 1, shuffle);
    int64_t same = 0;
    for (int64_t i = 0; i < 100; i++) same += first.document(i) == second.document(i);
    if (shuffle) {
      EXPECT_LT(same, 10);  // 1 on average
    } else {
      EXPECT_EQ(same, 100);
    }
  }
}

TEST(EpochOrder, a_document_comes_weight_times) {
  const std::vector<DocumentRange> sources = {{0, 7, 1}, {7, 10, 3}, {17, 4, 2}};
  for (const bool shuffle : {false, true}) {
    const EpochOrder order(sources, 1, 2, shuffle);
    EXPECT_EQ(order.size(), 7 + 30 + 8);
    auto copies = copies_in(order);
    for (int64_t d = 0; d < 21; d++) EXPECT_EQ(copies[d], d < 7 ? 1 : d < 17 ? 3 : 2) << d;
  }
}

TEST(EpochOrder, fractions_take_turns) {
  const std::vector<DocumentRange> sources = {{0, 10, 0.5}, {10, 9, 1.25}};
  for (const bool shuffle : {false, true}) {
    std::map<int64_t, int64_t> total;
    for (int64_t epoch = 0; epoch < 4; epoch++) {
      auto copies = copies_in(EpochOrder(sources, 1, epoch, shuffle));
      int64_t halves = 0, quarters = 0;
      for (const auto& [document, count] : copies) {
        (document < 10 ? halves : quarters) += count;
        EXPECT_LE(count, document < 10 ? 1 : 2);
        total[document] += count;
      }
      EXPECT_EQ(halves, 5);
      EXPECT_GE(quarters, 9 + 2);
      EXPECT_LE(quarters, 9 + 3);
    }
    // In four epochs a weight of 0.5 has shown each document twice, 1.25 five times.
    for (int64_t d = 0; d < 19; d++) EXPECT_EQ(total[d], d < 10 ? 2 : 5) << d;
  }
}

TEST(EpochOrder, without_shuffle_files_come_in_order) {
  const EpochOrder order({{0, 3, 1}, {3, 2, 2}}, 1, 5, false);
  std::vector<int64_t> documents;
  for (int64_t i = 0; i < order.size(); i++) documents.push_back(order.document(i));
  EXPECT_EQ(documents, (std::vector<int64_t>{0, 1, 2, 3, 4, 3, 4}));
}

TEST(EpochOrder, shuffle_mixes_sources) {
  const EpochOrder order({{0, 1000, 1}, {1000, 1000, 1}}, 1, 0, true);
  int64_t first_half = 0;
  for (int64_t i = 0; i < 1000; i++) first_half += order.document(i) < 1000;
  EXPECT_NEAR(static_cast<double>(first_half), 500, 5 * std::sqrt(2000.0) / 4);  // hypergeometric: sd = sqrt(N)/4
}

}  // namespace
