#include "llama/frozen.h"

#include <algorithm>

#include "llama/model.h"

namespace {

std::string select_bias_name(size_t layer, const ModelConfig& config) {
  return fmt::format("{}layers.{}.{}.e_score_correction_bias", config.names.prefix, layer, config.moe.names.router);
}

}  // namespace

std::vector<TensorToWrite> frozen_tensors(const ModelConfig& config) {
  std::vector<TensorToWrite> tensors = config.vision_tensors;
  for (size_t l = 0; config.moe.has_select_bias && l < config.layers.size(); l++) {
    if (!config.layers[l].is_moe) continue;
    tensors.push_back({select_bias_name(l, config), DType::F32, {config.moe.router.num_experts}});
  }
  return tensors;
}

FrozenTensors::FrozenTensors(const ModelConfig& config) : config_(config), tensors_(frozen_tensors(config)) {}

void FrozenTensors::load(SafetensorsDirectory directory, Llama& llama) {
  for (TensorToWrite& tensor : tensors_) {
    const TensorInfo& info = directory.info(tensor.name);
    CHECK(info.dtype, "{}: {} is {}, which cannot be kept", directory.file_of(tensor.name).string(), tensor.name,
          info.dtype_name);
    tensor.dtype = *info.dtype;
  }
  for (size_t l = 0; config_.moe.has_select_bias && l < config_.layers.size(); l++) {
    if (!config_.layers[l].is_moe) continue;
    std::vector<double> bias(static_cast<size_t>(config_.moe.router.num_experts));
    directory.read(select_bias_name(l, config_), 0, config_.moe.router.num_experts, DType::F64, bias.data());
    llama.set_select_bias(l, bias);
  }
  source_ = std::move(directory);
}

void FrozenTensors::write(SafetensorsWriter& writer) const {
  constexpr int64_t kPartBytes = int64_t{16} << 20;
  std::vector<char> part(static_cast<size_t>(kPartBytes));
  for (const TensorToWrite& tensor : tensors_) {
    int64_t numel = 1;
    for (const int64_t n : tensor.shape) numel *= n;
    const int64_t step = kPartBytes / static_cast<int64_t>(size_of(tensor.dtype));
    for (int64_t begin = 0; begin < numel; begin += step) {
      const int64_t count = std::min(step, numel - begin);
      if (source_) {
        source_->read(tensor.name, begin, count, tensor.dtype, part.data());
      } else {
        std::fill(part.begin(), part.end(), char{0});
      }
      writer.write(tensor.name, begin, count, tensor.dtype, part.data());
    }
  }
}
