// Fuzzes the reader of Megatron pairs. The first two bytes of an input are the size of the .idx; the .bin is the rest.
#include <algorithm>

#include "test/fuzz/token_file_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const size_t idx_size = std::min<size_t>(data[0] + 256u * data[1], size - 2);
  const MemoryFile idx(data + 2, idx_size), bin(data + 2 + idx_size, size - 2 - idx_size);
  read_token_file({TokenFormat::Megatron, bin.path(), idx.path()});
  return 0;
}
