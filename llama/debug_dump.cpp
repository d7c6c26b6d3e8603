#include "llama/debug_dump.h"

#include <algorithm>
#include <optional>

#include "llama/through_host.h"
#include "llama/weights.h"

Tensor DumpedBatch::add(const Batch& slice, const std::vector<int64_t>& rows, int64_t first_token) {
  if (!with_logits_) return {};
  Tensor logits = {nullptr, DType::F32, {slice.size(), vocab_size_}, "dumped logits"};
  logits.data = device_.allocate(logits.size_bytes());
  parts_.push_back({rows, slice.row_len, first_token, logits});
  return logits;
}

DumpedBatch::~DumpedBatch() {
  for (const Part& part : parts_) device_.deallocate(part.logits.data, part.logits.size_bytes());
}

void DumpedBatch::write_logits(SafetensorsWriter& writer) const {
  for (const Part& part : parts_) {
    const int64_t T = part.logits.shape[0];
    for (int64_t t = 0; t < T;) {  // the rest of a row at a time
      const int64_t in_batch = part.first_token + t, in_row = in_batch % part.row_len;
      const int64_t n = std::min(T - t, part.row_len - in_row);
      const auto row = static_cast<size_t>(in_batch / part.row_len);
      if (row < part.rows.size()) {  // not the padding of a rank without rows
        const int64_t to = part.rows[row] * global_batch_.row_len + in_row;
        const Tensor piece = part.logits.rows(t, n).reshaped({n * vocab_size_});
        read_through_host(device_, piece, [&](ConstTensor from, int64_t first) {
          writer.write("logits", to * vocab_size_ + first, from.numel(), from.dtype, from.data);
        });
      }
      t += n;
    }
  }
}

namespace {

std::vector<TensorToWrite> tensors_of(const TrainState& state, const DumpedBatch& batch) {
  const Batch& g = batch.global_batch();
  std::vector<TensorToWrite> tensors = {{"loss", DType::F32, {1}}, {"grad_norm", DType::F32, {1}}};
  for (const char* name : {"input_ids", "targets", "positions", "document_ids"}) {
    tensors.push_back({std::string("batch/") + name, DType::I32, {g.rows, g.row_len}});
  }
  if (batch.has_logits()) {
    tensors.push_back({"logits", DType::F32, {g.rows, g.row_len, state.llama.config().vocab_size}});
  }
  for (const ParamUnit& unit : state.units) {
    for (const ParamSpec& param : unit.params) {
      for (const DiskTensor& disk : param.disk) {
        const std::vector<int64_t> shape(disk.shape.begin(), disk.shape.end());
        tensors.push_back({"grad/" + disk.hf_name, DType::F32, shape});
        tensors.push_back({"param/" + disk.hf_name, DType::F32, shape});
      }
    }
  }
  return tensors;
}

}  // namespace

void write_dump(const std::filesystem::path& directory, int64_t step, double loss, double grad_norm, TrainState& state,
                const DumpedBatch& batch, Mesh& mesh) {
  const std::filesystem::path path = directory / fmt::format("step_{:06}.safetensors", step);
  const auto tensors = tensors_of(state, batch);
  const Batch& g = batch.global_batch();
  const bool is_first = mesh.world().rank() == 0;
  std::optional<SafetensorsWriter> writer;
  if (is_first) {
    std::filesystem::create_directories(directory);
    writer.emplace(path, tensors);
    writer->write("loss", 0, 1, DType::F64, &loss);
    writer->write("grad_norm", 0, 1, DType::F64, &grad_norm);
    writer->write("batch/input_ids", 0, g.size(), DType::I32, g.tokens.data());
    writer->write("batch/targets", 0, g.size(), DType::I32, g.targets.data());
    writer->write("batch/positions", 0, g.size(), DType::I32, g.positions.data());
    writer->write("batch/document_ids", 0, g.size(), DType::I32, g.document_ids.data());
  }
  mesh.world().barrier();
  if (!is_first) writer.emplace(path, tensors, std::map<std::string, std::string>{}, false);
  batch.write_logits(*writer);
  if (mesh.replica() == 0) {
    for (const ShardPiece& piece : shard_pieces(state.units, state.params)) {
      const auto write = [&](const char* kind, Tensor shard) {
        read_through_host(state.params.device(), piece_of(shard, piece), [&](ConstTensor from, int64_t first) {
          writer->write(kind + piece.disk->hf_name, piece.begin + first, from.numel(), from.dtype, from.data);
        });
      };
      write("grad/", state.params.grad_shard(piece.unit));
      write("param/", state.params.master_shard(piece.unit));
    }
  }
  writer->finish();
  mesh.world().barrier();
}
