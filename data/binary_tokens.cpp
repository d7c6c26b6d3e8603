// Arrays of token ids on disk. Contract: binary_tokens.h.
#include "data/binary_tokens.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t kBlockTokens = 1 << 18;

template <class T>
void widen(const char* from, int64_t count, int64_t* to) {
  for (int64_t i = 0; i < count; i++) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<int64_t>(value);
  }
}

void widen(Encoding encoding, const char* from, int64_t count, int64_t* to) {
  switch (encoding) {
    case Encoding::U8:
      return widen<uint8_t>(from, count, to);
    case Encoding::I8:
      return widen<int8_t>(from, count, to);
    case Encoding::U16:
      return widen<uint16_t>(from, count, to);
    case Encoding::I16:
      return widen<int16_t>(from, count, to);
    case Encoding::U32:
      return widen<uint32_t>(from, count, to);
    case Encoding::I32:
      return widen<int32_t>(from, count, to);
    case Encoding::I64:
      return widen<int64_t>(from, count, to);
    case Encoding::Json:
      break;
  }
  fail("read_binary_tokens: not an array of tokens");
}

}  // namespace

void read_binary_tokens(const InputFile& file, int64_t offset, Encoding encoding, int64_t first, int64_t count,
                        std::vector<char>& buffer, int64_t* out) {
  const int64_t width = bytes_per_token(encoding);
  buffer.resize(static_cast<size_t>(count * width));
  file.read(offset + first * width, count * width, buffer.data());
  widen(encoding, buffer.data(), count, out);
}

void for_each_token_block(const InputFile& file, int64_t offset, Encoding encoding, int64_t num_tokens,
                          const DataProgress& progress,
                          const std::function<void(int64_t, const int64_t*, int64_t)>& visit) {
  std::vector<char> buffer;
  std::vector<int64_t> tokens(static_cast<size_t>(std::min(num_tokens, kBlockTokens)));
  const int64_t width = bytes_per_token(encoding);
  if (progress) progress(0, num_tokens * width, Progress::Unit::Bytes, "indexing " + file.path().string());
  for (int64_t first = 0; first < num_tokens;) {
    const int64_t count = std::min(kBlockTokens, num_tokens - first);
    read_binary_tokens(file, offset, encoding, first, count, buffer, tokens.data());
    visit(first, tokens.data(), count);
    first += count;
    if (progress)
      progress(first * width, num_tokens * width, Progress::Unit::Bytes, "indexing " + file.path().string());
  }
}
