// A whole model in a test: built from a config, with its batch, run once.
#pragma once

#include <filesystem>
#include <map>
#include <memory>

#include "llama/frozen.h"
#include "llama/model.h"
#include "llama/weights.h"
#include "test/testing.h"

inline std::filesystem::path fixture_path(const std::string& name) {
  return std::filesystem::path("test/fixtures") / name;
}

/// Reads a whole tensor, as F64 or I32.
inline HostTensor read_tensor(const SafetensorsFile& file, const std::string& name) {
  const auto found = file.tensors().find(name);
  CHECK(found != file.tensors().end(), "{} has no tensor '{}'", file.path().string(), name);
  const TensorInfo& info = found->second;
  const DType to = info.dtype == DType::I32 ? DType::I32 : DType::F64;
  HostTensor out(to, {info.numel()}, name);
  file.read(name, 0, info.numel(), to, out.view().data);
  return out;
}

/// The batch that a dump holds: (rows, T) of tokens, targets, positions and document ids.
inline Batch read_batch(const SafetensorsFile& file) {
  Batch b;
  const auto& shape = file.tensors().at("batch/input_ids").shape;
  b.rows = shape.at(0), b.row_len = shape.at(1);
  const auto copy = [&](const char* name, std::vector<int32_t>& to) {
    const HostTensor t = read_tensor(file, name);
    for (int64_t i = 0; i < t.numel(); i++) to.push_back(static_cast<int32_t>(t.get(i)));
  };
  copy("batch/input_ids", b.tokens), copy("batch/targets", b.targets);
  copy("batch/positions", b.positions), copy("batch/document_ids", b.document_ids);
  for (int64_t t = 0; t < b.size(); t++) {
    const size_t i = static_cast<size_t>(t);
    const bool starts = t % b.row_len == 0 || b.document_ids[i] != b.document_ids[i - 1];
    if (starts) b.cu_seqlens.push_back(t);
    b.num_tokens += b.document_ids[i] >= 0;
    b.num_loss_tokens += b.targets[i] != kIgnoreTarget;
    if (b.document_ids[i] >= 0) b.longest_document = std::max<int64_t>(b.longest_document, b.positions[i] + 1);
  }
  b.cu_seqlens.push_back(b.size());
  return b;
}

/// Documents, each in its own sequence, with no padding: one row.
inline Batch make_batch(const std::vector<std::vector<int32_t>>& documents) {
  Batch b;
  b.rows = 1;
  b.cu_seqlens = {0};
  for (size_t d = 0; d < documents.size(); d++) {
    for (size_t t = 0; t < documents[d].size(); t++) {
      b.tokens.push_back(documents[d][t]);
      b.targets.push_back(t + 1 < documents[d].size() ? documents[d][t + 1] : kIgnoreTarget);
      b.positions.push_back(static_cast<int32_t>(t));
      b.document_ids.push_back(static_cast<int32_t>(d));
      b.num_loss_tokens += b.targets.back() != kIgnoreTarget;
    }
    b.cu_seqlens.push_back(static_cast<int64_t>(b.tokens.size()));
    b.longest_document = std::max(b.longest_document, static_cast<int64_t>(documents[d].size()));
  }
  b.row_len = b.num_tokens = static_cast<int64_t>(b.tokens.size());
  return b;
}

inline std::vector<std::vector<int32_t>> random_documents(const std::vector<int64_t>& lengths, int64_t vocab,
                                                          uint64_t seed) {
  const Philox rng(seed, 7);
  std::vector<std::vector<int32_t>> documents;
  uint64_t i = 0;
  for (const int64_t n : lengths) {
    auto& d = documents.emplace_back();
    for (int64_t t = 0; t < n; t++) d.push_back(static_cast<int32_t>(rng.below(i++, static_cast<uint64_t>(vocab))));
  }
  return documents;
}

/// Config, arena, weights and model; `dtype` F32 or F64.
class TestModel {
 public:
  TestModel(ModelConfig config, ModelOptions options)
      : config_(std::move(config)), units_(param_units(config_)), device_(Device::cpu()) {
    Arena measure;
    build(measure, options);
    arena_ = std::make_unique<Arena>(device_, measure.peak_bytes());
    build(*arena_, options);
  }
  static std::unique_ptr<TestModel> load(const std::filesystem::path& directory, ModelOptions options) {
    auto model = std::make_unique<TestModel>(load_model_config(directory), options);
    load_weights(*model->params_, model->config_, model->units_, SafetensorsDirectory(directory));
    FrozenTensors(model->config_).load(SafetensorsDirectory(directory), *model->llama_);
    return model;
  }

  /// The loss of all batches together: sum(nll) / num_loss_tokens, and the load-balancing loss where there is one. Its
  /// gradients are in the store.
  double run(const std::vector<Batch>& batches, Tensor logits = {}) {
    int64_t n = 0;
    for (const Batch& b : batches) n += b.num_loss_tokens;
    params_->zero_grads();
    for (const Batch& b : batches) {
      llama_->forward(b, *params_);
      const MicroStep step = {1.0 / static_cast<double>(n), 1.0 / static_cast<double>(batches.size()), b.num_tokens};
      llama_->backward(b, *params_, step, logits);
    }
    const double balance = llama_->router_load() ? llama_->router_load()->take().balance_loss : 0;
    return llama_->take_nll() / static_cast<double>(n) + balance;
  }

  ParamStore& params() { return *params_; }
  Llama& llama() { return *llama_; }
  Device& device() { return device_; }
  const ModelConfig& config() const { return config_; }
  const std::vector<ParamUnit>& units() const { return units_; }
  std::vector<ShardPiece> pieces() const { return shard_pieces(units_, *params_); }

  /// Gradients by Hugging Face name.
  std::map<std::string, HostTensor> gradients() {
    std::map<std::string, HostTensor> out;
    for (const ShardPiece& piece : pieces()) {
      const Tensor from = piece_of(params_->grad_shard(piece.unit), piece);
      HostTensor to(from.dtype, {piece.count}, piece.disk->hf_name);
      std::memcpy(to.view().data, from.data, from.size_bytes());
      out.emplace(piece.disk->hf_name, std::move(to));
    }
    return out;
  }

 private:
  void build(Arena& arena, const ModelOptions& options) {
    params_ = std::make_unique<ParamStore>(arena, unit_specs(units_), options.dtype, MeshShape{}, nullptr, device_);
    llama_ = std::make_unique<Llama>(arena, config_, options, nullptr, device_);
  }

  ModelConfig config_;
  std::vector<ParamUnit> units_;
  Device device_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<ParamStore> params_;
  std::unique_ptr<Llama> llama_;
};

inline ModelOptions options_for(const Batch& batch, DType dtype = DType::F32) {
  return {.dtype = dtype, .max_tokens = batch.size(), .loss_tile_tokens = 16};
}
