#include "llama/run_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "layers/core/check.h"
#include "llama/human_number.h"
#include "llama/run_options.h"

namespace {

using nlohmann::json;

RunConfig parse_arguments(std::vector<std::string> arguments) {
  std::vector<const char*> argv = {"train_gpt"};
  for (const std::string& a : arguments) argv.push_back(a.c_str());
  return parse_run_config(static_cast<int>(argv.size()), argv.data());
}

/// The smallest run, with more arguments.
RunConfig parse_with(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"--model.path", "m", "--data.train", "a.jsonl", "--train.steps", "10"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return parse_arguments(arguments);
}

RunConfig parse_text(const std::string& text) {
  return parse_run_config_json(text, "run.json");
}

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

std::string error_with(std::vector<std::string> more) {
  return error_of([&] { parse_with(more); });
}

std::string error_in(const std::string& text) {
  return error_of([&] { parse_text(text); });
}

class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) : path_(testing::TempDir() + "run_config_test.json") {
    std::ofstream(path_) << text;
  }
  ~ConfigFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

const char* const kMinimal =
    R"({"model": {"path": "m"}, "data": {"train": ["a.jsonl"]}, "train": {"steps": 10}, "optimizer": {"lr": 0.5}})";

// ---- Numbers

TEST(HumanNumber, suffixes_are_decimal_and_with_an_i_binary) {
  EXPECT_EQ(parse_human_int64("128k"), 128000);
  EXPECT_EQ(parse_human_int64("128K"), 128000);
  EXPECT_EQ(parse_human_int64("128Ki"), 131072);
  EXPECT_EQ(parse_human_int64("2M"), 2000000);
  EXPECT_EQ(parse_human_int64("3.8M"), 3800000);
  EXPECT_EQ(parse_human_int64("0.5Ki"), 512);
  EXPECT_EQ(parse_human_int64("1Gi"), int64_t{1} << 30);
  EXPECT_EQ(parse_human_int64("1T"), 1000000000000);
  EXPECT_EQ(parse_human_int64("1_000_000"), 1000000);
  EXPECT_EQ(parse_human_int64("1e3"), 1000);
  EXPECT_EQ(parse_human_int64("1500e-2"), 15);
  EXPECT_EQ(parse_human_int64("-7"), -7);
  EXPECT_EQ(parse_human_int64("000"), 0);
  EXPECT_EQ(parse_human_int64("7." + std::string(30, '0')), 7);
  EXPECT_EQ(parse_human_double("1e-5"), 1e-5);
  EXPECT_EQ(parse_human_double("0.1"), 0.1);
  EXPECT_EQ(parse_human_double("-2.5k"), -2500.0);
  EXPECT_EQ(parse_human_double("1.5Ki"), 1536.0);
  EXPECT_EQ(parse_human_double("1.7976931348623157e308"), 1.7976931348623157e308);
  EXPECT_TRUE(std::signbit(parse_human_double("-0").value()));
}

TEST(HumanNumber, integers_are_exact_to_the_last_of_64_bits) {
  EXPECT_EQ(parse_human_int64("9223372036854775807"), INT64_MAX);
  EXPECT_EQ(parse_human_int64("-9223372036854775808"), INT64_MIN);
  EXPECT_EQ(parse_human_int64("9223372036854775808"), std::nullopt);
  EXPECT_EQ(parse_human_uint64("18446744073709551615"), UINT64_MAX);
  EXPECT_EQ(parse_human_uint64("18446744073709551616"), std::nullopt);
  EXPECT_EQ(parse_human_uint64("-1"), std::nullopt);
  EXPECT_EQ(parse_human_int64("99999999999999999999Ti"), std::nullopt);
  EXPECT_EQ(parse_human_int64("1e19"), std::nullopt);
  EXPECT_EQ(parse_human_int64("1e999"), std::nullopt);
  EXPECT_EQ(parse_human_int64("99999999999999999999e20"), std::nullopt);
  EXPECT_EQ(parse_human_int64("340282366920938463463374607431768211456"), std::nullopt) << "2^128";
}

TEST(HumanNumber, what_is_not_such_a_number_is_refused) {
  for (const char* text : {"",   " ",    "k",  "1.5", "1.0001k", "1 k", "128kb", "1m",  "1.",  ".5",   "1__0", "_1",
                           "1_", "0x10", "1e", "e5",  "--1",     "+-1", "nan",   "inf", "1k5", "1e5x", "1Kii"}) {
    EXPECT_EQ(parse_human_int64(text), std::nullopt) << text;
  }
  for (const char* text : {"", "nan", "inf", "1e400", "1e309", "1e308Ki", "1e2147483647k", "1..5", "0x1p3"}) {
    EXPECT_EQ(parse_human_double(text), std::nullopt) << text;
  }
  for (const char digit : {'0', '1'}) EXPECT_EQ(parse_human_int64(std::string(100000, digit)), std::nullopt);
}

// ---- Where values come from

TEST(RunConfig, command_line_wins_over_file_wins_over_default) {
  const ConfigFile file(kMinimal);
  const RunConfig from_file = parse_arguments({file.path()});
  EXPECT_EQ(from_file.optimizer.lr, 0.5);
  EXPECT_EQ(from_file.optimizer.eps, 1e-8);
  EXPECT_EQ(from_file.config_path, file.path());
  const RunConfig overridden = parse_arguments({file.path(), "--optimizer.lr", "0.25", "--train.steps=2k"});
  EXPECT_EQ(overridden.optimizer.lr, 0.25);
  EXPECT_EQ(overridden.train.steps, 2000);
  EXPECT_EQ(overridden.model.path, "m");
  EXPECT_EQ(parse_arguments({"--optimizer.lr", "0.25", file.path()}).optimizer.lr, 0.25);
}

TEST(RunConfig, no_file_is_needed) {
  const RunConfig run = parse_with({});
  EXPECT_EQ(run.model.path, "m");
  ASSERT_EQ(run.data.train.size(), 1u);
  EXPECT_EQ(run.data.train[0].path, "a.jsonl");
  EXPECT_EQ(run.data.train[0].weight, 1);
}

TEST(RunConfig, every_type_is_read_alike_from_both) {
  const RunConfig a = parse_text(R"({
    // comments are allowed
    "model": {"path": "m", "seed": 18446744073709551615},
    "data": {"train": ["a", {"path": "b", "weight": 2.5}], "eval": "c", "seq_len": "64Ki", "shuffle": false},
    "optimizer": {"betas": [0.8, 0.9], "no_decay": []}, /* so */
    "train": {"steps": 1e3, "epochs": null}, "log": {"file": "x.jsonl"}, "debug": {"dump_dir": null}})");
  EXPECT_EQ(a.model.seed, UINT64_MAX);
  ASSERT_EQ(a.data.train.size(), 2u);
  EXPECT_EQ(a.data.train[1].path, "b");
  EXPECT_EQ(a.data.train[1].weight, 2.5);
  ASSERT_EQ(a.data.eval.size(), 1u);
  EXPECT_EQ(a.data.seq_len, 65536);
  EXPECT_FALSE(a.data.shuffle);
  EXPECT_EQ(a.optimizer.beta1, 0.8);
  EXPECT_EQ(a.optimizer.beta2, 0.9);
  EXPECT_TRUE(a.optimizer.no_decay.empty());
  EXPECT_EQ(a.train.steps, 1000);
  EXPECT_EQ(a.log.file, "x.jsonl");

  const RunConfig b = parse_arguments({"--model.path",
                                       "m",
                                       "--model.seed",
                                       "18446744073709551615",
                                       "--model.init",
                                       "random",
                                       "--data.train",
                                       "a",
                                       "{\"path\":\"b\",\"weight\":2.5}",
                                       "--data.eval",
                                       "c",
                                       "--data.seq_len",
                                       "64Ki",
                                       "--data.shuffle",
                                       "false",
                                       "--optimizer.betas",
                                       "0.8,0.9",
                                       "--optimizer.no_decay",
                                       "[]",
                                       "--train.steps",
                                       "1e3",
                                       "--train.epochs",
                                       "null",
                                       "--log.file",
                                       "x.jsonl",
                                       "--debug.dump_dir",
                                       "null"});
  json expected = to_json(a);
  expected["model"]["init"] = "random";
  EXPECT_EQ(to_json(b), expected);
}

TEST(RunConfig, betas_and_lists_have_several_spellings) {
  for (const std::vector<std::string>& betas : {std::vector<std::string>{"0.8,0.9"}, {"0.8", "0.9"}, {"[0.8, 0.9]"}}) {
    std::vector<std::string> arguments = {"--optimizer.betas"};
    arguments.insert(arguments.end(), betas.begin(), betas.end());
    EXPECT_EQ(parse_with(arguments).optimizer.beta2, 0.9);
  }
  const RunConfig run = parse_with({"--data.eval", R"(["x", {"path": "y"}])", "z", "--plan"});
  ASSERT_EQ(run.data.eval.size(), 3u);
  EXPECT_EQ(run.data.eval[1].path, "y");
  EXPECT_EQ(run.data.eval[2].path, "z");
  EXPECT_TRUE(run.plan);
}

TEST(RunConfig, null_is_a_word_like_any_other_where_an_option_cannot_be_null) {
  EXPECT_EQ(parse_with({"--checkpoint.dir", "null"}).checkpoint.dir, "null");
}

TEST(RunConfig, plan_and_world) {
  EXPECT_EQ(parse_with({"--plan", "--world", "8"}).world, 8);
  EXPECT_FALSE(parse_with({"--plan=false"}).plan);
  EXPECT_TRUE(parse_with({"--data.eval", "null"}).data.eval.empty());
  EXPECT_EQ(error_with({"--world", "8"}), "--world 8 says for how many ranks --plan plans: add --plan");
  EXPECT_EQ(error_with({"--plan", "--world", "0"}), "--world 0: expected a number of ranks, an integer >= 1");
}

// ---- The echo

TEST(RunConfig, echo_gives_the_same_run_again) {
  const RunConfig defaults;
  const RunConfig other =
      parse_with({"--schedule.name", "wsd", "--schedule.decay_ratio", "0.3", "--optimizer.lr", "0.1", "--data.eval",
                  R"({"path": "b\u00e9", "weight": 0.3})", "--train.eval_every", "3", "--debug.dump_dir", "d",
                  "--debug.dump_logits", "true", "--model.init", "random", "--model.seed", "7"});
  for (const RunConfig& run : {parse_with({}), other}) {
    const json echo = to_json(run);
    const RunConfig again = parse_text(echo.dump(2));
    EXPECT_NO_THROW(validate_run_config(again));
    EXPECT_EQ(to_json(again), echo);
    ASSERT_EQ(again.data.eval.size(), run.data.eval.size());
    for (size_t i = 0; i < run.data.eval.size(); i++) EXPECT_EQ(again.data.eval[i].weight, run.data.eval[i].weight);
  }
  EXPECT_EQ(parse_text(to_json(defaults).dump()).optimizer.lr, defaults.optimizer.lr);
}

TEST(RunConfig, echo_holds_every_option_once) {
  RunConfig run;
  const json echo = to_json(run);
  size_t count = 0;
  for (const auto& [section, body] : echo.items()) count += body.size();
  EXPECT_EQ(count, options_of(run).size());
  EXPECT_EQ(echo.size(), option_sections().size());
}

TEST(RunConfig, the_example_of_the_documentation_is_accepted) {
  const RunConfig run = parse_text(R"(
    { "model":      {"path": "m", "init": "pretrained", "seed": 42},
      "data":       {"train": ["a"], "eval": [], "format": "auto", "seq_len": 4096,
                     "packing": "best_fit", "long_documents": "split", "shuffle": true, "seed": 42},
      "batch":      {"micro_batch_size": 1, "global_batch_size": 8},
      "optimizer":  {"name": "adamw", "lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
                     "max_grad_norm": 1.0},
      "schedule":   {"name": "cosine", "warmup_steps": 10, "min_lr_ratio": 0.1},
      "train":      {"steps": 100, "epochs": null, "device": "auto", "dtype": "auto", "grad_dtype": "fp32", "eval_every": 0},
      "parallel":   {"sp_size": 1, "cp_size": 1, "dp_replicate_size": 1},
      "memory":     {"recompute": "none", "offload": "none", "loss_tile_tokens": 0},
      "checkpoint": {"dir": "out", "every": 0, "keep": 2, "resume": "auto"},
      "log":        {"file": "out/log.jsonl", "every": 1},
      "debug":      {"dump_dir": null, "dump_steps": 1, "dump_logits": false} })");
  EXPECT_NO_THROW(validate_run_config(run));
  EXPECT_EQ(run.schedule.warmup_steps, 10);
}

TEST(RunConfig, log_path_follows_the_checkpoint_directory) {
  RunConfig run;
  run.checkpoint.dir = "out";
  EXPECT_EQ(log_path(run), "out/log.jsonl");
  run.log.file = "x";
  EXPECT_EQ(log_path(run), "x");
}

// ---- Errors

TEST(RunConfig, unknown_keys_name_the_nearest_one) {
  EXPECT_EQ(error_in(R"({"optimizer": {"weigth_decay": 1}})"),
            "unknown option 'optimizer.weigth_decay' (run.json): did you mean 'optimizer.weight_decay'? "
            "`train_gpt --help` lists every option");
  EXPECT_NE(error_in(R"({"optimiser": {}})").find("did you mean 'optimizer'?"), std::string::npos);
  EXPECT_NE(error_in(R"({"seq_len": 3})").find("did you mean 'data.seq_len'?"), std::string::npos);
  EXPECT_NE(error_in(R"({"model": {"seq_len": 3}})").find("did you mean 'data.seq_len'?"), std::string::npos);
  EXPECT_NE(error_in(R"({"train": {"max_steps": 3}})").find("did you mean 'train.steps'?"), std::string::npos);
  EXPECT_NE(error_in(R"({"checkpoint": {"evry": 3}})").find("did you mean 'checkpoint.every'?"), std::string::npos);
  EXPECT_NE(error_in(R"({"data": {"sed": 3}})").find("did you mean 'data.seed'?"), std::string::npos);
  EXPECT_EQ(error_with({"--optimizer.learning_rate=3"}).find("unknown option 'optimizer.learning_rate"), 0u);
  EXPECT_NE(error_with({"--schedule.warmup", "3"}).find("(on the command line): did you mean 'schedule.warmup_steps'?"),
            std::string::npos);
  EXPECT_NE(error_with({"--plam"}).find("unknown option 'plam'"), std::string::npos);
  EXPECT_NE(error_in(R"({"optimizer.lr": 3})").find("inside its section"), std::string::npos);
  EXPECT_LT(error_in(fmt::format(R"({{"{}": 1}})", std::string(1 << 20, 'x'))).size(), 400u);
}

TEST(RunConfig, duplicates_are_refused) {
  EXPECT_EQ(error_in(R"({"optimizer": {"lr": 1, "eps": 1, "lr": 2}})"), "run.json: 'optimizer.lr' is given twice");
  EXPECT_EQ(error_in(R"({"data": {}, "model": {}, "data": {}})"), "run.json: 'data' is given twice");
  EXPECT_EQ(error_in(R"({"data": {"train": [{"path": "a"}, {"path": "b", "path": "c"}]}})"),
            "run.json: 'data.train.path' is given twice");
  EXPECT_EQ(error_with({"--optimizer.lr", "1", "--optimizer.lr", "1"}),
            "--optimizer.lr is given twice on the command line");
  EXPECT_EQ(error_with({"--data.train", "b"}), "--data.train is given twice on the command line");
  EXPECT_EQ(error_with({"--optimizer.betas", "0.1", "--optimizer.betas", "0.2"}),
            "--optimizer.betas is given twice on the command line");
  // The same name in two sections or objects is no duplicate.
  EXPECT_EQ(error_in(R"({"model": {"seed": 1}, "data": {"seed": 1, "train": [{"path": "a"}, {"path": "b"}]}})"),
            "no error");
}

TEST(RunConfig, wrong_values_name_key_place_value_and_what_is_legal) {
  EXPECT_EQ(error_in(R"({"optimizer": {"lr": "fast"}})"), "optimizer.lr = \"fast\" (run.json): expected a number > 0");
  EXPECT_EQ(error_in(R"({"optimizer": {"lr": 0}})"), "optimizer.lr = 0 (run.json): expected a number > 0");
  EXPECT_EQ(error_in(R"({"optimizer": {"betas": [0.9, 1]}})"),
            "optimizer.betas = [0.9,1] (run.json): expected two numbers in [0, 1)");
  EXPECT_NE(error_in(R"({"optimizer": {"betas": [0.9, 0.95, 0.99]}})"), "no error");
  EXPECT_LT(error_in(fmt::format(R"({{"train": {{"device": "{}"}}}})", std::string(1 << 20, 'x'))).size(), 200u);
  EXPECT_EQ(error_in(R"({"schedule": {"min_lr_ratio": 1.5}})"),
            "schedule.min_lr_ratio = 1.5 (run.json): expected a number in [0, 1]");
  EXPECT_EQ(error_in(R"({"train": {"steps": 1.5}})"), "train.steps = 1.5 (run.json): expected an integer >= 1 or null");
  EXPECT_EQ(error_in(R"({"train": {"device": "gpu"}})"),
            "train.device = \"gpu\" (run.json): expected auto, cpu or cuda");
  EXPECT_EQ(error_in(R"({"data": {"seq_len": null}})"),
            "data.seq_len = null (run.json): expected an integer in [2, 1073741824]");
  EXPECT_EQ(error_in(R"({"data": {"shuffle": 1}})"), "data.shuffle = 1 (run.json): expected true or false");
  EXPECT_EQ(error_in(R"({"model": {"seed": -1}})"), "model.seed = -1 (run.json): expected an integer >= 0");
  EXPECT_EQ(error_in(R"({"data": []})"), "run.json: 'data' is a section, an object of options, not array");
  EXPECT_EQ(error_in("[]"), "run.json: a run configuration is a JSON object of sections, not array");
  EXPECT_EQ(error_with({"--batch.micro_batch_size", "-1"}),
            "batch.micro_batch_size = \"-1\" (on the command line): expected an integer in [1, 2147483647]");
  EXPECT_EQ(error_with({"--data.shuffle", "yes"}),
            "data.shuffle = \"yes\" (on the command line): expected true or false");
}

TEST(RunConfig, sources_are_checked) {
  for (const char* train :
       {R"([1])", R"([{"weight": 1}])", R"([{"path": "a", "weigth": 2}])", R"([""])", R"([{"path": "a", "weight": 0}])",
        R"([["a"]])", R"(null)", R"(["a\u0000b"])", R"([{"path": "a", "weight": 1, "x": 1}])"}) {
    const std::string error = error_in(fmt::format(R"({{"data": {{"train": {}}}}})", train));
    EXPECT_EQ(error.find("data.train = "), 0u) << error;
  }
}

TEST(RunConfig, broken_json_is_refused_with_line_and_column) {
  const std::string error = error_in("{\"model\":\n  {\"path\": }}");
  EXPECT_EQ(error.find("run.json: not JSON: parse error at line 2, column 12"), 0u) << error;
  EXPECT_NE(error_in(""), "no error");
  EXPECT_NE(error_in("{} {}"), "no error");
  EXPECT_NE(error_in("{\"optimizer\": {\"lr\": 1e999}}"), "no error");
  EXPECT_NE(error_in("\xff"), "no error");
  EXPECT_EQ(error_in(std::string(100000, '[')), "run.json: nested deeper than 64 levels");
  EXPECT_NE(error_with({"--data.eval", "[\"a\", "}).find("--data.eval: not JSON: parse error"), std::string::npos);
}

TEST(RunConfig, command_line_slips_are_refused) {
  EXPECT_EQ(error_of([] { parse_arguments({}); }).find("nothing to train.\nUsage: train_gpt [CONFIG.json]"), 0u);
  EXPECT_EQ(error_with({"--optimizer.lr"}), "--optimizer.lr has no value. `train_gpt --help` lists every option");
  EXPECT_EQ(error_with({"--log.file="}).find("--log.file= has no value"), 0u);
  EXPECT_NE(error_with({"--train.eval_every", "3", "4"}), "no error");
  EXPECT_EQ(error_with({""}), "argument 7 is empty");
  EXPECT_EQ(error_with({"--log.file=--log.every"}),
            "--log.file has no value: '--log.every' looks like an option (a path is written ./--log.every)");
  EXPECT_NE(error_with({"--log.file", "\xff\xfe"}).find("is not UTF-8"), std::string::npos);
  const ConfigFile file(kMinimal);
  EXPECT_EQ(error_of([&] {
              parse_arguments({file.path(), "other.json"});
            }),
            "unexpected argument 'other.json': one CONFIG.json, then options as --section.key value");
  EXPECT_EQ(error_of([] { parse_arguments({"missing.json"}); }),
            "cannot open 'missing.json': No such file or directory");
  EXPECT_EQ(error_of([] { parse_arguments({"/"}); }).find("'/' is a directory, not a file"), 0u);
}

TEST(RunConfig, contradictions_are_refused) {
  const std::string unknown_length = error_of([] { parse_arguments({"--model.path", "m", "--data.train", "a"}); });
  EXPECT_EQ(unknown_length, "neither train.steps nor train.epochs is given: say how long to train");
  EXPECT_EQ(error_with({"--train.epochs", "2"}),
            "train.steps = 10 and train.epochs = 2 are both given: set one of them to null");
  EXPECT_EQ(error_with({"--batch.micro_batch_size", "3"}),
            "batch.global_batch_size = 8 is not a multiple of batch.micro_batch_size = 3");
  EXPECT_NE(error_with({"--schedule.warmup_steps", "10"}).find("schedule.warmup_steps = 10"), std::string::npos);
  EXPECT_EQ(error_of([] {
              parse_arguments({"--train.steps", "1"});
            }),
            "model.path is missing: give the Hugging Face model directory to train");
  EXPECT_EQ(error_of([] {
              parse_arguments({"--model.path", "m", "--train.steps", "1"});
            }),
            "data.train is empty: give the files to train on");
}

TEST(RunConfig, an_option_that_would_be_ignored_is_refused_unless_it_has_its_default) {
  const std::vector<std::vector<std::string>> ignored = {
      {"--model.seed", "1"},
      {"--data.packing", "concat", "--data.long_documents", "drop"},
      {"--schedule.name", "constant", "--schedule.min_lr_ratio", "0.2"},
      {"--schedule.decay_ratio", "0.5"},
      {"--train.eval_every", "1"},
      {"--debug.dump_steps", "2"},
      {"--debug.dump_logits", "true"}};
  for (const auto& arguments : ignored) {
    EXPECT_NE(error_with(arguments).find("would be ignored"), std::string::npos) << arguments.back();
  }
  EXPECT_EQ(error_with({"--schedule.decay_ratio", "0.5"}),
            "schedule.decay_ratio = 0.5 would be ignored, because schedule.name is not wsd: leave it out");
  EXPECT_NO_THROW(parse_with({"--model.seed", "42", "--debug.dump_steps", "1", "--train.eval_every", "0",
                              "--data.packing", "concat", "--data.long_documents", "split"}));
}

// ---- What people read

TEST(RunConfig, help_documents_every_option_with_its_default) {
  const std::string help = parse_arguments({"--help"}).answer;
  RunConfig run;
  for (const Option& o : options_of(run)) {
    EXPECT_NE(help.find(fmt::format("--{} ", o.key)), std::string::npos) << o.key;
    EXPECT_GT(std::string(o.help).size(), 10u) << o.key;
  }
  EXPECT_NE(help.find("  --data.seq_len  an integer in [2, 1073741824]  [4096]\n"), std::string::npos) << help;
  EXPECT_EQ(parse_arguments({"-h", "--optimizer.lr", "nonsense"}).answer, help);
  EXPECT_EQ(parse_arguments({"--version"}).answer, fmt::format("train_gpt {}\n", kVersion));
  for (size_t at = 0; at < help.size();) {
    const size_t end = help.find('\n', at);
    EXPECT_LE(end - at, 110u) << help.substr(at, end - at);
    at = end + 1;
  }
}

TEST(RunConfig, description_holds_what_the_run_uses_within_the_width) {
  const std::string text = describe(parse_with({"--optimizer.lr", "0.5"}), 60);
  EXPECT_NE(text.find("optimizer   name adamw, lr 0.5, betas [0.9,0.95], "), std::string::npos) << text;
  EXPECT_EQ(text.find("decay_ratio"), std::string::npos) << "a cosine schedule has none";
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    EXPECT_LE(end - at, 60u) << text.substr(at, end - at);
    at = end + 1;
  }
}

}  // namespace
