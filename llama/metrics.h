// What a run reports about its steps: the JSONL log, the console's line, rates, and this process's memory.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "comm/traffic.h"
#include "layers/core/log.h"
#include "llama/router_load.h"

/// One optimizer step, over all ranks. Numbers that do not exist are NaN: `null` in the log, "-" on the console.
struct StepMetrics {
  int64_t step = 0;  ///< steps done, the first is 1
  double loss = 0, grad_norm = 0, lr = 0;
  int64_t num_tokens = 0, num_loss_tokens = 0;  ///< of this step, without padding; with a target
  double tokens_per_s = 0, mfu = 0, step_ms = 0, mem_mib = 0;
  double imbalance = 1;                              ///< of the rows over the data-parallel groups; see deal_rows
  std::optional<RouterLoad::Load> router_load = {};  ///< of a mixture of experts
  std::optional<Traffic> traffic = {};               ///< of this rank, with log.traffic
  double wait_ms = 0;                                ///< in collectives, of this rank; with log.traffic
  std::optional<double> eval_loss = {};              ///< on evaluated steps; the log adds eval_ppl = e^eval_loss
};

/// The log line: a JSON object without a line break.
std::string to_json_line(const StepMetrics& metrics);

/// Averages for the console: like "step   12/1000  loss  2.3456 ...", as wide for every step of a run.
std::string to_console_line(const StepMetrics& metrics, int64_t total_steps, double tokens_per_s, double mfu,
                            double eta_s);

/// Whether `step` is reported with log.every = `every`: each of them, the first, the last, and evaluated ones.
bool is_logged_step(int64_t step, int64_t total_steps, int64_t every, bool is_evaluated);

/// The log file: one object a line, exactly one line a step. Lines are written whole and at once, so that a crash loses
/// none. Write a step's line before its checkpoint is saved, and a resumed run has no gap.
class MetricsLog {
 public:
  /// Continues the log of a run after `resume_step` steps: later lines, and a line that a kill cut short, are removed
  /// (the new file replaces the old one in a single rename). With resume_step 0 an existing log is kept under the first
  /// free name `file`.1, .2, ... and a new one starts. A file that is not a log is an Error and stays as it is.
  MetricsLog(const std::filesystem::path& file, int64_t resume_step, Console& console);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;

  /// Appends a line. When that fails (disk full) the console warns once, nothing is left of the line, and training
  /// goes on; the next line is tried again.
  void write(const StepMetrics& metrics);

 private:
  std::filesystem::path file_;
  Console& console_;
  int fd_ = -1;
  bool is_failing_ = false;
};

/// Rates over the last steps: sums that forget 10% a step. The first step (cold caches, first touch of memory) counts
/// only while there is no other.
class StepRate {
 public:
  void add(double step_s, double num_tokens, double flops);
  double tokens_per_s() const { return tokens_ / seconds_; }
  double flops_per_s() const { return flops_ / seconds_; }
  double eta_s(int64_t remaining_steps) const { return static_cast<double>(remaining_steps) * seconds_ / steps_; }

 private:
  int64_t num_added_ = 0;
  double steps_ = 0, seconds_ = 0, tokens_ = 0, flops_ = 0;
};
