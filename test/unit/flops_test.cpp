#include "llama/flops.h"

#include <gtest/gtest.h>

#include "layers/core/check.h"

namespace {

/// One row of documents of these lengths; negative: padding.
Batch batch_of(const std::vector<int64_t>& lengths) {
  Batch batch;
  batch.rows = 1;
  batch.cu_seqlens = {0};
  for (const int64_t n : lengths) {
    const auto document = static_cast<int32_t>(batch.cu_seqlens.size() - 1);
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + std::abs(n));
    batch.document_ids.insert(batch.document_ids.end(), static_cast<size_t>(std::abs(n)), n < 0 ? -1 : document);
    if (n > 0) batch.num_tokens += n;
  }
  batch.row_len = batch.cu_seqlens.back();
  batch.num_loss_tokens = batch.num_tokens;
  return batch;
}

/// 6 layers, width 384, 6 heads, 2 kv heads of 64, ffn 1024, vocabulary 8192.
ModelConfig small_llama() {
  ModelConfig m;
  m.vocab_size = 8192, m.hidden_size = 384, m.intermediate_size = 1024, m.num_layers = 6;
  m.num_heads = 6, m.num_kv_heads = 2, m.head_dim = 64;
  m.layers.resize(6);
  return m;
}

LayerConfig with_window(int64_t window) {
  LayerConfig layer;
  layer.window = window;
  return layer;
}
LayerConfig with_chunk(int64_t chunk) {
  LayerConfig layer;
  layer.chunk = chunk;
  return layer;
}

int64_t counted_pairs(const Batch& batch, const LayerConfig& layer) {
  int64_t pairs = 0;
  for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); s++) {
    const int64_t begin = batch.cu_seqlens[s], length = batch.cu_seqlens[s + 1] - begin;
    if (batch.document_ids[static_cast<size_t>(begin)] < 0) continue;
    for (int64_t i = 0; i < length; i++) {
      for (int64_t j = 0; j <= i; j++) {
        pairs +=
            (layer.window == 0 || i - j < layer.window) && (layer.chunk == 0 || i / layer.chunk == j / layer.chunk);
      }
    }
  }
  return pairs;
}

TEST(Flops, pairs_equal_the_mask_counted_one_by_one) {
  for (const auto& lengths : {std::vector<int64_t>{1}, {5}, {3, 1, 7, -2}, {-4}, {16, 16, 1, -31}}) {
    const Batch batch = batch_of(lengths);
    for (const int64_t window : {0, 1, 2, 3, 5, 7, 8, 100}) {
      for (const LayerConfig& layer : {with_window(window), with_chunk(window)}) {
        EXPECT_EQ(visible_pairs(batch, layer), counted_pairs(batch, layer)) << layer.window << " " << layer.chunk;
      }
    }
  }
}

TEST(Flops, a_small_llama_takes_82_6_megaflops_a_token) {
  // 12582912 weights that multiply a token, so 6 x that = 75.50 M; attention 6 layers x 12 x 384 x 513 / 2 = 7.09 M.
  const double flops = batch_flops(small_llama(), batch_of({512}));
  EXPECT_EQ(flops, 512 * (6.0 * 12582912 + 6 * 12 * 384 * 513 / 2.0));
  EXPECT_NEAR(flops / 512, 82.6e6, 0.05e6);
}

TEST(Flops, only_what_trains_counts) {
  const ModelConfig model = small_llama();
  const double whole = batch_flops(model, batch_of({512}));
  EXPECT_EQ(batch_flops(model, batch_of({512, -100})), whole) << "padding is free";
  Batch masked = batch_of({512});
  masked.num_loss_tokens = 100;
  EXPECT_EQ(whole - batch_flops(model, masked), 6.0 * 384 * 8192 * 412) << "rows without a target skip the head";
  // Documents that do not see each other: 2 (256 x 257 / 2) pairs instead of 512 x 513 / 2.
  EXPECT_EQ(whole - batch_flops(model, batch_of({256, 256})), 6.0 * 12 * 384 * (512 * 513 / 2 - 256 * 257));
  ModelConfig tied = model;
  tied.tie_word_embeddings = true;
  EXPECT_EQ(batch_flops(tied, batch_of({512})), whole) << "a tied head multiplies like any other";
}

TEST(Flops, each_layer_has_its_mask) {
  ModelConfig model = small_llama();
  const Batch batch = batch_of({300, 200, -12});
  double expected = batch_flops(model, batch) - 6 * 12.0 * 384 * visible_pairs(batch, LayerConfig{});
  const LayerConfig layers[] = {with_window(64), with_window(64), {}, with_chunk(64), with_chunk(7), {}};
  for (size_t l = 0; l < 6; l++) {
    model.layers[l] = layers[l];
    expected += 12.0 * 384 * visible_pairs(batch, model.layers[l]);
  }
  EXPECT_EQ(batch_flops(model, batch), expected);
}

TEST(Flops, long_documents_do_not_overflow) {
  Batch batch;
  batch.cu_seqlens = {0, int64_t{1} << 33};
  batch.document_ids = {0};
  EXPECT_DOUBLE_EQ(visible_pairs(batch, LayerConfig{}), 0x1p65 + 0x1p32);
}

TEST(Flops, a_model_without_its_layers_is_refused) {
  ModelConfig model = small_llama();
  model.layers.pop_back();
  EXPECT_THROW(batch_flops(model, batch_of({4})), Error);
}

}  // namespace
