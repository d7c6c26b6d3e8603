// Every family against transformers: loss, logits and every gradient of the fixtures (test/fixtures/README.md), and an
// F64 gradient check of the whole model.
#include <filesystem>

#include "test/model_testing.h"

namespace {

std::vector<std::string> families() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("test/fixtures")) {
    if (std::filesystem::exists(entry.path() / "expected.safetensors")) names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class Family : public testing::TestWithParam<std::string> {};

TEST_P(Family, loss_logits_and_every_gradient_equal_transformers) {
  const SafetensorsFile expected(fixture_path(GetParam()) / "expected.safetensors");
  const Batch batch = read_batch(expected);
  const auto model = TestModel::load(fixture_path(GetParam()), options_for(batch));
  const int64_t V = model->config().vocab_size;
  HostTensor logits(DType::F32, {batch.size(), V}, "logits");

  const double loss = model->run({batch}, logits);
  const double expected_loss = read_tensor(expected, "loss").get(0);
  EXPECT_NEAR(loss, expected_loss, 1e-5 * expected_loss);

  const HostTensor expected_logits = read_tensor(expected, "logits");
  double difference = 0, norm = 0;
  for (int64_t t = 0; t < batch.size(); t++) {
    if (batch.document_ids[static_cast<size_t>(t)] < 0) continue;
    for (int64_t v = 0; v < V; v++) {
      const double e = expected_logits.get(t * V + v), d = logits.get(t * V + v) - e;
      difference += d * d, norm += e * e;
    }
  }
  EXPECT_LE(std::sqrt(difference / norm), 1e-4);

  const auto gradients = model->gradients();
  int64_t compared = 0;
  for (const auto& [name, info] : expected.tensors()) {
    if (!name.starts_with("grad/")) continue;
    const auto found = gradients.find(name.substr(5));
    ASSERT_NE(found, gradients.end()) << name;
    EXPECT_LE(relative_l2(found->second, read_tensor(expected, name)), 1e-4) << name;
    compared++;
  }
  EXPECT_EQ(compared, static_cast<int64_t>(gradients.size()));
}

// A step h moves the loss by h * gradient: central differences in F64, at evenly spread elements of every tensor.
TEST_P(Family, whole_model_gradients_equal_central_differences) {
  const Batch batch = read_batch(SafetensorsFile(fixture_path(GetParam()) / "expected.safetensors"));
  const auto model = TestModel::load(fixture_path(GetParam()), options_for(batch, DType::F64));
  model->run({batch});
  const auto gradients = model->gradients();
  double scale = 0;
  for (const auto& [name, gradient] : gradients) {
    for (int64_t i = 0; i < gradient.numel(); i++) scale = std::max(scale, std::abs(gradient.get(i)));
  }
  const auto loss = [&] {
    double balance = 0;
    if (model->config().moe.balance_coef > 0) {
      model->llama().forward(batch, model->params());
      model->llama().router_load()->balance_slope(1, batch.num_tokens);
      balance = model->llama().router_load()->take().balance_loss;
    }
    model->llama().evaluate(batch, model->params());
    return model->llama().take_nll() / static_cast<double>(batch.num_loss_tokens) + balance;
  };
  constexpr size_t kManyPieces = 60;
  const int64_t elements = model->pieces().size() > kManyPieces ? 1 : 5;
  for (const ShardPiece& piece : model->pieces()) {
    // The lookup of the pad token has no gradient by definition: there the loss does move.
    const bool has_pad = piece.disk->hf_name == model->config().names.embedding() && model->config().pad_token_id >= 0;
    const int64_t C = model->config().hidden_size;
    double* weights = piece_of(model->params().param_shard(piece.unit), piece).as<double>();
    const int64_t stride = std::max<int64_t>(1, piece.count / elements);
    for (int64_t i = 0; i < piece.count; i += stride) {
      if (has_pad && i / C == model->config().pad_token_id) continue;
      const double w = weights[i], h = 1e-5 * std::max(1.0, std::abs(w));
      weights[i] = w + h;
      const double up = loss();
      weights[i] = w - h;
      const double down = loss();
      weights[i] = w;
      EXPECT_NEAR(gradients.at(piece.disk->hf_name).get(i), (up - down) / (2 * h), 1e-6 * scale)
          << piece.disk->hf_name << "[" << i << "]";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Family, testing::ValuesIn(families()), [](const auto& test) { return test.param; });

}  // namespace
