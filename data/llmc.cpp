// The llm.c reader. Contract: llmc.h; layout: FORMAT.md.
#include "data/llmc.h"

#include <algorithm>
#include <array>
#include <optional>

#include "data/binary_tokens.h"

namespace {

constexpr int64_t kHeaderBytes = 256 * 4;

struct Variant {
  int32_t magic, version;
  Encoding encoding;
  int64_t first_token;  // of a document
};
constexpr std::array<Variant, 2> kVariants = {{
    {20240520, 1, Encoding::U16, 50256},   // GPT-2: <|endoftext|>
    {20240801, 7, Encoding::U32, 128000},  // Llama 3: <|begin_of_text|>
}};

std::optional<Variant> variant_of(const InputFile& file) {
  if (file.size_bytes() < 4) return std::nullopt;
  int32_t magic;
  file.read(0, 4, &magic);
  for (const Variant& variant : kVariants) {
    if (variant.magic == magic) return variant;
  }
  return std::nullopt;
}

}  // namespace

bool is_llmc(const InputFile& file) {
  return variant_of(file).has_value();
}

void index_llmc(const InputFile& file, IndexWriter& writer, const DataProgress& progress) {
  const std::string name = file.path().string();
  const auto variant = variant_of(file);
  CHECK(variant,
        "{}: does not begin with the number 20240520 (GPT-2 tokens) or 20240801 (Llama 3): not a token file of "
        "llm.c",
        name);
  CHECK(file.size_bytes() >= kHeaderBytes, "{}: {} bytes, but its header alone has {}; is it truncated?", name,
        file.size_bytes(), kHeaderBytes);
  std::array<int32_t, 3> header;  // magic, version, number of tokens
  file.read(0, sizeof(header), header.data());
  CHECK(header[1] == variant->version, "{}: version {}, only {} is supported; write it again with a current llm.c",
        name, header[1], variant->version);
  const int64_t num_tokens = header[2], width = bytes_per_token(variant->encoding);
  CHECK(num_tokens >= 0 && kHeaderBytes + num_tokens * width == file.size_bytes(),
        "{}: {} bytes, but a header of {} and {} tokens of {} bytes need {}; is it truncated? copy it again", name,
        file.size_bytes(), kHeaderBytes, num_tokens, width, kHeaderBytes + num_tokens * width);

  writer.stats.encoding = variant->encoding;
  int64_t begin = 0;
  const auto end_document = [&](int64_t end) {
    if (end == begin) return;
    writer.add(unmasked_document(kHeaderBytes + begin * width, (end - begin) * width, end - begin));
    begin = end;
  };
  for_each_token_block(file, kHeaderBytes, variant->encoding, num_tokens, progress,
                       [&](int64_t first, const int64_t* tokens, int64_t count) {
                         for (int64_t i = 0; i < count; i++) {
                           if (tokens[i] == variant->first_token) end_document(first + i);
                         }
                         writer.stats.include_tokens(0, *std::max_element(tokens, tokens + count));
                       });
  end_document(num_tokens);
}
