#include "llama/metrics.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

namespace {

namespace fs = std::filesystem;

class MetricsLogTest : public testing::Test {
 protected:
  void SetUp() override {
    directory_ = fs::path(testing::TempDir()) / fmt::format("metrics_test_{}", ::getpid());
    fs::create_directories(directory_);
    file_ = directory_ / "log.jsonl";
    out_ = open_memstream(&text_, &size_);
  }
  void TearDown() override {
    std::fclose(out_);
    std::free(text_);
    fs::remove_all(directory_);
  }
  /// Steps first .. last in one process that resumed after `resume_step`.
  void run(int64_t resume_step, int64_t first, int64_t last, const fs::path& file = {}) {
    Console console(out_, false, true);
    MetricsLog log(file.empty() ? file_ : file, resume_step, console);
    for (int64_t s = first; s <= last; s++) log.write({.step = s, .loss = 1.0 / static_cast<double>(s)});
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> steps;
    std::ifstream in(file_);
    for (std::string line; std::getline(in, line);) steps.push_back(nlohmann::json::parse(line).at("step"));
    return steps;
  }
  void append(const std::string& text) { std::ofstream(file_, std::ios::app) << text; }
  std::string content() const {
    std::ifstream in(file_);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  size_t num_files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()));
  }
  std::string console_text() {
    std::fflush(out_);
    return std::string(text_, size_);
  }

  fs::path directory_, file_;
  char* text_ = nullptr;
  size_t size_ = 0;
  FILE* out_ = nullptr;
};

using Steps = std::vector<int64_t>;

TEST_F(MetricsLogTest, each_line_is_an_object_with_the_documented_keys_in_order) {
  EXPECT_EQ(to_json_line({.step = 3,
                          .loss = 2.5,
                          .grad_norm = 0.5,
                          .lr = 1e-5,
                          .num_tokens = 100,
                          .num_loss_tokens = 90,
                          .tokens_per_s = 50,
                          .mfu = 0.25,
                          .step_ms = 2000,
                          .mem_mib = 12.5}),
            R"({"step":3,"loss":2.5,"grad_norm":0.5,"lr":1e-05,"num_tokens":100,"num_loss_tokens":90,)"
            R"("tokens_per_s":50.0,"mfu":0.25,"step_ms":2000.0,"mem_mib":12.5,"imbalance":1.0})");
  const auto evaluated = nlohmann::json::parse(to_json_line({.step = 3, .eval_loss = 2.0}));
  EXPECT_EQ(evaluated.at("eval_loss"), 2.0);
  EXPECT_EQ(evaluated.at("eval_ppl"), std::exp(2.0));
}

TEST_F(MetricsLogTest, numbers_that_are_not_finite_are_null) {
  const auto line = nlohmann::json::parse(
      to_json_line({.step = 1, .loss = NAN, .grad_norm = INFINITY, .lr = -INFINITY, .mfu = NAN, .eval_loss = 1e10}));
  for (const char* key : {"loss", "grad_norm", "lr", "mfu", "eval_ppl"}) EXPECT_TRUE(line.at(key).is_null()) << key;
}

TEST_F(MetricsLogTest, losses_keep_every_bit) {
  const double loss = 2.0 / 3.0;
  EXPECT_EQ(nlohmann::json::parse(to_json_line({.step = 1, .loss = loss})).at("loss").get<double>(), loss);
}

TEST_F(MetricsLogTest, a_resumed_run_leaves_one_line_a_step) {
  run(0, 1, 7);
  run(4, 5, 9);  // the checkpoint of step 4; steps 5 .. 7 are computed again
  EXPECT_EQ(steps(), (Steps{1, 2, 3, 4, 5, 6, 7, 8, 9}));
  run(9, 10, 10);
  EXPECT_EQ(steps(), (Steps{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
  EXPECT_EQ(num_files(), 1u) << "no temporary file is left";
}

TEST_F(MetricsLogTest, what_is_kept_is_kept_bit_for_bit) {
  run(0, 1, 4);
  const std::string before = content();
  run(4, 5, 4);  // opens the log and writes nothing
  EXPECT_EQ(content(), before);
}

TEST_F(MetricsLogTest, a_line_that_a_kill_cut_short_is_removed) {
  for (const char* cut : {"{\"step\":4,\"lo", "{", "{\"step\":5}", "\n"}) {
    fs::remove(file_);
    run(0, 1, 3);
    if (*cut != '\n') append(cut);
    run(3, 4, 5);
    EXPECT_EQ(steps(), (Steps{1, 2, 3, 4, 5})) << cut;
  }
  fs::remove(file_);
  run(0, 1, 2);
  append("{\"step\":3}");  // whole but for its line break: kept, and closed
  run(3, 4, 4);
  EXPECT_EQ(steps(), (Steps{1, 2, 3, 4}));
}

TEST_F(MetricsLogTest, a_new_run_keeps_the_earlier_log_aside) {
  run(0, 1, 2);
  const std::string first = content();
  run(0, 1, 3);
  run(0, 1, 1);
  EXPECT_EQ(steps(), Steps{1});
  EXPECT_EQ(num_files(), 3u);
  std::ifstream in(directory_ / "log.jsonl.1");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), first);
  EXPECT_NE(console_text().find(fmt::format("the earlier log is now {}.2\n", file_.string())), std::string::npos);
}

TEST_F(MetricsLogTest, a_file_that_is_not_a_log_is_refused_and_left_alone) {
  const std::string text = "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [4]}\n";
  append(text);
  for (const int64_t resume_step : {0, 5}) {
    try {
      run(resume_step, 1, 1);
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()),
                fmt::format("log.file {}: line 1 is not a line of a training log: give another file", file_.string()));
    }
    EXPECT_EQ(content(), text);
    EXPECT_EQ(num_files(), 1u);
  }
}

TEST_F(MetricsLogTest, directories_are_made_and_links_are_followed) {
  run(0, 1, 3, directory_ / "a" / "b" / "log.jsonl");
  fs::create_symlink(directory_ / "a" / "b" / "log.jsonl", file_);
  run(2, 3, 3);
  EXPECT_EQ(steps(), (Steps{1, 2, 3}));
  EXPECT_TRUE(fs::is_symlink(file_));
}

TEST_F(MetricsLogTest, what_cannot_be_opened_is_named) {
  try {
    run(0, 1, 1, directory_);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()),
              fmt::format("log.file {}: cannot open it for writing: Is a directory", directory_.string()));
  }
}

TEST_F(MetricsLogTest, a_full_disk_warns_once_and_training_goes_on) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  EXPECT_NO_THROW(run(0, 1, 3, "/dev/full"));
  EXPECT_EQ(console_text(),
            "warning: /dev/full: cannot write the line of step 1: No space left on device; training goes on\n");
}

TEST_F(MetricsLogTest, half_a_line_that_did_not_fit_is_taken_back) {
  run(0, 1, 2);
  const std::string before = content();
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small{before.size() + 10, limit.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_NO_THROW(run(2, 3, 4));
  ::setrlimit(RLIMIT_FSIZE, &limit);
  ::signal(SIGXFSZ, handler);
  EXPECT_EQ(content(), before);
  EXPECT_EQ(console_text(), fmt::format("warning: {}: cannot write the line of step 3: File too large; training goes "
                                        "on\n",
                                        file_.string()));
}

TEST_F(MetricsLogTest, an_empty_file_is_a_log_without_lines) {
  append("");
  run(0, 1, 2);
  EXPECT_EQ(steps(), (Steps{1, 2}));
  EXPECT_EQ(num_files(), 1u);
}

TEST_F(MetricsLogTest, kill_9_at_any_moment_leaves_whole_lines) {
  int64_t resume_step = 0;
  for (int round = 0; round < 10; round++) {
    const pid_t child = ::fork();
    if (child == 0) {
      run(resume_step, resume_step + 1, INT64_MAX);
      ::_exit(0);
    }
    ::usleep(3000);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    if (!fs::exists(file_)) continue;
    const std::string text = content();
    EXPECT_TRUE(text.empty() || text.back() == '\n');
    const Steps seen = steps();
    for (size_t i = 0; i < seen.size(); i++) ASSERT_EQ(seen[i], static_cast<int64_t>(i) + 1);
    resume_step = static_cast<int64_t>(seen.size()) / 2;  // "the checkpoint"
  }
}

TEST(ConsoleLine, is_aligned_for_all_steps_of_a_run) {
  const StepMetrics early = {.step = 1, .loss = 10.98765, .grad_norm = 123.456, .lr = 1e-6, .mem_mib = 312};
  const StepMetrics late = {.step = 1000, .loss = 0.5, .grad_norm = 0.01234, .lr = 1.25e-3, .mem_mib = 4096};
  EXPECT_EQ(to_console_line(early, 1000, 640, 0.681, 723),
            "step    1/1000  loss 10.9877  norm    123.5  lr 1.00e-06    640 tok/s  mfu 68.1%  mem  312 MiB  "
            "eta 12m03s");
  EXPECT_EQ(to_console_line(late, 1000, 16400, 0.05, 0),
            "step 1000/1000  loss  0.5000  norm  0.01234  lr 1.25e-03  16.4k tok/s  mfu  5.0%  mem 4.00 GiB  "
            "eta 0.00 s");
}

TEST(ConsoleLine, shows_what_is_unknown_as_a_dash_and_an_evaluation_at_its_end) {
  EXPECT_EQ(to_console_line({.step = 2, .loss = NAN, .grad_norm = INFINITY, .lr = 1, .mem_mib = NAN, .eval_loss = 2.0},
                            10, NAN, NAN, NAN),
            "step  2/10  loss       -  norm        -  lr 1.00e+00      - tok/s  mfu     -  mem        -  eta      ?  "
            "eval 2.0000 (ppl 7.389)");
}

TEST(LoggedSteps, are_each_nth_the_first_the_last_and_evaluated_ones) {
  Steps logged;
  for (int64_t s = 1; s <= 11; s++) {
    if (is_logged_step(s, 11, 4, s == 6)) logged.push_back(s);
  }
  EXPECT_EQ(logged, (Steps{1, 4, 6, 8, 11}));
}

TEST(StepRate, forgets_the_first_step_once_there_is_another) {
  StepRate rate;
  rate.add(10.0, 100, 1000);
  EXPECT_DOUBLE_EQ(rate.tokens_per_s(), 10);
  EXPECT_DOUBLE_EQ(rate.eta_s(3), 30);
  rate.add(1.0, 100, 1000);
  EXPECT_DOUBLE_EQ(rate.tokens_per_s(), 100);
  EXPECT_DOUBLE_EQ(rate.flops_per_s(), 1000);
  EXPECT_DOUBLE_EQ(rate.eta_s(3), 3);
  rate.add(2.0, 100, 1000);  // (0.9 x 100 + 100) tokens in (0.9 x 1 + 2) seconds
  EXPECT_DOUBLE_EQ(rate.tokens_per_s(), 190 / 2.9);
  EXPECT_DOUBLE_EQ(rate.eta_s(19), 19 * 2.9 / 1.9);
}

}  // namespace
