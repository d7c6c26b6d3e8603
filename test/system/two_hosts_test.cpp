// Runs on two hosts (two_hosts.sh): they compute what one host computes, and end when the cable between them is cut.
#include "test/system/program.h"

namespace {

constexpr int kSkipped = 77, kOutOfTime = 124;

std::vector<std::string> two_hosts(int ranks_per_host, const std::string& cut_when = "") {
  return {"/usr/bin/env", "LIMIT=30", "CUT_WHEN=" + cut_when, "test/system/two_hosts.sh",
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

// parallel.timeout_s is longer than it takes Open MPI to notice (scripts/launch/openmpi.conf): mpirun, once it aborts,
// would wait for the host that it cannot reach.
TEST_F(TwoHosts, a_cut_cable_ends_the_run_and_the_next_start_goes_on) {
  const auto arguments =
      small_run(dir_, {"--train.steps", "5000", "--batch.micro_batch_size", "1", "--parallel.sp_size", "2",
                       "--checkpoint.every", "2", "--parallel.timeout_s", "20"});
  {
    Program program(arguments, dir_ / "output", two_hosts(1, dir_ / "cut"));
    if (!program.wait_for("/step_000002\n")) {
      const ProgramResult result = program.wait();
      if (result.exit_code == kSkipped) GTEST_SKIP() << result.output;
      FAIL() << result.output;
    }
    std::ofstream(dir_ / "cut") << "";
    const ProgramResult result = program.wait();
    EXPECT_NE(result.exit_code, 0) << result.output;
    EXPECT_NE(result.exit_code, kOutOfTime) << "it hangs\n" << result.output;
    EXPECT_NE(result.output.find("lost communication with a remote daemon"), std::string::npos) << result.output;
    EXPECT_NE(result.output.find("on node 10.77.0.2"), std::string::npos) << result.output;
  }
  const int64_t last = read_log(dir_ / "run/log.jsonl").back().at("step").get<int64_t>();
  const ProgramResult resumed =
      run_program(small_run(dir_, {"--train.steps", std::to_string(last + 1), "--batch.micro_batch_size", "1"}));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("resumed from"), std::string::npos) << resumed.output;
}

}  // namespace
