// Which rows of a global batch which group of ranks computes, and when. Under ZeRO-3 every rank takes part in every
// layer of every micro-step, so that a micro-step lasts as long as its most expensive row: rows of equal cost belong
// into the same one. The gradient is the same sum however rows are dealt.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

struct Deal {
  /// rows[m][g]: indices of the rows that group g computes in micro-step m, at most micro_batch_size. May be empty.
  std::vector<std::vector<std::vector<int64_t>>> rows;
  /// Time over that of perfect balance: sum over micro-steps of the largest cost of a group, over that of the mean.
  double imbalance = 1;
};

/// Sorted by falling cost (then by index), micro-steps take groups * micro_batch_size rows each, and deal them to the
/// groups to and fro. One group: the rows in their order.
Deal deal_rows(std::span<const double> costs, int64_t groups, int64_t micro_batch_size);
