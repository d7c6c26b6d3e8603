#include "llama/weights.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "layers/core/parallel.h"
#include "layers/core/rng.h"
#include "llama/frozen.h"
#include "llama/quantized.h"
#include "llama/through_host.h"

namespace {

/// At most eight names, and how many more there are.
std::string short_list(const std::vector<std::string>& names) {
  const size_t shown = std::min<size_t>(names.size(), 8);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<int64_t>(shown), ", "));
  if (shown < names.size()) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

/// The name under which a tensor is read: a tied embedding may be stored as lm_head.weight alone.
std::string name_in(const SafetensorsDirectory& directory, const ModelConfig& config, const std::string& hf_name) {
  const bool only_head = config.tie_word_embeddings && hf_name == config.names.embedding() &&
                         !directory.contains(hf_name) && directory.contains(config.names.lm_head);
  return only_head ? config.names.lm_head : hf_name;
}

void check_tensors(const ModelConfig& config, const std::vector<ParamUnit>& units,
                   const SafetensorsDirectory& directory) {
  std::set<std::string> known;
  std::vector<std::string> missing, wrong, extra;
  const auto check_one = [&](const std::string& name, const std::vector<int64_t>& shape) {
    known.insert(name);
    if (!directory.contains(name)) {
      missing.push_back(name);
    } else if (directory.info(name).shape != shape) {
      wrong.push_back(fmt::format("{} is ({}), expected ({})", name, fmt::join(directory.info(name).shape, ", "),
                                  fmt::join(shape, ", ")));
    }
  };
  for (const ParamUnit& unit : units) {
    for (const ParamSpec& param : unit.params) {
      for (const DiskTensor& disk : param.disk) {
        const std::string name = name_in(directory, config, disk.hf_name);
        for (const QuantizedTensor& tensor : quantized_tensors(name, disk.shape, quantization_of(directory, name))) {
          check_one(tensor.name, tensor.shape);
        }
      }
    }
  }
  for (const TensorToWrite& tensor : frozen_tensors(config)) check_one(tensor.name, tensor.shape);
  for (const std::string& name : directory.names()) {
    if (!known.count(name) && !is_harmless_extra_tensor(config, name)) extra.push_back(name);
  }
  const std::string where = directory.names().empty()
                                ? "the checkpoint"
                                : directory.file_of(directory.names().front()).parent_path().string();
  CHECK(missing.empty(),
        "{} lacks {} tensors that its config.json ({}) asks for: {}; is it the checkpoint of this config?", where,
        missing.size(), config.model_type, short_list(missing));
  CHECK(wrong.empty(), "{}: {} tensors have another shape than its config.json says: {}", where, wrong.size(),
        short_list(wrong));
  CHECK(extra.empty(),
        "{} holds {} tensors that a {} of this config has no place for: {}; they would be lost, so this is refused",
        where, extra.size(), config.model_type, short_list(extra));
}

/// Hugging Face 4 ties them, 5 does not: with different contents there is no right answer. Elements [begin, begin + n).
void check_tied_head(const SafetensorsDirectory& directory, const DecoderNames& names, int64_t begin, int64_t n) {
  const std::string head = names.lm_head, embedding = names.embedding();
  if (!directory.contains(head) || !directory.contains(embedding)) return;
  bool equal = directory.info(head).shape == directory.info(embedding).shape;
  if (equal) {
    std::vector<float> a(static_cast<size_t>(n)), b(static_cast<size_t>(n));
    directory.read(head, begin, n, DType::F32, a.data());
    directory.read(embedding, begin, n, DType::F32, b.data());
    equal = std::memcmp(a.data(), b.data(), static_cast<size_t>(n) * sizeof(float)) == 0;
  }
  CHECK(equal,
        "{}: tie_word_embeddings is true, but {} differs from {}; set tie_word_embeddings to false in config.json to "
        "train both, or remove {}",
        directory.file_of(head).string(), head, embedding, head);
}

}  // namespace

std::vector<ShardPiece> shard_pieces(const std::vector<ParamUnit>& units, const ParamStore& params) {
  std::vector<ShardPiece> pieces;
  for (size_t u = 0; u < units.size(); u++) {
    const FlatLayout& layout = params.layout(u);
    const int64_t shard_begin = params.shard_begin(u), shard_end = shard_begin + layout.shard_numel();
    for (size_t i = 0; i < units[u].params.size(); i++) {
      for (const DiskTensor& disk : units[u].params[i].disk) {
        const int64_t first = layout.begin(i) + disk.offset;
        const int64_t begin = std::max(first, shard_begin), end = std::min(first + disk.shape.numel(), shard_end);
        if (begin < end)
          pieces.push_back({u, &units[u].params[i], &disk, begin - first, end - begin, begin - shard_begin});
      }
    }
  }
  return pieces;
}

Tensor piece_of(Tensor shard, const ShardPiece& piece) {
  Tensor view = shard.rows(piece.shard_offset, piece.count);
  view.name = piece.disk->hf_name.c_str();
  return view;
}

void init_random(ParamStore& params, const ModelConfig& config, const std::vector<ParamUnit>& units, uint64_t seed) {
  const int64_t C = config.hidden_size;
  for (const ShardPiece& piece : shard_pieces(units, params)) {
    const Tensor all = piece_of(params.master_shard(piece.unit), piece);
    const Philox rng(seed, hash_name(piece.disk->hf_name));
    const bool is_embedding = piece.disk->hf_name == config.names.embedding();
    const auto value = [&](int64_t i) {
      switch (piece.param->init) {
        case Init::Zero:
          return 0.0;
        case Init::One:
          return 1.0;
        case Init::Normal:
          break;
      }
      if (is_embedding && i / C == config.pad_token_id) return 0.0;
      return config.initializer_range * rng.normal(static_cast<uint64_t>(i));
    };
    write_through_host(params.device(), all, [&](Tensor to, int64_t first) {
      dispatch_float(to.dtype, "init_random", [&]<class T>(T) {
        T* out = to.as<T>();
        parallel_for(to.numel(), 1 << 12, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; i++) out[i] = static_cast<T>(value(piece.begin + first + i));
        });
      });
    });
  }
  params.round_weights();
  params.weights_changed();
}

void load_weights(ParamStore& params, const ModelConfig& config, const std::vector<ParamUnit>& units,
                  const SafetensorsDirectory& directory, const LoadProgress& progress) {
  check_tensors(config, units, directory);
  const auto pieces = shard_pieces(units, params);
  int64_t total = 0, done = 0;
  for (const ShardPiece& piece : pieces) total += piece.count;
  for (const ShardPiece& piece : pieces) {
    const Tensor all = piece_of(params.master_shard(piece.unit), piece);
    const std::string name = name_in(directory, config, piece.disk->hf_name);
    write_through_host(params.device(), all, [&](Tensor to, int64_t first) {
      read_weight(directory, name, piece.disk->shape, piece.begin + first, to.numel(), to.dtype, to.data);
      const bool is_tied_head = config.tie_word_embeddings && piece.disk->hf_name == config.names.embedding();
      if (is_tied_head) check_tied_head(directory, config.names, piece.begin + first, to.numel());
      done += to.numel();
      const int64_t size = static_cast<int64_t>(size_of(to.dtype));
      if (progress) progress(done * size, total * size);
    });
  }
  params.round_weights();
  params.weights_changed();
}
