// Batch: what one micro-step computes on. Made on the host, whole, before any sharding.
#pragma once

#include <cstdint>
#include <vector>

constexpr int32_t kIgnoreTarget = -100;  ///< no loss at this position (PyTorch's ignore_index)

/// `rows` rows of `row_len` tokens, flattened: T = rows * row_len. Several documents share a row; they never see each
/// other. A row is padded at its end: token pad, target -100, positions that go on, one tail entry in cu_seqlens.
struct Batch {
  int64_t rows = 0;
  int64_t row_len = 0;
  std::vector<int32_t> tokens;        ///< (T)
  std::vector<int32_t> targets;       ///< (T) the next token of the same document, or kIgnoreTarget
  std::vector<int32_t> positions;     ///< (T) restart at 0 with every document
  std::vector<int32_t> document_ids;  ///< (T) counts from 0 within each row; -1 is padding
  std::vector<int64_t> cu_seqlens;    ///< starts at 0, ends at T; documents and pad tails; no empty sequence
  int64_t longest_document = 0;       ///< tokens
  int64_t num_tokens = 0;             ///< without padding
  int64_t num_loss_tokens = 0;        ///< targets that are not kIgnoreTarget

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

/// The part of rank `part` of `parts` that share a batch (parts divides T): its tokens, targets, positions, document
/// ids and their counts. cu_seqlens and longest_document stay those of the whole batch.
Batch slice_of(const Batch& batch, int part, int parts);
