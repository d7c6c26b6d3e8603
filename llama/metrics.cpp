#include "llama/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fs = std::filesystem;

// ---- Lines

std::string to_json_line(const StepMetrics& m) {
  nlohmann::ordered_json line = {{"step", m.step},
                                 {"loss", m.loss},
                                 {"grad_norm", m.grad_norm},
                                 {"lr", m.lr},
                                 {"num_tokens", m.num_tokens},
                                 {"num_loss_tokens", m.num_loss_tokens},
                                 {"tokens_per_s", m.tokens_per_s},
                                 {"mfu", m.mfu},
                                 {"step_ms", m.step_ms},
                                 {"mem_mib", m.mem_mib},
                                 {"imbalance", m.imbalance}};
  if (m.router_load) {
    // Rows are never dropped: said, because other trainers do drop them.
    line["experts"] = {{"max_over_mean", m.router_load->max_over_mean}, {"dropped", 0}};
    line["balance_loss"] = m.router_load->balance_loss;
  }
  if (m.traffic) {
    const auto add = [&](const char* what, const Traffic::Kind& kind) {
      line[what] = {{"calls", kind.calls}, {"bytes", kind.bytes}};
    };
    add("gathers", m.traffic->gathers), add("reduces", m.traffic->reduces);
    add("replica_sums", m.traffic->replica_sums), add("exchanges", m.traffic->exchanges);
    line["wait_ms"] = m.wait_ms;
  }
  if (m.eval_loss) {
    line["eval_loss"] = *m.eval_loss;
    line["eval_ppl"] = std::exp(*m.eval_loss);
  }
  return line.dump();  // non-finite numbers become null
}

std::string to_console_line(const StepMetrics& m, int64_t total_steps, double tokens_per_s, double mfu, double eta_s) {
  const auto number = [](double x, const char* format) {
    return std::isfinite(x) ? fmt::format(fmt::runtime(format), x) : std::string("-");
  };
  const size_t step_width = fmt::formatted_size("{}", total_steps);
  std::string line = fmt::format(
      "step {:>{}}/{}  loss {:>7}  norm {:>8}  lr {:>8}  {:>5} tok/s  mfu {:>5}  mem {:>8}  eta {:>6}", m.step,
      step_width, total_steps, number(m.loss, "{:.4f}"), number(m.grad_norm, "{:.4g}"), number(m.lr, "{:.2e}"),
      std::isfinite(tokens_per_s) ? format_count(tokens_per_s) : "-", number(100 * mfu, "{:.1f}%"),
      std::isfinite(m.mem_mib) ? format_bytes(m.mem_mib * 0x1p20) : "-", format_duration(eta_s));
  if (m.router_load) line += fmt::format("  experts {:.2f}", m.router_load->max_over_mean);
  if (m.imbalance >= 1.005) line += fmt::format("  imbalance {:.2f}", m.imbalance);
  if (m.eval_loss) {
    line += fmt::format("  eval {} (ppl {})", number(*m.eval_loss, "{:.4f}"), number(std::exp(*m.eval_loss), "{:.4g}"));
  }
  return line;
}

bool is_logged_step(int64_t step, int64_t total_steps, int64_t every, bool is_evaluated) {
  return step == 1 || step == total_steps || step % every == 0 || is_evaluated;
}

// ---- The file

namespace {

[[noreturn]] void fail_errno(const fs::path& file, const char* what) {
  fail("log.file {}: cannot {}: {}", file.string(), what, std::strerror(errno));
}

/// The step of a log line, or none if it is not one.
std::optional<int64_t> step_of(const std::string& line) {
  const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || !object.contains("step") || !object["step"].is_number_integer()) return std::nullopt;
  return object["step"].get<int64_t>();
}

/// Copies to `to` the lines of `from` that a run continuing after `resume_step` keeps; whether any was left out.
/// Only the last line, and only without its line break, may be half written.
bool copy_kept_lines(const fs::path& from, const fs::path& to, int64_t resume_step) {
  std::ifstream in(from, std::ios::binary);
  if (!in) fail_errno(from, "read it");
  std::ofstream out(to, std::ios::binary | std::ios::trunc);
  if (!out) fail_errno(to, "write it");
  bool is_changed = false;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); number++) {
    const bool is_cut = in.eof();
    const std::optional<int64_t> step = step_of(line);
    CHECK(step || is_cut, "log.file {}: line {} is not a line of a training log: give another file", from.string(),
          number);
    const bool is_kept = step && *step <= resume_step;
    if (is_kept) out << line << '\n';
    is_changed |= is_cut || !is_kept;
  }
  out.flush();
  if (!out) fail_errno(to, "write it");
  return is_changed;
}

void sync_path(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 || ::fsync(fd) != 0) fail_errno(path, "write it to disk");
  ::close(fd);
}

void remove_later_lines(const fs::path& file, int64_t resume_step) {
  fs::path copy = file;
  copy += ".tmp";
  try {
    if (copy_kept_lines(file, copy, resume_step)) {
      sync_path(copy);
      if (::rename(copy.c_str(), file.c_str()) != 0) fail_errno(file, "replace it");
      return;
    }
  } catch (...) {
    ::unlink(copy.c_str());
    throw;
  }
  ::unlink(copy.c_str());
}

/// The first free name file.1, file.2, ...
fs::path set_aside(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::string line;
  std::getline(in, line);
  CHECK(step_of(line) || (in.eof() && line.starts_with("{\"")),
        "log.file {}: line 1 is not a line of a training log: give another file", file.string());
  for (int64_t i = 1;; i++) {
    fs::path kept = file;
    kept += fmt::format(".{}", i);
    if (fs::exists(fs::symlink_status(kept))) continue;
    if (::rename(file.c_str(), kept.c_str()) != 0) fail_errno(file, "rename it");
    return kept;
  }
}

}  // namespace

MetricsLog::MetricsLog(const fs::path& file, int64_t resume_step, Console& console) : file_(file), console_(console) {
  std::error_code error;
  if (file.has_parent_path()) fs::create_directories(file.parent_path(), error);
  if (fs::exists(file, error)) file_ = fs::canonical(file, error);  // the file that a link names is rewritten
  // Only a regular file has a past: /dev/null or a pipe just takes lines.
  if (fs::is_regular_file(file_, error) && fs::file_size(file_, error) > 0) {
    if (resume_step > 0) {
      remove_later_lines(file_, resume_step);
    } else {
      const fs::path kept = set_aside(file_);
      console.info("{}: this is a new run, the earlier log is now {}", file_.string(), kept.string());
    }
  }
  fd_ = ::open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail_errno(file_, "open it for writing");
}

MetricsLog::~MetricsLog() {
  if (fd_ >= 0) ::close(fd_);
}

void MetricsLog::write(const StepMetrics& metrics) {
  const std::string line = to_json_line(metrics) + "\n";
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t n = ::write(fd_, line.data() + done, line.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  const bool is_failing = done < line.size();
  if (is_failing) {
    const int reason = errno;
    const bool is_removed = done == 0 || ::ftruncate(fd_, ::lseek(fd_, 0, SEEK_END) - static_cast<off_t>(done)) == 0;
    if (!is_failing_) {
      console_.warning("{}: cannot write the line of step {}: {}; training goes on{}", file_.string(), metrics.step,
                       std::strerror(reason), is_removed ? "" : ", and half a line is left");
    }
  }
  is_failing_ = is_failing;
}

// ---- Rates and memory

void StepRate::add(double step_s, double num_tokens, double flops) {
  constexpr double kKept = 0.9;
  const double kept = num_added_ <= 1 ? 0.0 : kKept;  // nothing before, or only the first step
  num_added_++;
  steps_ = kept * steps_ + 1;
  seconds_ = kept * seconds_ + step_s;
  tokens_ = kept * tokens_ + num_tokens;
  flops_ = kept * flops_ + flops;
}
