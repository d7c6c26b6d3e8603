#include "llama/debug_dump.h"

#include <algorithm>

#include "llama/weights.h"

namespace {

/// Rows of all micro-batches under each other, padded to the longest: token 0, no target, positions that go on.
struct GlobalBatch {
  int64_t rows = 0, row_len = 0;
  std::vector<int32_t> tokens, targets, positions, document_ids;
};

GlobalBatch merge(const std::vector<Batch>& batches) {
  GlobalBatch g;
  for (const Batch& b : batches) g.row_len = std::max(g.row_len, b.row_len);
  for (const Batch& b : batches) {
    for (int64_t row = 0; row < b.rows; row++) {
      const int64_t first = row * b.row_len;
      const auto append = [&](std::vector<int32_t>& to, const std::vector<int32_t>& from, int32_t pad,
                              int32_t pad_step) {
        to.insert(to.end(), from.begin() + first, from.begin() + first + b.row_len);
        for (int64_t t = b.row_len; t < g.row_len; t++, pad += pad_step) to.push_back(pad);
      };
      append(g.tokens, b.tokens, 0, 0);
      append(g.targets, b.targets, kIgnoreTarget, 0);
      append(g.positions, b.positions, b.positions[static_cast<size_t>(first + b.row_len - 1)] + 1, 1);
      append(g.document_ids, b.document_ids, -1, 0);
    }
    g.rows += b.rows;
  }
  return g;
}

void write_logits(SafetensorsWriter& writer, const DumpedBatch& batch, int64_t row_len, int64_t V) {
  const std::vector<float> zeros(static_cast<size_t>(V), 0.0f);
  int64_t at = 0;
  for (size_t i = 0; i < batch.batches().size(); i++) {
    const Batch& b = batch.batches()[i];
    for (int64_t row = 0; row < b.rows; row++, at += row_len * V) {
      writer.write("logits", at, b.row_len * V, DType::F32, batch.logits(i).data() + row * b.row_len * V);
      for (int64_t t = b.row_len; t < row_len; t++) writer.write("logits", at + t * V, V, DType::F32, zeros.data());
    }
  }
}

}  // namespace

Tensor DumpedBatch::add(const Batch& batch) {
  batches_.push_back(batch);
  if (!with_logits_) return {};
  logits_.emplace_back(static_cast<size_t>(batch.size() * vocab_size_));
  return {logits_.back().data(), DType::F32, {batch.size(), vocab_size_}, "dumped logits"};
}

void write_dump(const std::filesystem::path& directory, int64_t step, double loss, double grad_norm, TrainState& state,
                const DumpedBatch& batch) {
  const int64_t V = state.llama.config().vocab_size;
  const GlobalBatch g = merge(batch.batches());
  const std::vector<int64_t> batch_shape = {g.rows, g.row_len};
  std::vector<TensorToWrite> tensors = {{"loss", DType::F32, {1}}, {"grad_norm", DType::F32, {1}}};
  for (const char* name : {"input_ids", "targets", "positions", "document_ids"}) {
    tensors.push_back({std::string("batch/") + name, DType::I32, batch_shape});
  }
  if (batch.has_logits()) tensors.push_back({"logits", DType::F32, {g.rows, g.row_len, V}});
  for (const ParamUnit& unit : state.units) {
    for (const ParamSpec& param : unit.params) {
      for (const DiskTensor& disk : param.disk) {
        const std::vector<int64_t> shape(disk.shape.begin(), disk.shape.end());
        tensors.push_back({"grad/" + disk.hf_name, DType::F32, shape});
        tensors.push_back({"param/" + disk.hf_name, DType::F32, shape});
      }
    }
  }
  std::filesystem::create_directories(directory);
  SafetensorsWriter writer(directory / fmt::format("step_{:06}.safetensors", step), tensors);
  writer.write("loss", 0, 1, DType::F64, &loss);
  writer.write("grad_norm", 0, 1, DType::F64, &grad_norm);
  const int64_t n = g.rows * g.row_len;
  writer.write("batch/input_ids", 0, n, DType::I32, g.tokens.data());
  writer.write("batch/targets", 0, n, DType::I32, g.targets.data());
  writer.write("batch/positions", 0, n, DType::I32, g.positions.data());
  writer.write("batch/document_ids", 0, n, DType::I32, g.document_ids.data());
  if (batch.has_logits()) write_logits(writer, batch, g.row_len, V);
  for (const ShardPiece& piece : shard_pieces(state.units, state.params)) {
    const Tensor grad = piece_of(state.params.grad_shard(piece.unit), piece);
    const Tensor param = piece_of(state.params.param_shard(piece.unit), piece);
    writer.write("grad/" + piece.disk->hf_name, piece.begin, piece.count, grad.dtype, grad.data);
    writer.write("param/" + piece.disk->hf_name, piece.begin, piece.count, param.dtype, param.data);
  }
  writer.finish();
}
