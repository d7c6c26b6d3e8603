#include "llama/validate.h"

#include <algorithm>

namespace {

/// How to go beyond the positions that a model was trained for.
std::string rope_advice(const ModelConfig& model, int64_t seq_len) {
  if (model.ropes.empty()) return "";
  const RopeConfig& rope = model.ropes.front();
  const double factor = static_cast<double>(seq_len) / static_cast<double>(model.max_position_embeddings);
  if (rope.type == "default") {
    return fmt::format(
        "; to extend it set in config.json \"rope_scaling\": {{\"rope_type\": \"yarn\", \"factor\": {:.1f}, "
        "\"original_max_position_embeddings\": {}}}",
        factor, model.max_position_embeddings);
  }
  return fmt::format("; its RoPE scaling is {}, see its factor and max_position_embeddings in config.json", rope.type);
}

}  // namespace

void validate(const RunConfig& run, const ModelConfig& model, const Communicator& world, Console& console) {
  CHECK(world.size() == 1, "mpirun started {} ranks, but this version trains on one rank; start it without mpirun",
        world.size());
  CHECK(run.train.dtype != "bf16", "train.dtype bf16 needs the CUDA device; on the CPU use fp32 (or auto)");
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

Device open_device(const RunConfig& run, Console& console) {
  const int gpus = cuda_device_count();
  if (run.train.device == "cuda") {
    Device device = Device::cuda(0);
    fail("train.device cuda: {} is here, but in this version only RMSNorm has its CUDA kernels; use --train.device cpu",
         device.name());
  }
  if (run.train.device == "auto" && gpus > 0) {
    console.info("{} GPU(s) found, but in this version only RMSNorm has its CUDA kernels: training on the CPU", gpus);
  }
  return Device::cpu();
}
