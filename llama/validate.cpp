#include "llama/validate.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "llama/block.h"
#include "llama/family.h"

namespace {

/// How to go beyond the positions that a model was trained for.
std::string rope_advice(const ModelConfig& model, int64_t seq_len) {
  const double factor = static_cast<double>(seq_len) / static_cast<double>(model.max_position_embeddings);
  if (!model.ropes.empty() && model.ropes.front().type == "default") {
    nlohmann::json scaling = {{"rope_type", "yarn"},
                              {"rope_theta", model.ropes.front().theta},
                              {"factor", std::ceil(10 * factor) / 10},
                              {"original_max_position_embeddings", model.max_position_embeddings}};
    scaling.update(model.ropes.front().mrope);
    nlohmann::json hf = model.hf;
    text_part(model, hf)["rope_scaling"] = scaling;
    try {
      parse_model_config(hf, "");  // a family that has no yarn gets no such advice
      const char* where = &text_part(model, hf) == &hf ? "config.json" : "text_config of config.json";
      return fmt::format("; to extend it set in {} \"rope_scaling\": {}", where, scaling.dump());
    } catch (const Error&) {
    }
  }
  return "; see rope_scaling and max_position_embeddings in its config.json";
}

/// Ulysses deals heads to the ranks of a sequence group.
void validate_heads(const ModelConfig& model, const MeshShape& mesh) {
  std::vector<int64_t> legal;
  for (int64_t sp = 1; sp <= model.num_heads; sp++) {
    if (ulysses_shape(model, sp).is_legal()) legal.push_back(sp);
  }
  CHECK(ulysses_shape(model, mesh.sp).is_legal(),
        "parallel.sp_size = {} cannot split the {} query and {} key/value heads of this {}: use {}", mesh.sp,
        model.num_heads, model.num_kv_heads, model.model_type, fmt::join(legal, ", "));
}

}  // namespace

void validate(const RunConfig& run, const ModelConfig& model, const MeshShape& mesh, Console& console) {
  validate_heads(model, mesh);
  const int64_t rows = run.batch.micro_batch_size * mesh.data_parallel();
  CHECK(run.batch.global_batch_size % rows == 0,
        "batch.global_batch_size = {} is not a multiple of batch.micro_batch_size = {} x {} data-parallel groups ({} "
        "ranks / sp_size {})",
        run.batch.global_batch_size, run.batch.micro_batch_size, mesh.data_parallel(), mesh.world, mesh.sp);
  constexpr int64_t kMost = int64_t{1} << 40;
  CHECK(run.batch.micro_batch_size <= kMost / run.data.seq_len && run.train.steps.value_or(0) <= kMost &&
            run.batch.global_batch_size <= kMost / std::max<int64_t>(1, run.train.steps.value_or(1)),
        "batch.micro_batch_size = {} rows of data.seq_len = {}, or train.steps = {} of batch.global_batch_size = {}: "
        "more "
        "than 2^40 tokens or rows are surely a slip",
        run.batch.micro_batch_size, run.data.seq_len, run.train.steps.value_or(0), run.batch.global_batch_size);
  std::error_code ignored;
  CHECK(run.model.init != "pretrained" || std::filesystem::is_directory(run.model.path, ignored),
        "model.path '{}' is a file, but model.init pretrained needs weights: give the checkpoint directory, or set "
        "model.init to random",
        run.model.path);
  if (model.has_vision) {
    CHECK(run.model.init == "pretrained",
          "model.init random: a {} is trained from a checkpoint, of which what sees is kept; to train its text part "
          "from random weights give a config.json of model_type {} with the keys of text_config",
          model.model_type, find_family(model.model_type)->vision->text_family);
  }
  CHECK(run.train.dtype != "bf16" || run.train.device == "cuda",
        "train.dtype bf16 needs the CUDA device; on the CPU use fp32 (or auto)");
  CHECK(run.memory.offload == "none" || run.train.device == "cuda",
        "memory.offload = {} is for the CUDA device: on the CPU the block inputs are in the host's memory already",
        run.memory.offload);
  for (const auto* sources : {&run.data.train, &run.data.eval}) {
    for (const SourceConfig& source : *sources) {
      const bool is_text = run.data.format == "bytes" || (run.data.format == "auto" && source.path.ends_with(".txt"));
      CHECK(!is_text || model.vocab_size >= 256,
            "{}: plain text is read as bytes, which need a vocabulary of at least 256; {} has {}", source.path,
            run.model.path, model.vocab_size);
    }
  }
  if (run.data.seq_len > model.max_position_embeddings) {
    console.warning(
        "data.seq_len = {} is more than the {} positions that the model was made for "
        "(max_position_embeddings){}",
        run.data.seq_len, model.max_position_embeddings, rope_advice(model, run.data.seq_len));
  }
}

void resolve_device(RunConfig& run) {
  if (run.train.device == "auto") run.train.device = cuda_device_count() > 0 ? "cuda" : "cpu";
  if (run.train.dtype == "auto") run.train.dtype = run.train.device == "cuda" ? "bf16" : "fp32";
}

Device open_device(const RunConfig& run, int rank_on_host) {
  const DeviceKind kind = run.train.device == "cuda" ? DeviceKind::Cuda : DeviceKind::Cpu;
  if (run.plan) return Device::planned(kind);
  if (kind == DeviceKind::Cpu) return Device::cpu();
  const int gpus = std::max(1, cuda_device_count());  // where there is none, the error says it
  return Device::cuda(rank_on_host % gpus);
}
