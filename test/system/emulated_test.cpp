// The whole trainer on the emulated GPU (test/simt): every kernel, copy and collective of a step, from the
// configuration to the checkpoint, against the CPU device.
#include "test/system/dump.h"
#include "test/system/program.h"

namespace {

namespace fs = std::filesystem;

constexpr double kFp32 = 2e-5;
/// Weights, activations and their gradients have 8 bits: 2^-9 a rounding, some tens of roundings deep. The gradients of
/// q and k are differences of nearly equal numbers: up to 0.08 in these small models (all others within 0.05).
constexpr double kBf16 = 0.1;
/// With the sums over many experts, and gradients of biases that nearly cancel: up to 0.2, most below 0.1.
constexpr double kMixtureBf16 = 0.25;

class Emulated : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kEmulatedTrainer)) GTEST_SKIP() << "no " << kEmulatedTrainer;
  }

  std::vector<std::string> arguments(const std::string& model, const std::vector<std::string>& options) {
    std::vector<std::string> all = {"--model.path",
                                    fs::path("test/fixtures") / model,
                                    "--data.seq_len",
                                    "48",
                                    "--batch.global_batch_size",
                                    "2",
                                    "--train.steps",
                                    "1"};
    if (model != "stories260k") all.insert(all.end(), {"--data.train", text(), "--data.format", "jsonl"});
    all.insert(all.end(), options.begin(), options.end());
    return small_run(dir_, all);
  }
  /// Documents of any length, in the vocabulary of the small fixtures.
  std::string text() {
    const fs::path path = dir_ / "text.jsonl";
    std::ofstream out(path);
    unsigned state = 1;
    for (const int n : {1, 2, 33, 7, 48, 20, 3, 41, 11, 5, 48, 30}) {
      for (int i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        out << (i == 0 ? "{\"input_ids\":[" : ",") << 3 + state / 65536 % 90;
      }
      out << "]}\n";
    }
    return path;
  }
  /// The dump of the first step.
  Dump dump(const std::string& model, std::vector<std::string> options, const char* program,
            std::vector<std::string> launcher = {}) {
    fs::remove_all(dir_ / "run"), fs::remove_all(dir_ / "dump");
    options.insert(options.end(), {"--debug.dump_dir", dir_ / "dump", "--debug.dump_logits", "true"});
    const ProgramResult result = run_program(arguments(model, options), std::move(launcher), program);
    EXPECT_EQ(result.exit_code, 0) << result.output;
    output_ = result.output;
    return result.exit_code == 0 ? read_dump(dir_ / "dump/step_000001.safetensors") : Dump{};
  }
  void compare(const std::string& model, const std::string& dtype, double bound) {
    expect_same_step(dump(model, {}, kTrainer),
                     dump(model, {"--train.device", "cuda", "--train.dtype", dtype}, kEmulatedTrainer), bound,
                     model + " " + dtype);
  }

  TemporaryDirectory dir_;
  std::string output_;  ///< of the last dump()
};

TEST_F(Emulated, every_family_has_the_gradients_of_the_cpu) {
  for (const char* model : {"stories260k", "gemma2", "gemma3_text", "qwen2", "qwen3", "olmo2", "mistral", "phi3",
                            "smollm3", "llama_biases", "cohere2", "glm4", "granite", "qwen3_chunked"}) {
    compare(model, "fp32", kFp32);
    compare(model, "bf16", kBf16);
  }
}

// In fp32 a token's experts are those of the CPU. In bf16 another rounding may be another expert, but not where all are
// chosen.
TEST_F(Emulated, mixtures_of_experts_have_the_gradients_of_the_cpu) {
  for (const char* family : {"mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"}) {
    compare(family, "fp32", kFp32);
    const fs::path fixture = fs::path("test/fixtures") / family, model = dir_ / family;
    fs::create_directories(model);
    fs::copy_file(fixture / "model.safetensors", model / "model.safetensors");
    auto config = nlohmann::json::parse(read_text(fixture / "config.json"));
    for (const char* key : {"num_local_experts", "num_experts", "n_routed_experts"}) {
      if (config.contains(key)) config["num_experts_per_tok"] = config[key];
    }
    if (config.contains("topk_group")) config["topk_group"] = config["n_group"];
    std::ofstream(model / "config.json") << config;
    compare(model, "bf16", kMixtureBf16);
  }
}

TEST_F(Emulated, text_of_vision_language_models_has_the_gradients_of_the_cpu) {
  for (const char* model : {"qwen3_vl", "qwen3_vl_moe"}) compare(model, "fp32", kFp32);
}

// Heads of a width that it takes, a window that is shorter than a document.
TEST_F(Emulated, attention_by_cudnn_has_the_gradients_of_the_cpu) {
  auto config = nlohmann::json::parse(read_text("test/fixtures/mistral/config.json"));
  config["num_attention_heads"] = 4, config["num_key_value_heads"] = 2, config["head_dim"] = 16;
  std::ofstream(dir_ / "config.json") << config;
  const std::string model = dir_ / "config.json";
  std::vector<std::string> options = {"--model.init", "random"};
  const Dump cpu = dump(model, options, kTrainer);
  options.insert(options.end(), {"--train.device", "cuda", "--memory.recompute", "block"});
  for (const char* order : {"TRAIN_GPT_SIMT_STREAMS=0", "TRAIN_GPT_SIMT_STREAMS=6"}) {
    const Dump gpu = dump(model, options, kEmulatedTrainer, {"/usr/bin/env", "TRAIN_GPT_SIMT_SM=90", order});
    expect_same_step(cpu, gpu, kBf16, order);
    EXPECT_NE(output_.find("cuDNN 91900, planned"), std::string::npos) << output_;
  }
}

TEST_F(Emulated, recompute_and_offload_change_no_bit) {
  for (const char* model : {"stories260k", "gemma2", "cohere2", "qwen2_moe"}) {  // output norms; a parallel block
    std::vector<std::string> options = {"--train.device", "cuda", "--batch.micro_batch_size", "1"};
    const Dump saved = dump(model, options, kEmulatedTrainer);
    EXPECT_FALSE(saved.tensors.empty());
    options.insert(options.end(), {"--memory.recompute", "block"});
    EXPECT_TRUE(saved.tensors == dump(model, options, kEmulatedTrainer).tensors) << model;
    options.insert(options.end(), {"--memory.offload", "block_inputs"});
    EXPECT_TRUE(saved.tensors == dump(model, options, kEmulatedTrainer).tensors) << model << ", offload";
    // Whatever order the streams of computing and of copies allow.
    for (const char* order : {"TRAIN_GPT_SIMT_STREAMS=1", "TRAIN_GPT_SIMT_STREAMS=2", "TRAIN_GPT_SIMT_STREAMS=3"}) {
      EXPECT_TRUE(saved.tensors == dump(model, options, kEmulatedTrainer, {"/usr/bin/env", order}).tensors)
          << model << order;
    }
  }
}

TEST_F(Emulated, selftest_finds_all_layers_right) {
  const ProgramResult result = run_program({"--selftest"}, {}, kEmulatedTrainer);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("all layers are right"), std::string::npos) << result.output;
}

TEST_F(Emulated, the_benchmark_of_a_gpu_runs) {
  const std::string bench = fs::path(kEmulatedTrainer).parent_path() / "gpu_bench";
  const ProgramResult result = run_program({"--small"}, {}, bench.c_str());
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("of a copy"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("experts 128 x 64 x 64, backward"), std::string::npos) << result.output;
}

TEST_F(Emulated, a_run_that_does_not_fit_says_what_would) {
  const auto run = [&](const char* seq_len) {
    return run_program(arguments("stories260k", {"--train.device", "cuda", "--model.path",
                                                 "configs/models/qwen2.5_0.5b.json", "--model.init", "random",
                                                 "--data.seq_len", seq_len, "--batch.micro_batch_size", "1"}),
                       {}, kEmulatedTrainer);
  };
  const ProgramResult close = run("8192"), never = run("1048576");  // the emulated GPU has 16 GiB
  EXPECT_EQ(close.exit_code, 1);
  EXPECT_NE(close.output.find("It fits with --memory.recompute block"), std::string::npos) << close.output;
  EXPECT_EQ(never.exit_code, 1);
  EXPECT_NE(never.output.find("use more ranks"), std::string::npos) << never.output;
}

TEST_F(Emulated, ranks_have_the_gradients_of_one) {
  if (std::system("command -v mpirun >/dev/null") != 0) GTEST_SKIP() << "no mpirun";
  for (const char* model : {"stories260k", "qwen3_moe"}) {  // with statistics of all ranks
    std::vector<std::string> options = {"--train.device", "cuda", "--train.dtype", "fp32"};
    const Dump one = dump(model, options, kEmulatedTrainer);  // a balance loss is of the rows of a micro-step
    options.insert(options.end(), {"--batch.micro_batch_size", "1", "--parallel.sp_size", "2"});
    // One GPU that all share: MPI through the memory of the host. A GPU each: NCCL.
    expect_same_step(one, dump(model, options, kEmulatedTrainer, mpirun(4)), 1e-5,
                     model + std::string(", a shared GPU"));
    std::vector<std::string> own = mpirun(4);
    own.insert(own.begin() + 1, "TRAIN_GPT_SIMT_OWN_GPU=1");
    const Dump nccl = dump(model, options, kEmulatedTrainer, own);
    expect_same_step(one, nccl, 1e-5, model + std::string(", a GPU a rank"));
    // Whatever order streams and events allow: the same bits.
    for (const char* order : {"TRAIN_GPT_SIMT_STREAMS=1", "TRAIN_GPT_SIMT_STREAMS=2"}) {
      std::vector<std::string> shuffled = own;
      shuffled.insert(shuffled.begin() + 1, order);
      EXPECT_EQ(nccl.tensors, dump(model, options, kEmulatedTrainer, shuffled).tensors) << model << order;
    }
  }
}

TEST_F(Emulated, gradients_of_bf16_are_those_of_fp32_rounded) {
  std::vector<std::string> options = {"--batch.micro_batch_size", "1"};
  const Dump fp32 = dump("stories260k", options, kTrainer);
  options.insert(options.end(), {"--train.grad_dtype", "bf16"});
  constexpr double kRounded = 3 * 0x1p-9;  // on its way, and once a micro-batch
  expect_same_step(fp32, dump("stories260k", options, kTrainer), kRounded, "one rank, CPU");
  options.insert(options.end(), {"--train.device", "cuda", "--train.dtype", "fp32"});
  expect_same_step(fp32, dump("stories260k", options, kEmulatedTrainer), kRounded, "one rank");
  if (std::system("command -v mpirun >/dev/null") != 0) GTEST_SKIP() << "no mpirun";
  std::vector<std::string> own = mpirun(4);
  own.insert(own.begin() + 1, {"TRAIN_GPT_SIMT_OWN_GPU=1", "TRAIN_GPT_SIMT_STREAMS=4"});
  options.insert(options.end(), {"--parallel.sp_size", "2"});
  expect_same_step(fp32, dump("stories260k", options, kEmulatedTrainer, own), kRounded, "2 x 2 ranks");
}

TEST_F(Emulated, a_resumed_run_is_bit_equal) {
  const auto with = [&](const char* steps) {
    return arguments("stories260k", {"--train.device", "cuda", "--train.steps", steps, "--schedule.name", "constant",
                                     "--schedule.warmup_steps", "0", "--checkpoint.every", "2"});
  };
  ASSERT_EQ(run_program(with("4"), {}, kEmulatedTrainer).exit_code, 0);
  const std::string whole = read_text(dir_ / "run/step_000004/model.safetensors");
  fs::remove_all(dir_ / "run");
  ASSERT_EQ(run_program(with("2"), {}, kEmulatedTrainer).exit_code, 0);
  const ProgramResult resumed = run_program(with("4"), {}, kEmulatedTrainer);
  ASSERT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_NE(resumed.output.find("resumed from"), std::string::npos) << resumed.output;
  EXPECT_FALSE(whole.empty());
  EXPECT_TRUE(whole == read_text(dir_ / "run/step_000004/model.safetensors"));
}

}  // namespace
