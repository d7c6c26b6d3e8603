#include "llama/run_config.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "data/file.h"
#include "data/json.h"
#include "layers/core/check.h"
#include "llama/human_number.h"
#include "llama/run_options.h"
#include "llama/schedule.h"

using nlohmann::json;

// ---- CONFIG.json

namespace {

constexpr int64_t kLargestConfig = int64_t{1} << 20;

[[noreturn]] void fail_unknown(const std::string& key, const std::string& where) {
  fail("unknown option '{}' ({}): did you mean '{}'? `train_gpt --help` lists every option", key.substr(0, 80), where,
       nearest_key(key));
}

bool is_section(const std::string& name) {
  for (const Section& s : option_sections()) {
    if (name == s.name) return true;
  }
  return false;
}

void apply_json(RunConfig& run, const json& config, const std::string& where) {
  CHECK(config.is_object(), "{}: a run configuration is a JSON object of sections, not {}", where, config.type_name());
  const std::vector<Option> options = options_of(run);
  for (const auto& [section, body] : config.items()) {
    CHECK(section.find('.') == std::string::npos,
          R"({}: '{}': in a file an option stands inside its section, as in {{"optimizer": {{"lr": 1e-5}}}})", where,
          section.substr(0, 80));
    if (!is_section(section)) fail_unknown(section, where);
    CHECK(body.is_object(), "{}: '{}' is a section, an object of options, not {}", where, section, body.type_name());
    for (const auto& [name, value] : body.items()) {
      const std::string key = section + "." + name;
      const auto option = std::find_if(options.begin(), options.end(), [&](const Option& o) { return key == o.key; });
      if (option == options.end()) fail_unknown(key, where);
      read_option(*option, value, where);
    }
  }
}

}  // namespace

RunConfig parse_run_config_json(std::string_view text, const std::string& where) {
  RunConfig run;
  apply_json(run, parse_json(text, where, JsonComments::Allowed), where);
  return run;
}

json to_json(const RunConfig& run) {
  RunConfig copy = run;
  json config;
  for (const Option& o : options_of(copy)) config[o.section()][o.name()] = write_option(o);
  return config;
}

std::string log_path(const RunConfig& run) {
  return run.log.file.empty() ? run.checkpoint.dir + "/log.jsonl" : run.log.file;
}

// ---- Rules between options

namespace {

void check_nothing_is_ignored(const RunConfig& run) {
  RunConfig copy = run, defaults;
  const std::vector<Option> given = options_of(copy), untouched = options_of(defaults);
  for (size_t i = 0; i < given.size(); i++) {
    const char* reason = given[i].unused(run);
    const json value = write_option(given[i]), default_value = write_option(untouched[i]);
    CHECK(reason == nullptr || value == default_value, "{} = {} would be ignored, because {}: leave it out",
          given[i].key, value.dump(), reason);
  }
}

}  // namespace

void validate_run_config(const RunConfig& run) {
  CHECK(!run.model.path.empty(), "model.path is missing: give the Hugging Face model directory to train");
  CHECK(!run.data.train.empty(), "data.train is empty: give the files to train on");
  CHECK(run.train.steps || run.train.epochs, "neither train.steps nor train.epochs is given: say how long to train");
  CHECK(!run.train.steps || !run.train.epochs,
        "train.steps = {} and train.epochs = {} are both given: set one of them to null", *run.train.steps,
        *run.train.epochs);
  CHECK(run.batch.global_batch_size % run.batch.micro_batch_size == 0,
        "batch.global_batch_size = {} is not a multiple of batch.micro_batch_size = {}", run.batch.global_batch_size,
        run.batch.micro_batch_size);
  CHECK(run.memory.offload == "none" || run.memory.recompute == "block",
        "memory.offload = {} without memory.recompute = block would move little of what is kept: set both",
        run.memory.offload);
  if (run.train.steps) validate_schedule(run.schedule, *run.train.steps);
  check_nothing_is_ignored(run);
  CHECK(run.world == 0 || run.plan, "--world {} says for how many ranks --plan plans: add --plan", run.world);
}

// ---- Command line

namespace {

/// What CLI11 makes of argv: texts only, so that the table alone decides what a value means.
struct Arguments {
  CLI::App app;
  std::string config_path, world;
  std::vector<std::pair<const Option*, CLI::Option*>> given;
  CLI::Option *help, *version, *plan, *selftest;

  explicit Arguments(const std::vector<Option>& options) {
    app.set_help_flag();
    app.allow_extras();
    app.add_option("CONFIG", config_path);
    help = app.add_flag("-h,--help");
    version = app.add_flag("--version");
    plan = app.add_flag("--plan");
    selftest = app.add_flag("--selftest");
    app.add_option("--world", world);
    for (const Option& o : options) {
      CLI::Option* argument = app.add_option("--" + std::string(o.key));
      // TakeAll and the separator (an empty text) between repetitions let us see, and refuse, a repeated option.
      argument->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)->inject_separator();
      constexpr int kMany = 1 << 20;
      argument->expected(1, o.is_list() ? kMany : std::holds_alternative<BetaPair>(o.value) ? 2 : 1);
      given.emplace_back(&o, argument);
    }
  }
  Arguments(const Arguments&) = delete;

  void parse(int argc, const char* const* argv) {
    for (int i = 1; i < argc; i++) {
      const std::string_view argument = argv[i];
      CHECK(!argument.starts_with("--") || !argument.ends_with("="),
            "{} has no value: write null where an option is to have none", argument);
      CHECK(!argument.empty(), "argument {} is empty", i);
    }
    try {
      app.parse(argc, argv);
    } catch (const CLI::ArgumentMismatch& e) {  // "--train.steps: 1 required ..."
      const std::string what = e.what();
      fail("{} has no value. `train_gpt --help` lists every option", what.substr(0, what.find(':')));
    } catch (const CLI::ParseError& e) {
      fail("{}. `train_gpt --help` lists every option", e.what());
    }
    for (const std::string& extra : app.remaining()) {
      if (extra.starts_with("-")) fail_unknown(extra.substr(extra.find_first_not_of('-')), "on the command line");
      fail("unexpected argument '{}': one CONFIG.json, then options as --section.key value", extra);
    }
  }
};

bool is_utf8(const std::string& text) {
  try {
    return !json(text).dump().empty();
  } catch (const json::type_error&) {
    return false;
  }
}

void apply_arguments(RunConfig& run, const Arguments& arguments) {
  for (const auto& [option, argument] : arguments.given) {
    if (argument->count() == 0) continue;
    const std::vector<std::string>& texts = argument->results();
    CHECK(std::find(texts.begin(), texts.end(), "") == texts.end(), "--{} is given twice on the command line",
          option->key);
    for (const std::string& text : texts) {
      CHECK(!text.starts_with("--"), "--{} has no value: '{}' looks like an option (a path is written ./{})",
            option->key, text, text);
    }
    for (const std::string& text : texts) CHECK(is_utf8(text), "the value of --{} is not UTF-8", option->key);
    read_option(*option, option_from_arguments(*option, texts), "on the command line");
  }
  run.plan = arguments.plan->as<bool>();
  if (!arguments.world.empty()) {
    const std::optional<int64_t> world = parse_human_int64(arguments.world);
    CHECK(world && *world >= 1, "--world {}: expected a number of ranks, an integer >= 1", arguments.world);
    run.world = *world;
  }
}

}  // namespace

RunConfig parse_run_config(int argc, const char* const* argv) {
  RunConfig run;
  const std::vector<Option> options = options_of(run);
  Arguments arguments(options);
  arguments.parse(argc, argv);
  if (arguments.help->count()) run.answer = help_text();
  if (arguments.version->count()) run.answer = fmt::format("train_gpt {}\n", kVersion);
  run.selftest = arguments.selftest->as<bool>();
  if (!run.answer.empty() || run.selftest) return run;
  CHECK(argc > 1, "nothing to train.\n{}", usage_text());
  run.config_path = arguments.config_path;
  if (!run.config_path.empty()) {
    const std::string text = read_file(run.config_path, kLargestConfig);
    apply_json(run, parse_json(text, run.config_path, JsonComments::Allowed), run.config_path);
  }
  apply_arguments(run, arguments);
  validate_run_config(run);
  return run;
}
