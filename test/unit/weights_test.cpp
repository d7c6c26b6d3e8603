// Where weights come from: what init_random draws, and which tensors of a checkpoint load_weights takes.
#include "llama/weights.h"

#include "test/files.h"
#include "test/model_testing.h"

namespace {

ModelOptions small() {
  return {DType::F32, 8, 8, false};
}

std::vector<float> values(TestModel& model, const ShardPiece& piece) {
  const Tensor t = piece_of(model.params().param_shard(piece.unit), piece);
  return {t.as<float>(), t.as<float>() + piece.count};
}

/// A directory of a checkpoint, and the writing of model.safetensors into it.
class Weights : public testing::Test {
 protected:
  /// The model's tensors, the embedding under each of `embedding_names`.
  void write(TestModel& model, const std::vector<std::string>& embedding_names) {
    std::vector<TensorToWrite> tensors;
    for_each_name(model, embedding_names, [&](const std::string& name, const ShardPiece& piece) {
      tensors.push_back({name, DType::F32, {piece.disk->shape.begin(), piece.disk->shape.end()}});
    });
    SafetensorsWriter writer(directory_ / "model.safetensors", tensors);
    for_each_name(model, embedding_names, [&](const std::string& name, const ShardPiece& piece) {
      writer.write(name, 0, piece.count, DType::F32, values(model, piece).data());
    });
    writer.finish();
  }
  void change_last_element(const std::string& name) {
    std::vector<TensorToWrite> tensors;
    int64_t last = 0;
    {
      const SafetensorsFile file(directory_ / "model.safetensors");
      for (const auto& [each, info] : file.tensors()) tensors.push_back({each, DType::F32, info.shape});
      last = file.tensors().at(name).numel() - 1;
    }
    SafetensorsWriter writer(directory_ / "model.safetensors", tensors, {}, /*create=*/false);
    const float value = 7;
    writer.write(name, last, 1, DType::F32, &value);
    writer.finish();
  }
  void load(TestModel& model, const LoadProgress& progress = {}) {
    load_weights(model.params(), model.config(), model.units(), SafetensorsDirectory(directory_.path()), progress);
  }

  const TempDir directory_;

 private:
  template <class Op>
  static void for_each_name(TestModel& model, const std::vector<std::string>& embedding_names, Op&& op) {
    for (const ShardPiece& piece : model.pieces()) {
      const bool is_embedding = piece.disk->hf_name == "model.embed_tokens.weight";
      if (!is_embedding) op(piece.disk->hf_name, piece);
      for (const std::string& name : embedding_names) {
        if (is_embedding) op(name, piece);
      }
    }
  }
};

TEST_F(Weights, random_ones_have_the_width_of_the_config_and_biases_norms_and_the_pad_row_are_constant) {
  ModelConfig config = load_model_config(fixture_path("qwen2"));
  config.initializer_range = 0.5;
  config.pad_token_id = 3;
  TestModel model(config, small());
  init_random(model.params(), model.config(), model.units(), 1);
  const int64_t C = config.hidden_size;
  for (const ShardPiece& piece : model.pieces()) {
    const bool is_embedding = piece.disk->hf_name == "model.embed_tokens.weight";
    const std::vector<float> w = values(model, piece);
    double squares = 0;
    for (size_t i = 0; i < w.size(); i++) {
      const bool is_pad = is_embedding && static_cast<int64_t>(i) / C == config.pad_token_id;
      if (is_pad || piece.param->init != Init::Normal) {
        ASSERT_EQ(w[i], piece.param->init == Init::One ? 1.0f : 0.0f) << piece.disk->hf_name << " " << i;
      }
      squares += static_cast<double>(w[i]) * w[i];
    }
    if (piece.param->init != Init::Normal) continue;
    const double n = static_cast<double>(piece.count - (is_embedding ? C : 0));
    // The mean square of n normal numbers has the relative deviation sqrt(2 / n).
    EXPECT_NEAR(squares / n, 0.25, 0.25 * 6 * std::sqrt(2 / n)) << piece.disk->hf_name;
  }
}

TEST_F(Weights, every_tensor_of_a_checkpoint_has_its_own_place) {
  for (const char* family : {"llama", "llama_biases", "phi3", "glm4_biases"}) {
    const auto model = TestModel::load(fixture_path(family), small());
    const SafetensorsDirectory directory(fixture_path(family));
    for (const ShardPiece& piece : model->pieces()) {
      std::vector<float> expected(static_cast<size_t>(piece.count));
      directory.read(piece.disk->hf_name, piece.begin, piece.count, DType::F32, expected.data());
      EXPECT_TRUE(values(*model, piece) == expected) << family << " " << piece.disk->hf_name;
    }
  }
}

TEST_F(Weights, tensors_that_are_missing_misshapen_or_unknown_are_named) {
  const ModelConfig llama = load_model_config(fixture_path("llama"));
  TestModel written(llama, small());
  init_random(written.params(), llama, written.units(), 1);
  write(written, {});
  EXPECT_NE(error_of([&] { load(written); }).find("lacks 1 tensors"), std::string::npos);
  write(written, {"model.embed_tokens.weight", "model.embed_tokens.lora_A"});
  EXPECT_NE(error_of([&] { load(written); }).find("has no place for: model.embed_tokens.lora_A"), std::string::npos);
  write(written, {"model.embed_tokens.weight"});
  ModelConfig larger = llama;
  larger.vocab_size++;
  TestModel other(larger, small());
  EXPECT_NE(error_of([&] { load(other); }).find("model.embed_tokens.weight is ("), std::string::npos);
}

TEST_F(Weights, a_tied_embedding_may_be_stored_under_either_name_or_under_both) {
  TestModel written(load_model_config(fixture_path("qwen2_tied_yarn")), small());
  ASSERT_TRUE(written.config().tie_word_embeddings);
  init_random(written.params(), written.config(), written.units(), 1);
  const std::vector<std::vector<std::string>> spellings = {
      {"model.embed_tokens.weight"}, {"lm_head.weight"}, {"lm_head.weight", "model.embed_tokens.weight"}};
  for (const auto& names : spellings) {
    write(written, names);
    TestModel read(written.config(), small());
    load(read);
    for (const ShardPiece& piece : written.pieces()) {
      EXPECT_EQ(values(read, piece), values(written, piece)) << piece.disk->hf_name;
    }
  }
}

// 70000 x 64 is more than the 2^22 elements that are read at a time.
TEST_F(Weights, long_tensors_are_read_and_compared_to_their_last_element) {
  const ModelConfig config = parse_model_config({{"model_type", "llama"},
                                                 {"vocab_size", 70000},
                                                 {"hidden_size", 64},
                                                 {"intermediate_size", 64},
                                                 {"num_hidden_layers", 1},
                                                 {"num_attention_heads", 2},
                                                 {"tie_word_embeddings", true}},
                                                "test");
  TestModel written(config, small()), read(config, small());
  init_random(written.params(), config, written.units(), 1);
  write(written, {"lm_head.weight", "model.embed_tokens.weight"});
  std::vector<std::pair<int64_t, int64_t>> progress;
  load(read, [&](int64_t done, int64_t total) { progress.emplace_back(done, total); });
  int64_t total = 0;
  for (const ShardPiece& piece : written.pieces()) {
    EXPECT_TRUE(values(read, piece) == values(written, piece)) << piece.disk->hf_name;
    total += 4 * piece.count;
  }
  ASSERT_EQ(progress.size(), written.pieces().size() + 1) << "the embedding in two parts";
  EXPECT_EQ(progress.back(), std::pair(total, total));
  EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
  change_last_element("lm_head.weight");
  EXPECT_NE(error_of([&] { load(read); }).find("lm_head.weight differs from model.embed_tokens.weight"),
            std::string::npos);
}

}  // namespace
