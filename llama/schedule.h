// The learning rate of every step.
//
//   warm-up:          step s < w              base * (s + 1) / w           so that step w - 1 has base
//   linear, cosine:   w <= s <= n - 1         base at s = w, base * min_lr_ratio at s = n - 1
//   wsd:              the last d steps fall linearly, ending with base * min_lr_ratio at s = n - 1;
//                     d = decay_ratio * n rounded, at least 1
//   constant:         base
// for n steps in all, numbered from 0. Where the fall has one step only (w = n - 1 > 0), it has the end's value; a
// run of a single step trains at base.
#pragma once

#include "llama/run_config.h"

/// Checks what depends on the number of steps: the warm-up (and wsd's fall) fit into them.
void validate_schedule(const RunConfig::Schedule& schedule, int64_t total_steps);

double lr_at(const RunConfig::Schedule& schedule, double base_lr, int64_t step, int64_t total_steps);
