#include "data/batch.h"

#include <algorithm>

#include "layers/core/check.h"

Batch slice_of(const Batch& batch, int part, int parts) {
  const int64_t T = batch.size();
  CHECK(parts >= 1 && part >= 0 && part < parts && T % parts == 0, "part {} of {} of a batch of {} tokens", part, parts,
        T);
  const int64_t begin = T / parts * part, end = begin + T / parts;
  const auto cut = [&](const std::vector<int32_t>& all) {
    return std::vector<int32_t>(all.begin() + begin, all.begin() + end);
  };
  Batch slice;
  slice.rows = batch.rows, slice.row_len = batch.row_len;
  slice.tokens = cut(batch.tokens), slice.targets = cut(batch.targets);
  slice.positions = cut(batch.positions), slice.document_ids = cut(batch.document_ids);
  slice.cu_seqlens = batch.cu_seqlens;
  slice.longest_document = batch.longest_document;
  const auto count = [](const std::vector<int32_t>& values, auto&& is_counted) {
    return static_cast<int64_t>(std::count_if(values.begin(), values.end(), is_counted));
  };
  slice.num_tokens = count(slice.document_ids, [](int32_t id) { return id >= 0; });
  slice.num_loss_tokens = count(slice.targets, [](int32_t target) { return target != kIgnoreTarget; });
  return slice;
}
