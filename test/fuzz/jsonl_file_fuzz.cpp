// Fuzzes JSONL files: the index of many lines, and reading back every document of it.
#include "test/fuzz/token_file_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const MemoryFile file(data, size);
  read_token_file({TokenFormat::Jsonl, file.path(), {}});
  return 0;
}
