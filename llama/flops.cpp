#include "llama/flops.h"

#include <algorithm>

#include "layers/core/check.h"

double visible_pairs(const Batch& batch, int64_t window) {
  double pairs = 0;
  for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); s++) {
    const int64_t begin = batch.cu_seqlens[s], n = batch.cu_seqlens[s + 1] - begin;
    const bool is_padding = batch.document_ids.at(static_cast<size_t>(begin)) < 0;
    if (is_padding) continue;
    // Token i sees min(i + 1, w) tokens: a triangle of w rows, then a band.
    const auto w = static_cast<double>(window > 0 ? std::min(window, n) : n);
    pairs += w * (w + 1) / 2 + (static_cast<double>(n) - w) * w;
  }
  return pairs;
}

double batch_flops(const ModelConfig& model, const Batch& batch) {
  CHECK(model.layers.size() == static_cast<size_t>(model.num_layers), "batch_flops: {} layers of {}",
        model.layers.size(), model.num_layers);
  const auto C = static_cast<double>(model.hidden_size), F = static_cast<double>(model.intermediate_size);
  const auto V = static_cast<double>(model.vocab_size);
  const auto q_dim = static_cast<double>(model.q_dim()), qkv_dim = static_cast<double>(model.qkv_dim());
  const double block_weights = C * qkv_dim + q_dim * C + 3 * C * F;
  double flops = 6 * static_cast<double>(model.num_layers) * block_weights * static_cast<double>(batch.num_tokens) +
                 6 * C * V * static_cast<double>(batch.num_loss_tokens);
  int64_t last_window = -1;
  double pairs = 0;
  for (const LayerConfig& layer : model.layers) {  // windows come in long runs: count each run's pairs once
    if (layer.window != last_window) pairs = visible_pairs(batch, layer.window);
    last_window = layer.window;
    flops += 12 * q_dim * pairs;
  }
  return flops;
}
