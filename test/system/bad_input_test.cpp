// Bad input of any kind ends before training with exit code 1 and a message that names place, numbers and remedy.
#include <sys/resource.h>

#include "data/safetensors.h"
#include "test/system/program.h"

namespace {

namespace fs = std::filesystem;

const char* const kModel = "test/fixtures/stories260k";
const char* const kData = "test/fixtures/shakespeare.jsonl";

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

class BadInput : public testing::Test {
 protected:
  /// Runs 2 steps with `options` over sane ones and expects each of `parts` in the message.
  void expect_refused(std::map<std::string, std::string> options, const std::vector<std::string>& parts) {
    std::map<std::string, std::string> all = {{"--model.path", kModel},           {"--data.train", kData},
                                              {"--data.seq_len", "64"},           {"--data.cache_dir", dir_ / "cache"},
                                              {"--batch.global_batch_size", "2"}, {"--train.steps", "2"},
                                              {"--checkpoint.dir", dir_ / "run"}};
    for (auto& [key, value] : options) all[key] = value;
    std::vector<std::string> arguments;
    for (auto& [key, value] : all) arguments.push_back(key), arguments.push_back(value);
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_EQ(result.output.find("step 1/"), std::string::npos) << "it trained\n" << result.output;
    const size_t error = result.output.find("] error: ");
    ASSERT_NE(error, std::string::npos) << result.output;
    const std::string message = result.output.substr(error);
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << part << " in\n" << message;
  }

  /// A copy of the small model, to be damaged.
  fs::path copy_model() {
    const fs::path to = dir_ / "model";
    fs::copy(kModel, to, fs::copy_options::recursive);
    return to;
  }
  /// The copy with its config.json changed.
  fs::path model_with(const std::string& key, const nlohmann::json& value) {
    const fs::path to = copy_model();
    nlohmann::json config = nlohmann::json::parse(read_text(to / "config.json"));
    config[key] = value;
    write_text(to / "config.json", config.dump());
    return to;
  }
  /// The copy with other tensors: `change` edits the list; all values are zero.
  fs::path model_with_tensors(const std::function<void(std::vector<TensorToWrite>&)>& change) {
    const fs::path to = copy_model();
    std::vector<TensorToWrite> tensors;
    {
      const SafetensorsFile file(to / "model.safetensors");
      for (const auto& [name, info] : file.tensors()) tensors.push_back({name, DType::F32, info.shape});
    }
    change(tensors);
    SafetensorsWriter(to / "model.safetensors", tensors).finish();
    return to;
  }
  fs::path data_of(const std::string& lines) {
    write_text(dir_ / "data.jsonl", lines);
    return dir_ / "data.jsonl";
  }

  TemporaryDirectory dir_;
};

TEST_F(BadInput, checkpoints) {
  expect_refused({{"--model.path", "no/such/model"}}, {"no/such/model", "model.path"});
  const fs::path model = copy_model();
  fs::resize_file(model / "model.safetensors", 5000);
  expect_refused({{"--model.path", model}}, {"model.safetensors", "truncated"});
}

TEST_F(BadInput, a_missing_tensor_is_named) {
  const fs::path model = model_with_tensors([](auto& tensors) {
    std::erase_if(tensors, [](const auto& t) { return t.name == "model.layers.2.mlp.up_proj.weight"; });
  });
  expect_refused({{"--model.path", model}}, {"lacks 1 tensors", "model.layers.2.mlp.up_proj.weight"});
}

TEST_F(BadInput, a_wrong_shape_is_named_with_both) {
  const fs::path model = model_with_tensors([](auto& tensors) {
    for (auto& t : tensors) {
      if (t.name == "model.norm.weight") t.shape = {63};
    }
  });
  expect_refused({{"--model.path", model}}, {"model.norm.weight is (63), expected (64)"});
}

TEST_F(BadInput, an_extra_tensor_is_not_lost_unsaid) {
  const fs::path model = model_with_tensors([](auto& tensors) {
    tensors.push_back({"model.layers.0.self_attn.q_proj.lora_A", DType::F32, {4, 64}});
  });
  expect_refused({{"--model.path", model}}, {"lora_A", "refused"});
}

TEST_F(BadInput, a_tied_head_that_differs_from_the_embedding) {
  const fs::path model = model_with_tensors([](auto& tensors) {
    tensors.push_back({"lm_head.weight", DType::F32, {512, 64}});
  });
  std::vector<TensorToWrite> tensors;
  {
    const SafetensorsFile file(model / "model.safetensors");
    for (const auto& [name, info] : file.tensors()) tensors.push_back({name, DType::F32, info.shape});
  }
  SafetensorsWriter again(model / "model.safetensors", tensors);
  const float one = 1;
  again.write("lm_head.weight", 77, 1, DType::F32, &one);
  again.finish();
  expect_refused({{"--model.path", model}}, {"tie_word_embeddings", "lm_head.weight differs"});
}

TEST_F(BadInput, models_that_are_not_supported) {
  expect_refused({{"--model.path", model_with("model_type", "olmoe")}}, {"olmoe", "llama", "qwen3"});
}
TEST_F(BadInput, mixers_that_are_not_supported) {
  expect_refused({{"--model.path", model_with("model_type", "mamba2")}}, {"mamba2", "recurren"});
}
TEST_F(BadInput, knobs_that_are_not_supported) {
  expect_refused({{"--model.path", model_with("hidden_act", "relu")}}, {"hidden_act", "relu"});
}

TEST_F(BadInput, what_text_of_a_vision_language_model_cannot_be) {
  const std::string model = "test/fixtures/qwen3_vl";
  write_text(dir_ / "text.jsonl", "{\"input_ids\":[5,6,7]}\n");
  write_text(dir_ / "image.jsonl", "{\"input_ids\":[5,6,7]}\n{\"input_ids\":[5,95,7]}\n");
  expect_refused({{"--model.path", model}, {"--data.train", dir_ / "image.jsonl"}},
                 {"image.jsonl:2", "token 1 is 95", "features of an image"});
  expect_refused({{"--model.path", model}, {"--data.train", dir_ / "text.jsonl"}, {"--model.init", "random"}},
                 {"model.init random", "qwen3_vl", "model_type qwen3 with the keys of text_config"});
}

TEST_F(BadInput, documents) {
  expect_refused({{"--data.train", "no/such/*.jsonl"}}, {"no/such/*.jsonl"});
  expect_refused({{"--data.train", data_of("")}}, {"data.jsonl"});
  expect_refused({{"--data.train", data_of("{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [1, 512, 3]}\n")}},
                 {"data.jsonl", "512"});
  expect_refused({{"--data.train", data_of("{\"input_ids\": [1, 2, 3], \"labels\": [1, 2]}\n")}},
                 {"data.jsonl:1", "labels"});
  expect_refused({{"--data.train", data_of("{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [1, 2,")}}, {"data.jsonl:2"});
  expect_refused({{"--data.train", data_of("{\"input_ids\": [1, 2, 3], \"labels\": [-100, -100, -100]}\n")}}, {"-100"});
}

TEST_F(BadInput, a_later_step_without_a_target) {
  std::string lines;
  for (int i = 0; i < 40; i++) {
    lines += i == 0 ? "{\"input_ids\": [1, 2]}\n" : "{\"input_ids\": [1, 2], \"labels\": [-100, -100]}\n";
  }
  expect_refused({{"--data.train", data_of(lines)},
                  {"--data.shuffle", "false"},
                  {"--data.packing", "none"},
                  {"--data.seq_len", "2"}},
                 {"step 2: none of its tokens", "target", "batch.global_batch_size"});
}

TEST_F(BadInput, an_evaluation_without_a_target) {
  // The target is in the part that truncation takes away.
  const fs::path eval = data_of("{\"input_ids\": [1, 2, 3, 4], \"labels\": [-100, -100, -100, 4]}\n");
  write_text(dir_ / "train.jsonl", "{\"input_ids\": [1, 2, 3, 4]}\n");
  expect_refused({{"--data.train", dir_ / "train.jsonl"},
                  {"--data.eval", eval},
                  {"--data.seq_len", "3"},
                  {"--data.long_documents", "truncate"}},
                 {"data.eval", "target"});
}

TEST_F(BadInput, options) {
  expect_refused({{"--model.path", std::string(kModel) + "/config.json"}}, {"is a file", "model.init to random"});
  expect_refused({{"--optimizer.learning_rate", "1"}}, {"optimizer.learning_rate", "did you mean"});
  expect_refused({{"--schedule.decay_ratio", "0.5"}}, {"schedule.decay_ratio", "ignored"});
  expect_refused({{"--log.file", "--plan"}}, {"--log.file has no value"});
  expect_refused({{"--parallel.sp_size", "2"}}, {"parallel.sp_size"});
  expect_refused({{"--train.dtype", "bf16"}}, {"bf16", "fp32"});
  expect_refused({{"--train.device", "cuda"}}, {"--train.device cpu"});
  write_text(dir_ / "config.json", R"({"model": {"path": "a", "path": "b"}})");
  const ProgramResult result = run_program({dir_ / "config.json"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_NE(result.output.find("'model.path' is given twice"), std::string::npos) << result.output;
}

TEST_F(BadInput, places_that_cannot_be_written) {
  write_text(dir_ / "a_file", "x");
  expect_refused({{"--checkpoint.dir", dir_ / "a_file"}}, {"a_file"});
  expect_refused({{"--checkpoint.dir", "/proc/no_such_place"}}, {"/proc/no_such_place"});
  expect_refused({{"--debug.dump_dir", "/proc"}}, {"/proc"});
}

TEST_F(BadInput, a_long_row_is_a_warning_with_advice) {
  const ProgramResult result =
      run_program({"--model.path", kModel, "--data.train", kData, "--data.cache_dir", dir_ / "cache", "--data.seq_len",
                   "1024", "--train.steps", "2", "--checkpoint.dir", dir_ / "run", "--plan"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("512 positions"), std::string::npos) << result.output;
  EXPECT_NE(result.output.find("yarn"), std::string::npos) << result.output;
}

// RLIMIT_FSIZE stands for a full disk: a write beyond it fails as ENOSPC would (EFBIG). The model is larger than what
// MPI needs for itself.
TEST_F(BadInput, a_full_disk_while_saving_keeps_the_previous_checkpoint) {
  const auto two = large_run(dir_, "2", "2"), four = large_run(dir_, "4", "2");
  ASSERT_EQ(run_program(two).exit_code, 0);
  const std::string before = read_text(dir_ / "run/step_000002/model.safetensors");

  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit small = {6 << 20, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const ProgramResult full = run_program(four);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);

  EXPECT_EQ(full.exit_code, 1) << full.output;
  EXPECT_NE(full.output.find("step_000004.tmp"), std::string::npos) << full.output;
  EXPECT_FALSE(fs::exists(dir_ / "run/step_000004"));
  EXPECT_FALSE(fs::exists(dir_ / "run/step_000004.tmp"));
  EXPECT_EQ(read_text(dir_ / "run/step_000002/model.safetensors"), before);
  const ProgramResult again = run_program(four);
  EXPECT_EQ(again.exit_code, 0) << again.output;
  EXPECT_NE(again.output.find("resumed from"), std::string::npos);
}

}  // namespace
