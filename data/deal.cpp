#include "data/deal.h"

#include <algorithm>
#include <numeric>

#include "layers/core/check.h"

Deal deal_rows(std::span<const double> costs, int64_t groups, int64_t micro_batch_size) {
  CHECK(groups >= 1 && micro_batch_size >= 1, "{} groups, {} rows", groups, micro_batch_size);
  std::vector<int64_t> order(costs.size());
  std::iota(order.begin(), order.end(), 0);
  if (groups > 1) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return costs[static_cast<size_t>(a)] > costs[static_cast<size_t>(b)];
    });
  }
  Deal deal;
  double slowest = 0, mean = 0;
  const int64_t num_rows = static_cast<int64_t>(costs.size());
  for (int64_t begin = 0; begin < num_rows; begin += groups * micro_batch_size) {
    std::vector<std::vector<int64_t>> step(static_cast<size_t>(groups));
    std::vector<double> step_costs(static_cast<size_t>(groups));
    for (int64_t i = begin; i < std::min(num_rows, begin + groups * micro_batch_size); i++) {
      const int64_t round = (i - begin) / groups, place = (i - begin) % groups;
      const auto group = static_cast<size_t>(round % 2 == 0 ? place : groups - 1 - place);
      const int64_t row = order[static_cast<size_t>(i)];
      step[group].push_back(row);
      step_costs[group] += costs[static_cast<size_t>(row)];
    }
    slowest += *std::max_element(step_costs.begin(), step_costs.end());
    mean += std::accumulate(step_costs.begin(), step_costs.end(), 0.0) / static_cast<double>(groups);
    deal.rows.push_back(std::move(step));
  }
  if (mean > 0) deal.imbalance = slowest / mean;
  return deal;
}
