#include "llama/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "layers/core/check.h"

namespace {

int64_t wsd_decay_steps(const RunConfig::Schedule& schedule, int64_t total_steps) {
  return std::max<int64_t>(1, std::llround(schedule.decay_ratio * static_cast<double>(total_steps)));
}

/// 1 at the start of the fall, 0 at its end.
double remaining_share(const RunConfig::Schedule& schedule, int64_t step, int64_t total_steps) {
  const int64_t first = schedule.warmup_steps, last = total_steps - 1;
  if (schedule.name == "constant") return 1;
  if (schedule.name == "wsd") {
    const int64_t decay_steps = wsd_decay_steps(schedule, total_steps);
    return std::min(1.0, static_cast<double>(last - step) / static_cast<double>(decay_steps));
  }
  if (first == last) return 0;
  const double left = static_cast<double>(last - step) / static_cast<double>(last - first);
  return schedule.name == "linear" ? left : 0.5 * (1.0 - std::cos(std::numbers::pi * left));
}

}  // namespace

void validate_schedule(const RunConfig::Schedule& schedule, int64_t total_steps) {
  CHECK(schedule.warmup_steps < total_steps,
        "schedule.warmup_steps = {} does not leave a step of the {} to train at lr", schedule.warmup_steps,
        total_steps);
  if (schedule.name == "wsd" && total_steps > 1) {
    const int64_t decay_steps = wsd_decay_steps(schedule, total_steps);
    const bool reaches_lr = schedule.warmup_steps > 0 || decay_steps < total_steps;
    CHECK(schedule.warmup_steps + decay_steps <= total_steps && reaches_lr,
          "schedule.warmup_steps = {} and schedule.decay_ratio = {} ({} steps) leave no step of {} at lr: lower one",
          schedule.warmup_steps, schedule.decay_ratio, decay_steps, total_steps);
  }
}

double lr_at(const RunConfig::Schedule& schedule, double base_lr, int64_t step, int64_t total_steps) {
  CHECK(step >= 0 && step < total_steps, "lr_at: step {} of {}", step, total_steps);
  if (step < schedule.warmup_steps) {
    return base_lr * (static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps));
  }
  if (total_steps == 1) return base_lr;
  const double share = remaining_share(schedule, step, total_steps);
  return base_lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share);
}
