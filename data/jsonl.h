// JSONL: one document a line, {"input_ids": [...], "labels": [...]}. A strict parser for exactly that, because the
// lines are nearly all digits and there are millions of them. The format is described in FORMAT.md.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "data/document_index.h"

struct JsonlDocument {
  std::vector<int32_t> input_ids;
  std::vector<int32_t> labels;  ///< as many as input_ids, or none when has_labels is false
  bool has_labels = false;

  int64_t num_tokens() const { return static_cast<int64_t>(input_ids.size()); }
  /// Labels that are somebody's target: all but the first, but for those that are masked.
  int64_t num_loss_tokens() const;
};

/// Parses one line (without its newline) into `out`, whose memory is reused. An Error says column, fault and remedy;
/// the caller adds file and line.
void parse_jsonl_line(std::string_view line, JsonlDocument& out);

/// Reads the whole file and adds its documents. Blank lines are skipped. Several threads parse.
void index_jsonl(const InputFile& file, IndexWriter& writer, const DataProgress& progress);

/// The line (from 1) that holds byte `offset`.
int64_t line_number(const InputFile& file, int64_t offset);
