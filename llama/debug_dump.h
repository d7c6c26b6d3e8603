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
#include "data/safetensors.h"
#include "llama/plan.h"

/// The global batch of a step, and the logits that this rank computes of it.
class DumpedBatch {
 public:
  DumpedBatch(Batch global_batch, int64_t vocab_size, bool with_logits, Device& device)
      : global_batch_(std::move(global_batch)), vocab_size_(vocab_size), with_logits_(with_logits), device_(device) {}
  DumpedBatch(const DumpedBatch&) = delete;
  ~DumpedBatch();

  /// Where the logits (T, V) F32 of this rank's slice of a micro-batch go; null unless asked for. `rows`: those of the
  /// global batch that the micro-batch has; `first_token`: the slice's, in the flattened micro-batch.
  Tensor add(const Batch& slice, const std::vector<int64_t>& rows, int64_t first_token);

  bool has_logits() const { return with_logits_; }
  const Batch& global_batch() const { return global_batch_; }

  /// [rows, T, V] from all that was added.
  void write_logits(SafetensorsWriter& writer) const;

 private:
  struct Part {
    std::vector<int64_t> rows;
    int64_t row_len, first_token;
    Tensor logits;  // in the memory of the device
  };
  Batch global_batch_;
  int64_t vocab_size_;
  bool with_logits_;
  Device& device_;
  std::vector<Part> parts_;
};

/// Writes `directory`/step_NNNNNN.safetensors, after the update of `step` (counted from 1). All ranks call it: rank 0
/// makes the file, each rank writes what it has.
void write_dump(const std::filesystem::path& directory, int64_t step, double loss, double grad_norm, TrainState& state,
                const DumpedBatch& batch, Mesh& mesh);
