#include "llama/flops.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "layers/core/check.h"

namespace {

/// The documents of a batch, without its padding.
std::vector<int64_t> lengths_of(const Batch& batch) {
  std::vector<int64_t> lengths;
  for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); s++) {
    const int64_t begin = batch.cu_seqlens[s];
    const bool is_padding = batch.document_ids.at(static_cast<size_t>(begin)) < 0;
    if (!is_padding) lengths.push_back(batch.cu_seqlens[s + 1] - begin);
  }
  return lengths;
}

/// Of a document of n tokens: token i sees min(i + 1, w) tokens. A triangle of w rows, then a band.
double visible_pairs(int64_t n, int64_t window) {
  const auto w = static_cast<double>(window > 0 ? std::min(window, n) : n);
  return w * (w + 1) / 2 + (static_cast<double>(n) - w) * w;
}

double visible_pairs(std::span<const int64_t> document_lengths, const LayerConfig& layer) {
  double pairs = 0;
  for (const int64_t n : document_lengths) {
    const int64_t chunk = layer.chunk > 0 ? layer.chunk : n;
    pairs +=
        static_cast<double>(n / chunk) * visible_pairs(chunk, layer.window) + visible_pairs(n % chunk, layer.window);
  }
  return pairs;
}

double flops_of(const ModelConfig& model, std::span<const int64_t> document_lengths, int64_t num_tokens,
                int64_t num_loss_tokens) {
  CHECK(model.layers.size() == static_cast<size_t>(model.num_layers), "flops of a model: {} layers of {}",
        model.layers.size(), model.num_layers);
  const auto C = static_cast<double>(model.hidden_size), F = static_cast<double>(model.intermediate_size);
  const auto V = static_cast<double>(model.vocab_size);
  const auto q_dim = static_cast<double>(model.q_dim()), qkv_dim = static_cast<double>(model.qkv_dim());
  const MoeConfig& moe = model.moe;
  const auto E = static_cast<double>(moe.router.num_experts), k = static_cast<double>(moe.router.top_k);
  const auto expert = static_cast<double>(moe.intermediate_size),
             shared = static_cast<double>(moe.shared_intermediate_size);
  const double moe_weights = C * E + 3 * C * (k * expert + shared) + (moe.has_shared_gate ? C : 0);
  const MlaConfig& mla = model.mla;
  const auto NH = static_cast<double>(model.num_heads), o_dim = static_cast<double>(model.o_dim());
  double attention_weights = C * qkv_dim + q_dim * C;
  if (mla) {
    const auto LQ = static_cast<double>(mla.q_lora_rank), LK = static_cast<double>(mla.kv_lora_rank);
    const double of_q = LQ > 0 ? LQ * (C + q_dim) : C * q_dim;
    attention_weights =
        of_q + C * (LK + static_cast<double>(mla.rope)) + LK * NH * static_cast<double>(mla.nope + mla.v) + o_dim * C;
  }
  double weights = 0;
  for (const LayerConfig& layer : model.layers) {
    weights += attention_weights + (layer.is_moe ? moe_weights : 3 * C * F);
  }
  double flops = 6 * weights * static_cast<double>(num_tokens) + 6 * C * V * static_cast<double>(num_loss_tokens);
  const LayerConfig* last = nullptr;
  double pairs = 0;
  for (const LayerConfig& layer : model.layers) {  // masks come in long runs: count each run's pairs once
    if (!last || layer.window != last->window || layer.chunk != last->chunk) {
      pairs = visible_pairs(document_lengths, layer);
    }
    last = &layer;
    flops += 6 * (q_dim + o_dim) * pairs;
  }
  return flops;
}

}  // namespace

double visible_pairs(const Batch& batch, const LayerConfig& layer) {
  return visible_pairs(lengths_of(batch), layer);
}

double batch_flops(const ModelConfig& model, const Batch& batch) {
  return flops_of(model, lengths_of(batch), batch.num_tokens, batch.num_loss_tokens);
}

double row_flops(const ModelConfig& model, std::span<const int64_t> document_lengths) {
  const int64_t n = std::accumulate(document_lengths.begin(), document_lengths.end(), int64_t{0});
  return flops_of(model, document_lengths, n, n);
}
