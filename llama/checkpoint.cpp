#include "llama/checkpoint.h"

#include <algorithm>
#include <optional>

#include "llama/through_host.h"

namespace {

constexpr const char* kMoments[] = {"exp_avg", "exp_avg_sq"};

Tensor moment_shard(AdamW& adamw, const char* moment, size_t unit) {
  return moment == kMoments[0] ? adamw.exp_avg(unit) : adamw.exp_avg_sq(unit);
}

std::vector<TensorToWrite> tensors_on_disk(const std::vector<ParamUnit>& units, DType dtype) {
  std::vector<TensorToWrite> tensors;
  for (const ParamUnit& unit : units) {
    for (const ParamSpec& param : unit.params) {
      for (const DiskTensor& disk : param.disk) {
        tensors.push_back({disk.hf_name, dtype, {disk.shape.begin(), disk.shape.end()}});
      }
    }
  }
  return tensors;
}

/// The files that every rank writes into: weights, then moments.
std::vector<SafetensorsWriter> open_files(const std::filesystem::path& path, const TrainState& state, bool create,
                                          const FileSystem& file_system) {
  const auto tensors = tensors_on_disk(state.units, accumulator_dtype(state.params.dtype()));
  auto weights = tensors;
  weights.insert(weights.end(), state.frozen.tensors().begin(), state.frozen.tensors().end());
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (create) file_system.create_directories(path / "optimizer");
  std::vector<SafetensorsWriter> writers;
  writers.emplace_back(path / "model.safetensors", weights, metadata, create, file_system);
  for (const char* moment : kMoments) {
    writers.emplace_back(path / "optimizer" / fmt::format("{}.safetensors", moment), tensors, metadata, create,
                         file_system);
  }
  return writers;
}

void write_shards(std::vector<SafetensorsWriter>& writers, TrainState& state) {
  const auto pieces = shard_pieces(state.units, state.params);
  for (size_t file = 0; file < writers.size(); file++) {
    for (const ShardPiece& piece : pieces) {
      const Tensor shard =
          file == 0 ? state.params.master_shard(piece.unit) : moment_shard(state.adamw, kMoments[file - 1], piece.unit);
      read_through_host(state.params.device(), piece_of(shard, piece), [&](ConstTensor from, int64_t first) {
        writers[file].write(piece.disk->hf_name, piece.begin + first, from.numel(), from.dtype, from.data);
      });
    }
    writers[file].finish();
  }
}

}  // namespace

void save_checkpoint(const std::filesystem::path& dir, TrainState& state, const ModelConfig& model,
                     const CompanionFiles& companions, const TrainerState& trainer, Mesh& mesh,
                     const FileSystem& file_system) {
  const bool is_first = mesh.world().rank() == 0;
  std::optional<PendingCheckpoint> save;
  std::vector<SafetensorsWriter> writers;
  if (is_first) {
    save.emplace(dir, trainer.step, file_system);
    save->write_files(companions);
    save->write_file("config.json", config_to_save(model, "float32").dump(2) + "\n");
    writers = open_files(save->path(), state, true, file_system);
  }
  mesh.world().barrier();
  if (!is_first && mesh.replica() == 0) {
    writers = open_files(pending_checkpoint_path(dir, trainer.step), state, false, file_system);
  }
  if (is_first) state.frozen.write(writers.front());
  write_shards(writers, state);
  mesh.world().barrier();
  if (is_first) save->commit(trainer);
  mesh.world().barrier();
}

void load_checkpoint(const Checkpoint& checkpoint, TrainState& state, const ModelConfig& model,
                     const LoadProgress& progress) {
  // Each moment has as many bytes as the weights.
  const auto pieces = shard_pieces(state.units, state.params);
  int64_t loaded = 0, part = 0;
  const auto size = static_cast<int64_t>(size_of(accumulator_dtype(state.params.dtype())));
  for (const ShardPiece& piece : pieces) part += piece.count * size;
  const auto report = [&](int64_t bytes) {
    loaded += bytes;
    if (progress) progress(loaded, part * 3);
  };
  SafetensorsDirectory weights(checkpoint.path);
  load_weights(state.params, model, state.units, weights, [&](int64_t done, int64_t) { report(done - loaded); });
  state.frozen.load(std::move(weights), state.llama);
  for (const char* moment : kMoments) {
    const SafetensorsDirectory directory(checkpoint.path / "optimizer", moment);
    for (const ShardPiece& piece : pieces) {
      const std::string& name = piece.disk->hf_name;
      const std::vector<int64_t> shape(piece.disk->shape.begin(), piece.disk->shape.end());
      CHECK(directory.contains(name) && directory.info(name).shape == shape,
            "{}: {} of {} is missing or has another shape than the weight, {}; the checkpoint is of another model",
            checkpoint.path.string(), moment, name, piece.disk->shape.str());
      const Tensor all = piece_of(moment_shard(state.adamw, moment, piece.unit), piece);
      write_through_host(state.params.device(), all, [&](Tensor to, int64_t first) {
        directory.read(name, piece.begin + first, to.numel(), to.dtype, to.data);
        report(static_cast<int64_t>(to.size_bytes()));
      });
    }
  }
}
