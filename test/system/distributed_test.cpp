// Many ranks train what one rank trains: loss, gradient norm and every gradient of the same global batch, on every
// mesh. Proven on the program itself, by what debug.dump_dir writes.
#include "layers/core/log.h"
#include "test/system/dump.h"
#include "test/system/program.h"

namespace {

namespace fs = std::filesystem;

/// Of the vocabulary of the small fixtures: documents of 1, 2, odd and many tokens, with their first half masked,
/// wholly masked, or not masked. `state` decides on their tokens only.
std::string mixed_documents(unsigned state = 1) {
  std::string lines;
  const auto next = [&](unsigned n) { return (state = state * 1664525u + 1013904223u) / 65536u % n; };
  const unsigned kLengths[] = {1, 2, 7, 61, 30, 2, 13, 64, 5, 1, 41, 24};
  for (unsigned d = 0; d < 96; d++) {
    const unsigned n = kLengths[d % 12], masked = d % 3 == 0 ? n / 2 : d % 7 == 0 ? n : 0;
    std::string ids, labels;
    for (unsigned i = 0; i < n; i++) {
      const std::string id = std::to_string(3 + next(90));
      ids += (i ? "," : "") + id;
      labels += (i ? "," : "") + (i < masked ? std::string("-100") : id);
    }
    lines += "{\"input_ids\":[" + ids + "],\"labels\":[" + labels + "]}\n";
  }
  return lines;
}

class Distributed : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("command -v mpirun >/dev/null") != 0) GTEST_SKIP() << "no mpirun";
    std::ofstream(dir_ / "mixed.jsonl") << mixed_documents();
  }

  std::vector<std::string> arguments(const std::string& model, const std::vector<std::string>& options) {
    std::map<std::string, std::string> all = {
        {"--model.path", "test/fixtures/" + model}, {"--data.train", dir_ / "mixed.jsonl"}, {"--data.seq_len", "64"},
        {"--data.cache_dir", dir_ / "cache"},       {"--batch.global_batch_size", "8"},     {"--train.steps", "2"},
        {"--checkpoint.dir", dir_ / "run"}};
    for (size_t i = 0; i < options.size(); i += 2) all[options[i]] = options[i + 1];
    std::vector<std::string> list;
    for (const auto& [key, value] : all) list.push_back(key), list.push_back(value);
    return list;
  }

  /// The dump of the first step.
  Dump dump_of(int ranks, const std::string& model, std::vector<std::string> options) {
    fs::remove_all(dir_ / "run"), fs::remove_all(dir_ / "dump");
    for (const char* option : {"--debug.dump_dir", "", "--debug.dump_logits", "true"}) options.push_back(option);
    options[options.size() - 3] = dir_ / "dump";
    const ProgramResult result = run_program(arguments(model, options), mpirun(ranks));
    EXPECT_EQ(result.exit_code, 0) << result.output;
    if (result.exit_code != 0) return {};
    return read_dump(dir_ / "dump/step_000001.safetensors");
  }

  struct Case {
    int ranks;
    std::vector<std::string> options;
  };
  /// Every case against one rank with the options that the cases share.
  void compare(const std::string& model, const std::vector<std::string>& shared, const std::vector<Case>& cases) {
    const Dump one = dump_of(1, model, shared);
    for (const Case& c : cases) {
      std::vector<std::string> options = shared;
      options.insert(options.end(), c.options.begin(), c.options.end());
      std::string what = model + " on " + std::to_string(c.ranks) + " ranks";
      for (const std::string& o : c.options) what += " " + o;
      expect_same_step(one, dump_of(c.ranks, model, options), 1e-5, what);
    }
  }

  TemporaryDirectory dir_;
};

const char* const kSp = "--parallel.sp_size";
const char* const kReplicas = "--parallel.dp_replicate_size";
const char* const kMicro = "--batch.micro_batch_size";

TEST_F(Distributed, every_mesh_has_the_gradients_of_one_rank) {
  // 8 query heads, 4 kv heads: with 8 sequence ranks two share one.
  compare("stories260k", {},
          {{2, {}},
           {4, {}},
           {8, {}},
           {2, {kSp, "2"}},
           {4, {kSp, "4"}},
           {8, {kSp, "8"}},
           {4, {kSp, "2"}},
           {8, {kSp, "2"}},
           {8, {kSp, "2", kReplicas, "2"}},
           {4, {kReplicas, "4"}},
           {2, {kSp, "2", kMicro, "4"}},
           {4, {kSp, "2", kMicro, "2", "--memory.recompute", "block"}}});
}

TEST_F(Distributed, numbers_of_ranks_that_divide_nothing) {
  compare("stories260k", {"--batch.global_batch_size", "30"},
          {{3, {}}, {5, {}}, {6, {kSp, "2"}}, {6, {kReplicas, "3"}}});
}

TEST_F(Distributed, packing_of_every_kind_and_rows_that_are_short) {
  // One document a row: rows of 1 to 64 tokens, so that a row is shorter than the ranks that share it.
  compare("stories260k", {"--data.packing", "none", "--data.seq_len", "64"},
          {{4, {kSp, "4"}}, {4, {kSp, "2"}}, {8, {}}});
  compare("stories260k", {"--data.packing", "concat", "--data.seq_len", "33"}, {{4, {kSp, "4"}}, {2, {}}});
}

TEST_F(Distributed, windows_softcaps_norms_and_shared_kv_heads_follow_their_heads) {
  // Windows of 5 tokens: shorter and longer than what a rank holds.
  compare("gemma2", {}, {{2, {kSp, "2"}}, {6, {kSp, "6"}}});
  compare("gemma2", {"--data.packing", "none"}, {{6, {kSp, "6"}}});
  compare("gemma3_text", {}, {{4, {kSp, "2"}}});
  compare("mistral", {}, {{3, {kSp, "3"}}, {6, {kSp, "6"}}});
  compare("qwen2", {}, {{6, {kSp, "6"}}});
  compare("qwen3", {}, {{4, {kSp, "2"}}});
  compare("olmo2", {}, {{3, {kSp, "3"}}});
  compare("cohere2", {}, {{2, {kSp, "2"}}, {6, {kSp, "6", "--memory.recompute", "block"}}});
  compare("glm4", {}, {{3, {kSp, "3"}}});
  compare("granite_biases", {}, {{3, {kSp, "3"}}});
  compare("qwen3_chunked", {}, {{2, {kSp, "2"}}});
  compare("llama_f16", {}, {{2, {kSp, "2"}}, {6, {kSp, "6"}}});  // 1 kv head
  compare("llama_dynamic", {}, {{2, {kSp, "2"}}});               // rotary tables by the longest document
  compare("llama_yarn", {}, {{3, {kSp, "3"}}});                  // untied, 6 kv heads
  compare("qwen2_tied_yarn", {}, {{6, {kSp, "3"}}});
  compare("gemma3", {}, {{4, {kSp, "2"}}});
  compare("qwen3_vl", {}, {{3, {kSp, "3"}}});
}

TEST_F(Distributed, experts_have_the_gradients_of_one_rank) {
  // A load-balancing loss is of all rows of a micro-step: these are the same on every mesh.
  compare("qwen3_moe", {kMicro, "8"},
          {{2, {kSp, "2"}},
           {2, {kMicro, "4"}},
           {4, {kSp, "2", kMicro, "4"}},
           {4, {kSp, "2", kMicro, "4", kReplicas, "2"}},
           {4, {kMicro, "2", "--memory.recompute", "block"}}});
  compare("qwen3_moe_unnormalised", {kMicro, "2"}, {{2, {kSp, "2"}}});
  compare("mixtral", {kMicro, "8"}, {{3, {kSp, "3"}}, {6, {kSp, "3", kMicro, "4"}}});
  compare("gpt_oss", {kMicro, "8"}, {{2, {kSp, "2"}}, {6, {kSp, "6"}}, {4, {kSp, "2", kMicro, "4"}}});
  // Without such a loss the rows may be cut as they like.
  compare("glm4_moe", {}, {{2, {kSp, "2"}}, {4, {kSp, "2"}}});
  compare("deepseek_v3", {}, {{3, {kSp, "3"}}, {4, {kSp, "2"}}});
  compare("qwen2_moe", {}, {{4, {}}, {6, {kSp, "6"}}});
}

// The fixtures have 6 heads; here are 8, and 4 kv heads where a family has them.
TEST_F(Distributed, every_decoder_under_2_and_4_sequence_ranks) {
  for (const char* family : {"gemma3_text", "cohere2", "glm4", "granite", "qwen3_chunked", "mixtral", "qwen2_moe",
                             "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"}) {
    auto config = nlohmann::json::parse(read_text(fs::path("test/fixtures") / family / "config.json"));
    config["num_attention_heads"] = 8;
    config["num_key_value_heads"] = config.contains("kv_lora_rank") ? 8 : 4;
    if (!config.contains("kv_lora_rank")) config["head_dim"] = 12;
    std::ofstream(dir_ / "config.json") << config.dump();
    // The rows of a micro-step are the same on every mesh, for the sake of a load-balancing loss. The gradient of k's
    // bias nearly cancels: with a small eps the update would be of the size of lr all the same, roundings and all.
    compare(family,
            {"--model.path", dir_ / "config.json", "--model.init", "random", kMicro, "8", "--optimizer.eps", "1e-3"},
            {{2, {kSp, "2"}}, {4, {kSp, "4"}}, {4, {kSp, "2", kMicro, "4"}}});
  }
}

TEST_F(Distributed, any_number_of_kv_heads) {
  // The fixtures have 1, 2, 3, 4 and 6; here are as many as sequence ranks and query heads, and 2 shared by 4.
  auto config = nlohmann::json::parse(read_text("test/fixtures/stories260k/config.json"));
  for (const int kv : {8, 2}) {
    config["num_key_value_heads"] = kv;
    std::ofstream(dir_ / "config.json") << config.dump();
    compare("stories260k", {"--model.path", dir_ / "config.json", "--model.init", "random"},
            {{8, {kSp, "8"}}, {4, {kSp, "4"}}});
  }
}

TEST_F(Distributed, ranks_without_any_target) {
  // Of each row of one document the first part has no target, and half of the rows have none at all: then a sequence
  // rank, or all ranks of a row, has none.
  std::ofstream lines(dir_ / "masked.jsonl");
  for (int d = 0; d < 8; d++) {
    std::string ids, labels;
    for (int i = 0; i < 64; i++) {
      const std::string id = std::to_string(3 + (7 * d + 5 * i) % 90), comma = i ? "," : "";
      ids += comma + id, labels += comma + (d % 2 == 0 || i < 50 ? "-100" : id);
    }
    lines << "{\"input_ids\":[" << ids << "],\"labels\":[" << labels << "]}\n";
  }
  lines.close();
  compare("stories260k", {"--data.train", dir_ / "masked.jsonl", "--data.packing", "none"},
          {{2, {kSp, "2"}}, {4, {kSp, "4"}}, {8, {kSp, "2"}}, {8, {}}});
}

TEST_F(Distributed, a_last_batch_of_fewer_rows_leaves_ranks_without_work) {
  // 96 documents of one row each in batches of 40: the third has 16 rows, for 5 groups of 8.
  const std::vector<std::string> shared = {
      "--data.packing", "none", "--batch.global_batch_size", "40", "--train.steps", "null", "--train.epochs", "1"};
  std::vector<double> losses[2];
  for (const int ranks : {1, 5}) {
    fs::remove_all(dir_ / "run");
    std::vector<std::string> options = shared;
    options.insert(options.end(), {"--batch.micro_batch_size", "1", "--data.eval", dir_ / "mixed.jsonl"});
    const ProgramResult result = run_program(arguments("stories260k", options), mpirun(ranks));
    ASSERT_EQ(result.exit_code, 0) << result.output;
    for (const auto& line : read_log(dir_ / "run/log.jsonl")) {
      losses[ranks > 1].push_back(line.at("loss"));
      if (line.contains("eval_loss")) losses[ranks > 1].push_back(line.at("eval_loss"));
    }
  }
  ASSERT_EQ(losses[0].size(), 4u);
  ASSERT_EQ(losses[1].size(), 4u);
  for (size_t i = 0; i < 4; i++) EXPECT_NEAR(losses[0][i], losses[1][i], 1e-5 * losses[0][i]) << i;
}

TEST_F(Distributed, a_run_goes_on_with_any_number_of_ranks) {
  const auto with = [&](const std::string& run, const char* steps, const char* sp) {
    return arguments("stories260k", {"--train.steps", steps, "--schedule.name", "constant", "--checkpoint.dir",
                                     dir_ / run, "--batch.global_batch_size", "24", kSp, sp});
  };
  const auto losses = [&](const std::string& run) {
    std::vector<double> l;
    for (const auto& line : read_log(dir_ / run / "log.jsonl")) l.push_back(line.at("loss"));
    return l;
  };
  const ProgramResult whole = run_program(with("whole", "4", "1"), mpirun(1));
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  const ProgramResult begun = run_program(with("begun", "2", "2"), mpirun(4));  // dp 2 x sp 2
  ASSERT_EQ(begun.exit_code, 0) << begun.output;
  struct Mesh {
    int ranks;
    const char* sp;
  };
  const auto expected = losses("whole");
  for (const Mesh& mesh : {Mesh{1, "1"}, {2, "2"}, {3, "1"}, {8, "4"}}) {
    fs::remove_all(dir_ / "run");
    fs::copy(dir_ / "begun", dir_ / "run", fs::copy_options::recursive);
    const ProgramResult result = run_program(with("run", "4", mesh.sp), mpirun(mesh.ranks));
    ASSERT_EQ(result.exit_code, 0) << result.output;
    EXPECT_NE(result.output.find("after step 2"), std::string::npos) << result.output;
    const auto found = losses("run");
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); i++) EXPECT_NEAR(found[i], expected[i], 1e-6 * expected[i]) << mesh.ranks;
  }
}

TEST_F(Distributed, what_is_sent_is_what_the_formulas_say) {
  struct Sent {
    int ranks;
    std::vector<std::string> options;
  };
  // Rows of exactly 64 tokens, so that a rank's tokens are those of the plan.
  for (const Sent& c : {Sent{3, {"--batch.global_batch_size", "9"}}, Sent{4, {kSp, "2", kMicro, "2"}},
                        Sent{8, {kSp, "8", "--memory.recompute", "block"}},
                        Sent{8, {kSp, "2", kReplicas, "2", "--train.grad_dtype", "bf16"}}, Sent{4, {kReplicas, "4"}}}) {
    fs::remove_all(dir_ / "run");
    std::vector<std::string> options = {"--data.packing",
                                        "concat",
                                        "--data.shuffle",
                                        "false",
                                        "--log.traffic",
                                        "true",
                                        "--debug.check_collectives",
                                        "true"};
    options.insert(options.end(), c.options.begin(), c.options.end());
    const ProgramResult result = run_program(arguments("stories260k", options), mpirun(c.ranks));
    ASSERT_EQ(result.exit_code, 0) << result.output;
    // The plan prints what a step sends; the log counts it.
    const char* const kWhat[] = {"weights", "gradients (", "gradients over", "attention"};
    const char* const kKeys[] = {"gathers", "reduces", "replica_sums", "exchanges"};
    std::map<std::string, std::string> planned;
    std::istringstream lines(result.output.substr(result.output.find("Sent by a rank in a step")));
    for (std::string line; std::getline(lines, line) && line.find("Training") == std::string::npos;) {
      const auto two_blanks = [](char a, char b) { return a == ' ' && b == ' '; };
      line.erase(std::unique(line.begin(), line.end(), two_blanks), line.end());
      for (const char* what : kWhat) {
        if (line.starts_with(what)) planned[what] = line;
      }
    }
    const auto step = read_log(dir_ / "run/log.jsonl").front();
    for (int i = 0; i < 4; i++) {
      const int64_t calls = step.at(kKeys[i]).at("calls"), bytes = step.at(kKeys[i]).at("bytes");
      EXPECT_EQ(planned.contains(kWhat[i]), calls > 0) << kKeys[i] << "\n" << result.output;
      const std::string wanted = " " + std::to_string(calls) + " " + format_bytes(static_cast<double>(bytes));
      if (calls == 0) continue;
      EXPECT_NE(planned[kWhat[i]].find(wanted), std::string::npos) << planned[kWhat[i]] << "," << wanted;
    }
    EXPECT_TRUE(step.contains("wait_ms"));
  }
}

TEST_F(Distributed, impossible_meshes_are_refused_with_the_legal_ones) {
  const auto refused = [&](int ranks, const std::vector<std::string>& options, const std::vector<std::string>& parts) {
    const ProgramResult result = run_program(arguments("stories260k", options), mpirun(ranks));
    EXPECT_EQ(result.exit_code, 1) << result.output;
    for (const std::string& part : parts)
      EXPECT_NE(result.output.find(part), std::string::npos) << part << "\n" << result.output;
    const size_t first = result.output.find("] error: ");
    EXPECT_EQ(result.output.find("] error: ", first + 1), std::string::npos) << "said twice\n" << result.output;
  };
  refused(3, {kSp, "2"}, {"sp_size = 2", "3 ranks", "use 1, 3"});
  refused(4, {kReplicas, "3"}, {"dp_replicate_size = 3", "use 1, 2, 4"});
  refused(3, {kSp, "3", "--batch.global_batch_size", "9"}, {"8 query", "4 key/value", "use 1, 2, 4, 8"});
  refused(3, {}, {"global_batch_size = 8", "3 data-parallel"});
  refused(2, {"--parallel.cp_size", "2"}, {"cp_size"});
}

// ---- When something dies

class Dying : public Distributed {
 protected:
  /// A long run of 4 ranks (2 x 2) that has saved at least once, and its ranks.
  void start() {
    program_.emplace(arguments("stories260k", {"--train.steps", "100000", "--schedule.name", "constant",
                                               "--checkpoint.every", "1", kSp, "2", "--parallel.timeout_s", "8"}),
                     dir_ / "output", mpirun(4));
    ASSERT_TRUE(program_->wait_for("saved")) << program_->output();
    const std::string found = read_command("pgrep -f 'train_gpt .*" + dir_.str() + "'");
    std::istringstream lines(found);
    for (int pid; lines >> pid;) {
      if (read_text("/proc/" + std::to_string(pid) + "/comm") == "train_gpt\n") ranks_.push_back(pid);
    }
    ASSERT_EQ(ranks_.size(), 4u) << found;
  }
  void expect_that_it_goes_on() {
    auto options = arguments("stories260k", {"--train.steps", "100000", "--schedule.name", "constant", kSp, "2"});
    Program again(options, dir_ / "again", mpirun(2));
    EXPECT_TRUE(again.wait_for("resumed from")) << again.output();
    EXPECT_TRUE(again.wait_for("\nstep ")) << again.output();
    again.kill(SIGTERM);
    again.wait();
  }
  static std::string read_command(const std::string& command) {
    std::string text;
    FILE* pipe = popen(command.c_str(), "r");
    for (int c; (c = fgetc(pipe)) != EOF;) text += static_cast<char>(c);
    pclose(pipe);
    return text;
  }

  std::optional<Program> program_;
  std::vector<int> ranks_;
};

// Every step saves, so that many of these moments are in a save.
TEST_F(Dying, a_rank_that_is_killed_at_any_moment_ends_the_run_and_the_next_goes_on) {
  int last_step = 0;
  for (const int round : {0, 1, 2, 3}) {
    ranks_.clear();
    start();
    if (HasFatalFailure()) return;
    usleep(static_cast<useconds_t>(30000 + 47000 * round));
    kill(ranks_[static_cast<size_t>((round + 1) % 4)], SIGKILL);
    const ProgramResult result = program_->wait();
    EXPECT_NE(result.exit_code, 0);
    EXPECT_NE(result.output.find("signal 9"), std::string::npos) << result.output;
    EXPECT_NE(result.output.find("SIGTERM came while this rank waits for all_"), std::string::npos) << result.output;
    EXPECT_EQ(result.output.find("resumed from") != std::string::npos, round > 0) << result.output;
    const int step = read_log(dir_ / "run/log.jsonl").back().at("step");
    EXPECT_GE(step, last_step);
    last_step = step;
  }
}

TEST_F(Dying, a_disk_that_is_full_on_one_rank_keeps_the_previous_checkpoint) {
  // RLIMIT_FSIZE as in bad_input_test, for rank 1 alone; the model is larger than it.
  ASSERT_EQ(run_program(large_run(dir_, "2", "1"), mpirun(2)).exit_code, 0);
  const std::string before = read_text(dir_ / "run/step_000002/model.safetensors");
  std::vector<std::string> launcher = mpirun(1);
  launcher.push_back("build/train_gpt");
  const auto all = large_run(dir_, "4", "1");
  launcher.insert(launcher.end(), all.begin(), all.end());
  for (const char* word : {":", "--oversubscribe", "-n", "1", "bash", "-c", "ulimit -S -f 6144; exec \"$@\"", "rank"}) {
    launcher.push_back(word);
  }
  const ProgramResult full = run_program(all, launcher);
  EXPECT_EQ(full.exit_code, 1) << full.output;
  EXPECT_NE(full.output.find("[rank 1/2"), std::string::npos) << full.output;
  EXPECT_NE(full.output.find("step_000004.tmp"), std::string::npos) << full.output;
  EXPECT_FALSE(fs::exists(dir_ / "run/step_000004"));
  EXPECT_EQ(read_text(dir_ / "run/step_000002/model.safetensors"), before);
  const ProgramResult again = run_program(all, mpirun(2));
  EXPECT_EQ(again.exit_code, 0) << again.output;
  EXPECT_NE(again.output.find("resumed from"), std::string::npos) << again.output;
}

TEST_F(Dying, a_rank_that_hangs_is_named) {
  start();
  if (HasFatalFailure()) return;
  kill(ranks_[2], SIGSTOP);
  const ProgramResult result = program_->wait();
  EXPECT_EQ(result.exit_code, 1);
  for (const char* part : {"nothing has moved for", "silent for", "waits for all_"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << result.output;
  }
  expect_that_it_goes_on();
}

TEST_F(Dying, a_signal_to_any_rank_saves_once_and_ends_all) {
  start();
  if (HasFatalFailure()) return;
  kill(ranks_[3], SIGTERM);
  const ProgramResult result = program_->wait();
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("stopped by signal 15"), std::string::npos) << result.output;
  const int step = read_log(dir_ / "run/log.jsonl").back().at("step");
  EXPECT_NE(result.output.find("after step " + std::to_string(step)), std::string::npos) << result.output;
  expect_that_it_goes_on();
}

TEST_F(Dying, sigterm_for_mpirun_saves) {
  // At once, when a save takes less than the second that mpirun leaves its ranks.
  start();
  if (HasFatalFailure()) return;
  program_->kill(SIGTERM);
  const ProgramResult small = program_->wait();
  EXPECT_NE(small.output.find("stopped by signal 15"), std::string::npos) << small.output;
  // However long it takes, with scripts/launch/mpirun.sh.
  Program large(large_run(dir_, "1000", "1"), dir_ / "large",
                {"/usr/bin/env", "OMP_NUM_THREADS=1", "scripts/launch/mpirun.sh", "--oversubscribe", "-n", "2"});
  ASSERT_TRUE(large.wait_for("\nstep ")) << large.output();
  large.kill(SIGTERM);
  const ProgramResult result = large.wait();
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("stopped by signal"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("saved "), std::string::npos) << result.output;
}

// ---- Ranks that do not run the same

class Different : public Distributed {
 protected:
  /// Two ranks, each of which starts with its line of shell.
  void expect_refused(const std::string& left, const std::string& right, const std::vector<std::string>& parts) {
    std::vector<std::string> launcher = mpirun(1);
    const auto all = arguments("stories260k", {"--model.path", fs::absolute("test/fixtures/stories260k"),  //
                                               "--data.train", "data.jsonl", "--parallel.sp_size", "2"});
    launcher.insert(launcher.end(), {"bash", "-c", left, "build/train_gpt"});
    launcher.insert(launcher.end(), all.begin(), all.end());
    launcher.insert(launcher.end(), {":", "--oversubscribe", "-n", "1", "bash", "-c", right});
    const ProgramResult result = run_program(all, launcher);
    EXPECT_EQ(result.exit_code, 1) << result.output;
    for (const std::string& part : parts) EXPECT_NE(result.output.find(part), std::string::npos) << result.output;
  }
  /// A directory with a data.jsonl.
  std::string directory(const std::string& name, const std::string& text) {
    fs::create_directories(dir_ / name);
    std::ofstream(dir_ / name / "data.jsonl") << text;
    return "cd '" + (dir_ / name).string() + "'; ";
  }
  const std::string program_ = fs::absolute("build/train_gpt").string();
};

TEST_F(Different, configurations_programs_and_data_are_told_apart) {
  const std::string here = directory("here", mixed_documents()), run = "exec '" + program_ + "' \"$@\"";
  expect_refused(here + run, here + run + " --optimizer.lr 2e-5", {"ranks 1 (", "another run configuration"});
  fs::copy_file(program_, dir_ / "changed");
  std::ofstream(dir_ / "changed", std::ios::app) << "x";
  expect_refused(here + run, here + "exec '" + (dir_ / "changed").string() + "' \"$@\"",
                 {"ranks 1 (", "another program"});
  // As many documents, tokens and targets, but other tokens.
  expect_refused(here + run, directory("there", mixed_documents(2)) + run,
                 {"ranks 1 (", "another content of data.train"});
}

TEST_F(Different, a_checkpoint_directory_that_is_not_shared_is_refused) {
  if (std::system("unshare --map-root-user --mount true 2>/dev/null") != 0) GTEST_SKIP() << "no mount namespaces";
  const std::string here = directory("here", mixed_documents()), run = "exec '" + program_ + "' \"$@\"";
  fs::create_directories(dir_ / "run");
  // Rank 1 has a disk of its own there.
  const std::string apart = "unshare --map-root-user --mount sh -c 'mount -t tmpfs none \"$0\" && exec \"$@\"' '" +
                            (dir_ / "run").string() + "' '" + program_ + "' \"$@\"";
  expect_refused(here + run, here + apart, {"checkpoint.dir", "is not there on ranks 1 ("});
}

}  // namespace
