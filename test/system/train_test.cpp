// The program as its user runs it: it learns, resumes bit for bit, survives signals and kills, and keeps to its plan.
#include "data/safetensors.h"
#include "test/system/program.h"

namespace {

std::string step_dir(const TemporaryDirectory& dir, int step) {
  return dir / ("run/step_" + std::string(6 - std::to_string(step).size(), '0') + std::to_string(step));
}

void expect_same_files(const std::string& a, const std::string& b) {
  for (const char* file : {"model.safetensors", "optimizer/exp_avg.safetensors", "optimizer/exp_avg_sq.safetensors"}) {
    const std::string left = read_text(std::filesystem::path(a) / file);
    EXPECT_FALSE(left.empty()) << a << "/" << file;
    EXPECT_TRUE(left == read_text(std::filesystem::path(b) / file)) << file;
  }
}

TEST(Train, loss_falls_and_the_log_holds_one_valid_line_a_step) {
  const TemporaryDirectory dir;
  const ProgramResult result = run_program(small_run(dir, {"--train.steps", "20"}));
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const auto log = read_log(dir / "run/log.jsonl");
  ASSERT_EQ(log.size(), 20u);
  for (size_t i = 0; i < log.size(); i++) {
    EXPECT_EQ(log[i].at("step"), i + 1);
    for (const char* key :
         {"loss", "grad_norm", "lr", "num_tokens", "num_loss_tokens", "tokens_per_s", "mfu", "step_ms", "mem_mib"}) {
      EXPECT_TRUE(log[i].contains(key)) << key;
    }
  }
  EXPECT_LT(log.back().at("loss").get<double>(), log.front().at("loss").get<double>() - 0.3);
  EXPECT_EQ(result.output.find('\r'), std::string::npos) << "nothing moves when the output is a file";
  EXPECT_EQ(result.output.find('\x1b'), std::string::npos);
}

TEST(Train, a_resumed_run_is_bit_equal_to_the_uninterrupted_one) {
  const TemporaryDirectory whole, cut;
  ASSERT_EQ(run_program(small_run(whole, {"--train.steps", "9", "--checkpoint.every", "4"})).exit_code, 0);
  // The same run, ended by SIGUSR1 at some step and started again with the same command.
  const auto arguments = small_run(cut, {"--train.steps", "9", "--checkpoint.every", "4"});
  {
    Program first(arguments, cut / "output");
    ASSERT_TRUE(first.wait_for("step 2/9") || first.wait_for("2/9")) << first.output();
    first.kill(SIGUSR1);
    const ProgramResult stopped = first.wait();
    EXPECT_EQ(stopped.exit_code, 0) << stopped.output;
  }
  const ProgramResult resumed = run_program(arguments);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.output;
  expect_same_files(step_dir(whole, 9), step_dir(cut, 9));
  const auto a = read_log(whole / "run/log.jsonl"), b = read_log(cut / "run/log.jsonl");
  ASSERT_EQ(a.size(), 9u);
  ASSERT_EQ(b.size(), 9u);
  for (size_t i = 0; i < a.size(); i++) {
    for (const char* key : {"step", "loss", "grad_norm", "lr", "num_tokens"})
      EXPECT_EQ(a[i].at(key), b[i].at(key)) << key;
  }
}

// The bias of the choice and the load of the experts: what a run has beside weights and moments.
TEST(Train, experts_resume_bit_equal_and_their_load_is_in_the_log) {
  for (const char* model : {"glm4_moe", "qwen3_moe", "mixtral_fused"}) {
    const TemporaryDirectory whole, cut;
    std::ofstream data(whole / "data.jsonl");
    for (int d = 1; d < 40; d++) {
      data << "{\"input_ids\":[5";
      for (int i = 0; i < d; i++) data << "," << 6 + (d * i * i + i) % 90;
      data << "]}\n";
    }
    data.close();
    const auto run = [&](const TemporaryDirectory& dir, const char* steps) {
      return run_program(
          small_run(dir, {"--model.path", std::string("test/fixtures/") + model, "--data.train", whole / "data.jsonl",
                          "--data.seq_len", "48", "--train.steps", steps, "--schedule.name", "constant"}));
    };
    for (const ProgramResult& result : {run(whole, "4"), run(cut, "2"), run(cut, "4")}) {
      ASSERT_EQ(result.exit_code, 0) << result.output;
    }
    expect_same_files(step_dir(whole, 4), step_dir(cut, 4));
    for (const auto& line : read_log(whole / "run/log.jsonl")) {
      EXPECT_GE(line.at("experts").at("max_over_mean").get<double>(), 1) << model;
      EXPECT_EQ(line.at("experts").at("dropped"), 0) << model;
      const double balance = line.at("balance_loss").get<double>();
      EXPECT_EQ(balance > 0, std::string(model) == "qwen3_moe") << model;
      EXPECT_GT(line.at("loss").get<double>(), balance) << model;
    }
  }
}

// A step that is too small to change a bit: every tensor is saved under its name with its value. Quantised weights are
// decoded, and have other names.
TEST(Train, every_family_is_saved_as_it_was_loaded) {
  const TemporaryDirectory dir;
  std::ofstream(dir / "data.jsonl") << "{\"input_ids\":[6,7,8,9]}\n";
  size_t num_fixtures = 0;
  for (const auto& entry : std::filesystem::directory_iterator("test/fixtures")) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    if (nlohmann::json::parse(read_text(entry.path() / "config.json")).contains("quantization_config")) continue;
    std::filesystem::remove_all(dir / "run");
    const ProgramResult result = run_program(
        small_run(dir, {"--model.path", entry.path(), "--data.train", dir / "data.jsonl", "--data.seq_len", "8",
                        "--batch.global_batch_size", "1", "--batch.micro_batch_size", "1", "--train.steps", "1",
                        "--schedule.name", "constant", "--schedule.warmup_steps", "0", "--optimizer.lr", "1e-30"}));
    ASSERT_EQ(result.exit_code, 0) << entry.path() << result.output;
    const SafetensorsDirectory before(entry.path()), after(step_dir(dir, 1));
    for (const std::string& name : before.names()) {
      ASSERT_TRUE(after.contains(name)) << entry.path() << " " << name;
      const int64_t n = before.info(name).numel();
      ASSERT_EQ(after.info(name).shape, before.info(name).shape) << entry.path() << " " << name;
      std::vector<double> a(static_cast<size_t>(n)), b(static_cast<size_t>(n));
      before.read(name, 0, n, DType::F64, a.data()), after.read(name, 0, n, DType::F64, b.data());
      EXPECT_EQ(a, b) << entry.path() << " " << name;
    }
    num_fixtures++;
  }
  EXPECT_GT(num_fixtures, 40u);
}

// The last layer of the fixture plays one of those.
TEST(Train, layers_that_predict_further_tokens_are_left_out_and_the_log_says_so) {
  const TemporaryDirectory dir;
  std::filesystem::create_directories(dir / "model");
  std::filesystem::copy_file("test/fixtures/glm4_moe/model.safetensors", dir / "model/model.safetensors");
  auto config = nlohmann::json::parse(read_text("test/fixtures/glm4_moe/config.json"));
  config["num_hidden_layers"] = 2;
  std::ofstream(dir / "model/config.json") << config;
  std::ofstream(dir / "data.jsonl") << "{\"input_ids\":[5,6,7,8]}\n";
  const ProgramResult result = run_program(
      small_run(dir, {"--model.path", dir / "model", "--data.train", dir / "data.jsonl", "--data.seq_len", "8",
                      "--batch.global_batch_size", "1", "--batch.micro_batch_size", "1", "--train.steps", "1"}));
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("tensors of layers that predict further tokens (MTP) are left out"), std::string::npos)
      << result.output;
  const SafetensorsDirectory saved(step_dir(dir, 1));
  for (const std::string& name : saved.names()) EXPECT_FALSE(name.starts_with("model.layers.2.")) << name;
}

// Text is trained, what sees is kept: through saves, and through a resumed run.
TEST(Train, vision_tensors_stay_as_they_are_and_text_resumes_bit_equal) {
  for (const char* model : {"gemma3", "qwen2_5_vl", "qwen3_vl_moe"}) {
    const TemporaryDirectory whole, cut;
    std::ofstream data(whole / "data.jsonl");
    for (int d = 1; d < 20; d++) data << "{\"input_ids\":[5," << d + 6 << "," << 2 * d + 7 << ",9," << d + 40 << "]}\n";
    data.close();
    const std::string path = std::string("test/fixtures/") + model;
    const auto run = [&](const TemporaryDirectory& dir, const char* steps) {
      return run_program(small_run(dir, {"--model.path", path, "--data.train", whole / "data.jsonl", "--data.seq_len",
                                         "48", "--train.steps", steps, "--schedule.name", "constant"}));
    };
    for (const ProgramResult& result : {run(whole, "4"), run(cut, "2"), run(cut, "4")}) {
      ASSERT_EQ(result.exit_code, 0) << result.output;
      EXPECT_NE(result.output.find(") are kept as they are; text is trained"), std::string::npos) << result.output;
    }
    expect_same_files(step_dir(whole, 4), step_dir(cut, 4));
    const SafetensorsDirectory before(path), after(step_dir(cut, 4));
    EXPECT_EQ(before.names(), after.names()) << model;
    int kept = 0, trained = 0;
    for (const std::string& name : before.names()) {
      const bool sees = name.find("visual") != std::string::npos || name.find("vision") != std::string::npos ||
                        name.find("multi_modal") != std::string::npos;
      const auto bytes = [&](const SafetensorsDirectory& directory) {
        std::string all(static_cast<size_t>(directory.info(name).numel()) * size_of(*directory.info(name).dtype), 0);
        directory.read(name, 0, directory.info(name).numel(), *directory.info(name).dtype, all.data());
        return all;
      };
      EXPECT_EQ(before.info(name).shape, after.info(name).shape) << name;
      (sees ? kept : trained)++;
      EXPECT_EQ(bytes(before) == bytes(after), sees) << model << " " << name;
    }
    EXPECT_GE(kept, 18) << model;
    EXPECT_GE(trained, 20) << model;
  }
}

TEST(Train, sigterm_saves_at_the_next_step_and_exits_0) {
  const TemporaryDirectory dir;
  Program program(small_run(dir, {"--train.steps", "100000", "--schedule.name", "constant"}), dir / "output");
  ASSERT_TRUE(program.wait_for("1/100000")) << program.output();
  program.kill(SIGTERM);
  const ProgramResult result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.output;
  const auto log = read_log(dir / "run/log.jsonl");
  EXPECT_TRUE(std::filesystem::exists(step_dir(dir, log.back().at("step").get<int>()) + "/trainer_state.json"));
}

// A save every step, kill -9 at many moments: each time the next start finds a complete checkpoint and goes on.
TEST(Train, kill_9_at_any_moment_leaves_a_loadable_checkpoint) {
  const TemporaryDirectory dir;
  const auto arguments = small_run(dir, {"--train.steps", "100000", "--schedule.name", "constant", "--checkpoint.every",
                                         "1", "--batch.global_batch_size", "2", "--data.seq_len", "64"});
  int last_step = 0;
  for (int round = 0; round < 8; round++) {
    Program program(arguments, dir / "output");
    ASSERT_TRUE(program.wait_for("saved")) << program.output();
    usleep(static_cast<useconds_t>(20000 + 13700 * round));
    program.kill(SIGKILL);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.exit_code, 128 + SIGKILL);
    const auto log = read_log(dir / "run/log.jsonl");
    EXPECT_GE(log.back().at("step").get<int>(), last_step);
    last_step = log.back().at("step").get<int>();
    for (size_t i = 1; i < log.size(); i++)
      EXPECT_EQ(log[i].at("step").get<int>(), log[i - 1].at("step").get<int>() + 1);
  }
  EXPECT_GE(last_step, 8);
}

TEST(Train, recompute_and_another_micro_batch_train_the_same) {
  const TemporaryDirectory plain, recompute, micro;
  ASSERT_EQ(run_program(small_run(plain, {"--train.steps", "4"})).exit_code, 0);
  ASSERT_EQ(run_program(small_run(recompute, {"--train.steps", "4", "--memory.recompute", "block"})).exit_code, 0);
  expect_same_files(step_dir(plain, 4), step_dir(recompute, 4));
  const auto arguments = small_run(micro, {"--train.steps", "4", "--batch.micro_batch_size", "1"});
  ASSERT_EQ(run_program(arguments).exit_code, 0);
  const auto a = read_log(plain / "run/log.jsonl"), b = read_log(micro / "run/log.jsonl");
  for (size_t i = 0; i < a.size(); i++) {
    const double loss = a[i].at("loss"), norm = a[i].at("grad_norm");
    EXPECT_NEAR(b[i].at("loss").get<double>(), loss, 1e-5 * loss);
    EXPECT_NEAR(b[i].at("grad_norm").get<double>(), norm, 1e-4 * norm);
  }
}

TEST(Train, the_last_batch_of_an_epoch_may_hold_fewer_rows_and_nothing_is_left_out) {
  const TemporaryDirectory dir;
  const ProgramResult result = run_program(
      small_run(dir, {"--train.epochs", "1", "--data.packing", "concat", "--batch.global_batch_size", "64"}));
  ASSERT_EQ(result.exit_code, 0) << result.output;
  int64_t tokens = 0;
  for (const auto& line : read_log(dir / "run/log.jsonl")) tokens += line.at("num_tokens").get<int64_t>();
  EXPECT_EQ(tokens, 150183);  // of test/fixtures/shakespeare.jsonl
}

TEST(Train, a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint) {
  const TemporaryDirectory dir;
  const ProgramResult result = run_program(small_run(dir, {"--train.steps", "20", "--optimizer.lr", "1e30",
                                                           "--checkpoint.every", "1", "--schedule.name", "constant"}));
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_NE(result.output.find("not finite"), std::string::npos) << result.output;
  EXPECT_TRUE(std::filesystem::exists(step_dir(dir, 1) + "/trainer_state.json"));
}

TEST(Train, a_second_run_in_the_same_directory_is_refused) {
  const TemporaryDirectory dir;
  const auto arguments = small_run(dir, {"--train.steps", "100000", "--schedule.name", "constant"});
  Program first(arguments, dir / "output");
  ASSERT_TRUE(first.wait_for("1/100000")) << first.output();
  const ProgramResult second = run_program(arguments);
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_NE(second.output.find("in use by another run"), std::string::npos) << second.output;
  first.kill(SIGTERM);
  EXPECT_EQ(first.wait().exit_code, 0);
}

TEST(Train, a_run_goes_on_with_another_batch_size_and_skips_no_row) {
  const TemporaryDirectory dir;
  const std::vector<std::string> concat = {"--data.packing", "concat", "--batch.micro_batch_size", "1"};
  const auto with = [&](std::vector<std::string> options) {
    options.insert(options.end(), concat.begin(), concat.end());
    return run_program(small_run(dir, options));
  };
  ASSERT_EQ(with({"--train.steps", "3", "--batch.global_batch_size", "64"}).exit_code, 0);
  for (const char* global : {"37", "200"}) {
    const ProgramResult result = with({"--train.epochs", "1", "--batch.global_batch_size", global});
    ASSERT_EQ(result.exit_code, 0) << result.output;
  }
  int64_t tokens = 0;
  for (const auto& line : read_log(dir / "run/log.jsonl")) tokens += line.at("num_tokens").get<int64_t>();
  EXPECT_EQ(tokens, 150183);
}

TEST(Train, what_is_dropped_or_truncated_is_said) {
  const TemporaryDirectory dir;
  for (const char* what : {"drop", "truncate"}) {
    const ProgramResult result =
        run_program(small_run(dir, {"--train.steps", "1", "--data.long_documents", what, "--plan"}));
    EXPECT_EQ(result.exit_code, 0) << result.output;
    EXPECT_NE(result.output.find(what == std::string("drop") ? "and dropped:" : "are truncated"), std::string::npos)
        << result.output;
  }
}

TEST(Train, evaluation_lines_hold_eval_loss) {
  const TemporaryDirectory dir;
  const ProgramResult result = run_program(small_run(
      dir, {"--train.steps", "4", "--data.eval", "test/fixtures/shakespeare_eval.jsonl", "--train.eval_every", "2"}));
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const auto log = read_log(dir / "run/log.jsonl");
  EXPECT_FALSE(log[0].contains("eval_loss"));
  EXPECT_GT(log[1].at("eval_loss").get<double>(), 1.0);
  EXPECT_LT(log[3].at("eval_loss").get<double>(), log[1].at("eval_loss").get<double>());
}

TEST(Plan, plan_prints_everything_and_touches_nothing) {
  const TemporaryDirectory dir;
  const ProgramResult result = run_program(small_run(dir, {"--train.steps", "4", "--plan"}));
  ASSERT_EQ(result.exit_code, 0) << result.output;
  for (const char* part : {"Model", "Training data", "packing efficiency", "Steps", "Memory plan", "recompute"}) {
    EXPECT_NE(result.output.find(part), std::string::npos) << part;
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "run"));
}

// With the shape of its model, or one like it, in place of a checkpoint.
TEST(Plan, every_recipe_is_planned) {
  const std::map<std::string, const char*> of_shape = {{"sft_command_r7b", "command_r_7b"},
                                                       {"sft_deepseek_v3", "deepseek_v3"},
                                                       {"sft_glm4_9b", "glm_4_9b"},
                                                       {"sft_glm_4.5_air", "glm_4.5_air"},
                                                       {"sft_gpt_oss_20b", "gpt_oss_20b"},
                                                       {"sft_granite_2b", "granite_3.1_2b"},
                                                       {"sft_llama_1b", "qwen2.5_1.5b"},
                                                       {"sft_mixtral_8x7b", "mixtral_8x7b"},
                                                       {"sft_qwen1.5_moe_a2.7b", "qwen1.5_moe_a2.7b"},
                                                       {"sft_qwen3_30b_a3b", "qwen3_30b_a3b"}};
  const TemporaryDirectory dir;
  std::ofstream(dir / "text.jsonl") << "{\"input_ids\":[5,6,7,8]}\n";
  size_t num_recipes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("configs")) {
    if (entry.path().extension() != ".json") continue;
    num_recipes++;
    const std::string name = entry.path().stem();
    std::vector<std::string> arguments = {entry.path(), "--plan"};
    if (name.starts_with("sft_")) {
      arguments.insert(arguments.end(),
                       {"--world", "64", "--batch.global_batch_size", "64", "--data.train", dir / "text.jsonl",
                        "--data.cache_dir", dir / "cache", "--train.steps", "100", "--train.epochs", "null"});
    }
    if (name == "sft_gemma3_4b") arguments.insert(arguments.end(), {"--model.path", "test/fixtures/gemma3"});
    if (const auto shape = of_shape.find(name); shape != of_shape.end()) {
      arguments.insert(arguments.end(), {"--model.path", std::string("configs/models/") + shape->second + ".json",
                                         "--model.init", "random"});
    }
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 0) << name << ": " << result.output;
    EXPECT_NE(result.output.find("<- this run"), std::string::npos) << name << ": " << result.output;
  }
  EXPECT_GE(num_recipes, of_shape.size() + 5);
}

// Rows are full (concat), so that every planned byte is touched.
TEST(Plan, peak_memory_is_within_5_percent_of_the_plan) {
  struct Case {
    const char *recompute, *sp;
    int ranks;
  };
  for (const auto& [recompute, sp, ranks] : {Case{"none", "1", 1}, Case{"block", "1", 1}, Case{"none", "2", 2}}) {
    if (ranks > 1 && std::system("command -v mpirun >/dev/null") != 0) continue;
    const TemporaryDirectory dir;
    const ProgramResult result = run_program({"--model.path",
                                              "configs/models/bench_v32000.json",
                                              "--model.init",
                                              "random",
                                              "--data.train",
                                              "test/fixtures/shakespeare.jsonl",
                                              "--data.seq_len",
                                              "2048",
                                              "--data.packing",
                                              "concat",
                                              "--data.cache_dir",
                                              dir / "cache",
                                              "--parallel.sp_size",
                                              sp,
                                              "--train.steps",
                                              "2",
                                              "--checkpoint.dir",
                                              dir / "run",
                                              "--memory.recompute",
                                              recompute,
                                              "--batch.global_batch_size",
                                              "2"},
                                             ranks > 1 ? mpirun(ranks) : std::vector<std::string>{});
    ASSERT_EQ(result.exit_code, 0) << result.output;
    const std::string key = "total  ";
    const size_t table = result.output.find("Memory plan");
    const size_t total = result.output.find("\ntotal", table);
    ASSERT_NE(total, std::string::npos) << result.output;
    const std::string line = result.output.substr(total + 1, result.output.find('\n', total + 1) - total - 1);
    const double planned = std::stod(line.substr(line.find_last_of(' ') + 1));
    const double used = read_log(dir / "run/log.jsonl").back().at("mem_mib");
    EXPECT_NEAR(used, planned, 0.05 * planned) << recompute << ", sp " << sp << ", " << ranks << " ranks";
  }
}

}  // namespace
