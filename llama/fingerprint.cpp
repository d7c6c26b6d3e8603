#include "llama/fingerprint.h"

#include <algorithm>
#include <fstream>

#include "layers/core/rng.h"

namespace {

constexpr int64_t kRows = 8, kElements = 16;

class Digest {
 public:
  void add(const void* data, size_t size_bytes) {
    hash_ = hash_name({static_cast<const char*>(data), size_bytes}, hash_);
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.data(), values.size() * sizeof(T));
  }
  void add(const std::string& text) { add(text.c_str(), text.size() + 1); }
  std::string str() const { return fmt::format("digest {:016x}", hash_); }

 private:
  uint64_t hash_ = hash_name("");
};

}  // namespace

std::string program_fingerprint() {
  Digest digest;
  std::ifstream file("/proc/self/exe", std::ios::binary);
  for (std::vector<char> block(1 << 20);
       file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount();) {
    digest.add(block.data(), static_cast<size_t>(file.gcount()));
  }
  return digest.str();
}

std::string fingerprint(Loader& loader) {
  const DataSummary& s = loader.summary();
  Digest digest;
  const int64_t num_rows = loader.rows_in_epoch(0), num_sampled = std::min(kRows, num_rows);
  for (int64_t i = 0; i < num_sampled; i++) {
    const Batch row = loader.rows(i * num_rows / num_sampled, 1);
    digest.add(row.cu_seqlens), digest.add(row.tokens), digest.add(row.targets);
  }
  return fmt::format("{} documents, {} tokens, {} targets, the longest {}, {} rows in {} tokens, {}", s.num_documents,
                     s.num_tokens, s.num_loss_tokens, s.longest_document, num_rows, s.first_epoch.num_tokens,
                     digest.str());
}

std::string fingerprint(const SafetensorsDirectory& weights) {
  Digest digest;
  const auto names = weights.names();
  for (const std::string& name : names) {
    const TensorInfo& info = weights.info(name);
    digest.add(name + " " + info.str());
    if (!info.dtype) continue;
    const int64_t numel = info.numel(), n = std::min(kElements, numel);
    for (const int64_t begin : {int64_t{0}, (numel - n) / 2, numel - n}) {
      std::vector<char> elements(static_cast<size_t>(n) * size_of(*info.dtype));
      weights.read(name, begin, n, *info.dtype, elements.data());
      digest.add(elements);
    }
  }
  return fmt::format("{} tensors, {}", names.size(), digest.str());
}
