// Runs on two hosts (two_hosts.sh): they compute what one host computes, and end when the cable between them is cut.
#include "test/system/program.h"

namespace {

constexpr int kSkipped = 77, kOutOfTime = 124;

/// Open MPI notices 2 seconds after `keepalive_s` that a host is cut off.
std::vector<std::string> two_hosts(int ranks_per_host, const std::string& cut_when = "", int keepalive_s = 3) {
  return {"/usr/bin/env",
          "LIMIT=40",
          "CUT_WHEN=" + cut_when,
          "KEEPALIVE=" + std::to_string(keepalive_s),
          "test/system/two_hosts.sh",
          std::to_string(ranks_per_host)};
}

class TwoHosts : public testing::Test {
 protected:
  /// Losses, gradient norms and trained weights, bit for bit: the order of every sum is that of the ranks.
  void expect_same_run(int ranks_per_host, const std::string& sp_size) {
    const auto run = [&](const std::string& name) {
      return small_run(dir_, {"--train.steps", "6", "--batch.micro_batch_size", "1", "--checkpoint.dir", dir_ / name,
                              "--parallel.sp_size", sp_size});
    };
    const ProgramResult two = run_program(run("two"), two_hosts(ranks_per_host));
    if (two.exit_code == kSkipped) GTEST_SKIP() << two.output;
    ASSERT_EQ(two.exit_code, 0) << two.output;
    const ProgramResult one = run_program(run("one"), mpirun(2 * ranks_per_host));
    ASSERT_EQ(one.exit_code, 0) << one.output;
    const auto a = read_log(dir_ / "one/log.jsonl"), b = read_log(dir_ / "two/log.jsonl");
    ASSERT_EQ(a.size(), 6u);
    ASSERT_EQ(b.size(), 6u);
    for (size_t i = 0; i < a.size(); i++) {
      EXPECT_EQ(a[i].at("loss"), b[i].at("loss")) << i;
      EXPECT_EQ(a[i].at("grad_norm"), b[i].at("grad_norm")) << i;
    }
    const std::string weights = read_text(dir_ / "one/step_000006/model.safetensors");
    EXPECT_FALSE(weights.empty());
    EXPECT_TRUE(weights == read_text(dir_ / "two/step_000006/model.safetensors"));
  }

  TemporaryDirectory dir_;
};

TEST_F(TwoHosts, sharded_weights_train_as_on_one_host) {
  expect_same_run(1, "1");
}

TEST_F(TwoHosts, a_sequence_over_both_trains_as_on_one_host) {
  expect_same_run(1, "2");
}

TEST_F(TwoHosts, groups_within_a_host_train_as_on_one_host) {
  expect_same_run(2, "2");
}

struct Cut {
  const char* timeout_s;
  int keepalive_s;
  const char* first_line;  ///< of whoever notices first
};

// Either the ranks notice first that nothing moves, or Open MPI that a host is silent. Both say who waits where for
// whom.
TEST_F(TwoHosts, a_cut_cable_ends_the_run_with_an_error_that_names_the_lost_rank_and_the_next_start_goes_on) {
  for (const Cut& cut : {Cut{"3", 300, "error: nothing has moved for 3 s (parallel.timeout_s)"},
                         Cut{"100", 3, "SIGTERM came while this rank waits for all_to_all"}}) {
    std::filesystem::remove_all(dir_ / "run"), std::filesystem::remove(dir_ / "cut");
    const auto arguments =
        small_run(dir_, {"--train.steps", "5000", "--batch.micro_batch_size", "1", "--parallel.sp_size", "2",
                         "--checkpoint.every", "2", "--parallel.timeout_s", cut.timeout_s});
    {
      Program program(arguments, dir_ / "output", two_hosts(1, dir_ / "cut", cut.keepalive_s));
      if (!program.wait_for("/step_000002\n")) {
        const ProgramResult result = program.wait();
        if (result.exit_code == kSkipped) GTEST_SKIP() << result.output;
        FAIL() << result.output;
      }
      std::ofstream(dir_ / "cut") << "";
      const ProgramResult result = program.wait();
      EXPECT_NE(result.exit_code, 0) << result.output;
      EXPECT_NE(result.exit_code, kOutOfTime) << "it hangs\n" << result.output;
      for (const char* part : {cut.first_line, "\n  rank 0 (host0): waits for all_to_all", "\n  rank 1 (host1): "}) {
        EXPECT_NE(result.output.find(part), std::string::npos) << part << "\n" << result.output;
      }
      const std::string lost = result.output.substr(result.output.find("\n  rank 1 (host1): "));
      EXPECT_TRUE(lost.find("silent for") < lost.find('\n', 1) || lost.find("s ago)") < lost.find('\n', 1)) << lost;
    }
    const int64_t last = read_log(dir_ / "run/log.jsonl").back().at("step").get<int64_t>();
    const ProgramResult resumed =
        run_program(small_run(dir_, {"--train.steps", std::to_string(last + 1), "--batch.micro_batch_size", "1"}));
    EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
    EXPECT_NE(resumed.output.find("resumed from"), std::string::npos) << resumed.output;
  }
}

}  // namespace
