#include "llama/checkpoint.h"

#include <algorithm>

namespace {

constexpr const char* kMoments[] = {"exp_avg", "exp_avg_sq"};

Tensor moment_shard(AdamW& adamw, const char* moment, size_t unit) {
  return moment == kMoments[0] ? adamw.exp_avg(unit) : adamw.exp_avg_sq(unit);
}

/// Writes one file with a tensor for every disk tensor of the model; `shard(u)` is this rank's part of unit u.
void write_tensors(const std::filesystem::path& path, const std::vector<ParamUnit>& units,
                   const std::vector<ShardPiece>& pieces, const std::function<Tensor(size_t)>& shard, DType dtype,
                   const FileSystem& file_system) {
  std::vector<TensorToWrite> tensors;
  for (const ParamUnit& unit : units) {
    for (const ParamSpec& param : unit.params) {
      for (const DiskTensor& disk : param.disk) {
        tensors.push_back({disk.hf_name, dtype, {disk.shape.begin(), disk.shape.end()}});
      }
    }
  }
  SafetensorsWriter writer(path, std::move(tensors), {{"format", "pt"}}, true, file_system);
  for (const ShardPiece& piece : pieces) {
    const Tensor from = piece_of(shard(piece.unit), piece);
    writer.write(piece.disk->hf_name, piece.begin, piece.count, from.dtype, from.data);
  }
  writer.finish();
}

}  // namespace

void save_checkpoint(const std::filesystem::path& dir, TrainState& state, const ModelConfig& model,
                     const CompanionFiles& companions, const TrainerState& trainer, const FileSystem& file_system) {
  PendingCheckpoint save(dir, trainer.step, file_system);
  save.write_files(companions);
  save.write_file("config.json", config_to_save(model, "float32").dump(2) + "\n");
  const auto pieces = shard_pieces(state.units, state.params);
  const DType dtype = state.params.dtype();
  write_tensors(
      save.path() / "model.safetensors", state.units, pieces, [&](size_t u) { return state.params.param_shard(u); },
      dtype, file_system);
  file_system.create_directories(save.path() / "optimizer");
  for (const char* moment : kMoments) {
    write_tensors(
        save.path() / "optimizer" / fmt::format("{}.safetensors", moment), state.units, pieces,
        [&](size_t u) { return moment_shard(state.adamw, moment, u); }, dtype, file_system);
  }
  save.commit(trainer);
}

void load_checkpoint(const Checkpoint& checkpoint, TrainState& state, const ModelConfig& model,
                     const LoadProgress& progress) {
  // Each moment has as many bytes as the weights.
  const auto pieces = shard_pieces(state.units, state.params);
  int64_t loaded = 0, part = 0;
  for (const ShardPiece& piece : pieces) part += piece.count * static_cast<int64_t>(size_of(state.params.dtype()));
  const auto report = [&](int64_t bytes) {
    loaded += bytes;
    if (progress) progress(loaded, part * 3);
  };
  load_weights(state.params, model, state.units, SafetensorsDirectory(checkpoint.path),
               [&](int64_t done, int64_t) { report(done - loaded); });
  for (const char* moment : kMoments) {
    const SafetensorsDirectory directory(checkpoint.path / "optimizer", moment);
    for (const ShardPiece& piece : pieces) {
      const std::string& name = piece.disk->hf_name;
      const std::vector<int64_t> shape(piece.disk->shape.begin(), piece.disk->shape.end());
      CHECK(directory.contains(name) && directory.info(name).shape == shape,
            "{}: {} of {} is missing or has another shape than the weight, {}; the checkpoint is of another model",
            checkpoint.path.string(), moment, name, piece.disk->shape.str());
      const Tensor to = piece_of(moment_shard(state.adamw, moment, piece.unit), piece);
      directory.read(name, piece.begin, piece.count, to.dtype, to.data);
      report(static_cast<int64_t>(to.size_bytes()));
    }
  }
}
