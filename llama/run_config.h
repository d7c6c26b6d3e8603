// RunConfig: what this run does. One table (run_option_table.cpp) declares each option once: name, type, default, help
// and check; the JSON reader, the command line, the echo and `--help` are made from it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// A source of documents: a file, or a glob of files. On the command line and in JSON: "path", or {"path", "weight"}.
struct SourceConfig {
  std::string path;
  double weight = 1;  ///< how often its documents come in one epoch: 2 = twice, 0.5 = every other one
};

struct RunConfig {
  struct Model {
    std::string path;
    std::string init = "pretrained";  ///< pretrained | random
    uint64_t seed = 42;
  } model;
  struct Data {
    std::vector<SourceConfig> train, eval;
    std::string format = "auto";  ///< auto | jsonl | megatron | llmc | bytes
    int64_t seq_len = 4096;
    std::string packing = "best_fit";      ///< best_fit | concat | none
    std::string long_documents = "split";  ///< split | truncate | drop | error
    bool shuffle = true;
    uint64_t seed = 42;
    std::string cache_dir;  ///< where JSONL indexes are kept; empty = the user's cache directory
  } data;
  struct BatchSizes {
    int64_t micro_batch_size = 1, global_batch_size = 8;  ///< rows of seq_len tokens
  } batch;
  struct Optimizer {
    std::string name = "adamw";
    double lr = 1e-5;
    double beta1 = 0.9, beta2 = 0.95;                            ///< key: betas
    double eps = 1e-8, weight_decay = 0.1, max_grad_norm = 1.0;  ///< max_grad_norm 0 = no clipping
    std::vector<std::string> no_decay = {"*norm*", "*bias"};     ///< globs on Hugging Face names
  } optimizer;
  struct Schedule {
    std::string name = "cosine";  ///< constant | linear | cosine | wsd
    int64_t warmup_steps = 0;
    double min_lr_ratio = 0.1;
    double decay_ratio = 0.2;  ///< wsd: the last share of the steps decays
  } schedule;
  struct Train {
    std::optional<int64_t> steps;
    std::optional<double> epochs;
    std::string device = "auto";      ///< auto | cpu | cuda
    std::string dtype = "auto";       ///< auto | fp32 | bf16
    std::string grad_dtype = "fp32";  ///< fp32 | bf16
    int64_t eval_every = 0;           ///< 0 = only after the last step
  } train;
  struct Parallel {
    int64_t sp_size = 1, cp_size = 1, dp_replicate_size = 1;
    double timeout_s = 600;
  } parallel;
  struct Memory {
    std::string recompute = "none";  ///< none | block
    std::string offload = "none";    ///< none | block_inputs
    int64_t loss_tile_tokens = 0;    ///< 0 = chosen by the plan
  } memory;
  struct Checkpoint {
    std::string dir = "checkpoints";
    int64_t every = 0;  ///< 0 = only at the end
    int64_t keep = 2;
    std::string resume = "auto";  ///< auto | never | PATH
  } checkpoint;
  struct Log {
    std::string file;  ///< empty = <checkpoint.dir>/log.jsonl
    int64_t every = 1;
    bool traffic = false;
  } log;
  struct Debug {
    bool check_collectives = false;
    std::string dump_dir;  ///< empty = none
    int64_t dump_steps = 1;
    bool dump_logits = false;
  } debug;

  // Command line only
  std::string config_path;
  bool plan = false;  ///< --plan: print what would run, and stop
  int64_t world = 0;  ///< --world N with --plan: as if on N ranks; 0 = as started

  /// --help, --version: what to print instead of a run; nothing else is checked then.
  std::string answer;
  bool selftest = false;  ///< --selftest: compare the GPU with the CPU instead of a run; likewise
};

inline constexpr const char* kVersion = "0.1.0";

/// CONFIG.json, then --section.key value over it; checked by validate_run_config unless there is an `answer`. Every
/// Error names the key, where it was given, its value and what is legal; the nearest known key when it is unknown.
RunConfig parse_run_config(int argc, const char* const* argv);

/// The options in `text` over the defaults; each value is checked on its own. `where` is for messages.
RunConfig parse_run_config_json(std::string_view text, const std::string& where);

/// Every rule between options that needs neither model, data nor device. An option that this run would ignore is an
/// error unless it has its default value.
void validate_run_config(const RunConfig& run);

/// The resolved options as the JSON that gives the same run.
nlohmann::json to_json(const RunConfig& run);

/// The same for people: a line (or a few of at most `width` columns) a section.
std::string describe(const RunConfig& run, int width);

/// Where this run logs: log.file, or log.jsonl in checkpoint.dir.
std::string log_path(const RunConfig& run);
