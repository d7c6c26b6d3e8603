// Tensors of a checkpoint that are not trained, and are in every saved checkpoint as they came, byte for byte: the bias
// by which a router chooses (DeepSeek-V3, GLM-4-MoE), which the forward reads; what sees of a vision-language model.
#pragma once

#include <optional>
#include <vector>

#include "data/safetensors.h"
#include "llama/config.h"

class Llama;

/// Names and shapes of those that a model of this config has.
std::vector<TensorToWrite> frozen_tensors(const ModelConfig& config);

class FrozenTensors {
 public:
  /// All zero: a model that is drawn at random, which has no vision (validate.cpp).
  explicit FrozenTensors(const ModelConfig& config);
  /// From a checkpoint, into the model too. Its files stay open: they may be removed while the run goes on.
  void load(SafetensorsDirectory directory, Llama& llama);

  const std::vector<TensorToWrite>& tensors() const { return tensors_; }
  void write(SafetensorsWriter& writer) const;

 private:
  const ModelConfig& config_;
  std::vector<TensorToWrite> tensors_;
  std::optional<SafetensorsDirectory> source_;
};
