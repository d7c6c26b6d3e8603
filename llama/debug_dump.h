// debug.dump_dir: everything about an optimizer step, so that anyone can check this trainer against any other.
//
//   step_000001.safetensors:  loss, grad_norm [1] F32;  grad/<HF name> F32, full, before clipping;
//   param/<HF name> F32, after the update;  batch/input_ids, batch/targets (-100: no loss), batch/positions,
//   batch/document_ids (-1: padding) [rows, T] I32, all rows of the global batch, T their padded length;
//   logits [rows, T, V] F32 if asked for.
#pragma once

#include <filesystem>
#include <vector>

#include "data/batch.h"
#include "llama/plan.h"

/// Collects the micro-batches of a step, and their logits if asked for.
class DumpedBatch {
 public:
  explicit DumpedBatch(int64_t vocab_size, bool with_logits) : vocab_size_(vocab_size), with_logits_(with_logits) {}

  /// Where the logits (T, V) of this micro-batch go; null unless asked for.
  Tensor add(const Batch& batch);

  bool has_logits() const { return with_logits_; }
  const std::vector<Batch>& batches() const { return batches_; }
  const std::vector<float>& logits(size_t i) const { return logits_.at(i); }

 private:
  int64_t vocab_size_;
  bool with_logits_;
  std::vector<Batch> batches_;
  std::vector<std::vector<float>> logits_;
};

/// Writes `directory`/step_NNNNNN.safetensors, after the update of `step` (counted from 1).
void write_dump(const std::filesystem::path& directory, int64_t step, double loss, double grad_norm, TrainState& state,
                const DumpedBatch& batch);
