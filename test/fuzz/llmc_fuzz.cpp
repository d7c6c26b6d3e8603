// Fuzzes the reader of llm.c files. An input is the first 12 bytes of the header, then tokens; the rest of the header
// is zero.
#include <algorithm>
#include <cstring>

#include "test/fuzz/token_file_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const size_t head = std::min<size_t>(size, 12);
  std::string bytes(reinterpret_cast<const char*>(data), head);
  if (head == 12) bytes.resize(1024, '\0');
  bytes.append(reinterpret_cast<const char*>(data) + head, size - head);
  const MemoryFile file(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  read_token_file({TokenFormat::Llmc, file.path(), {}});
  return 0;
}
