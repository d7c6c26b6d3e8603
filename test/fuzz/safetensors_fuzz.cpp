// Fuzzes the safetensors reader: any bytes are either a file whose every byte can be read, or an Error.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "data/safetensors.h"

namespace {

void require(bool claim) {
  if (!claim) std::abort();
}

/// Every tensor lies within the file and has the bytes of its shape; whatever dtype can be read, reads.
void read_everything(const SafetensorsFile& file, int64_t file_size) {
  int64_t covered = 0;
  for (const auto& [name, info] : file.tensors()) {
    require(info.file_begin >= 8 && info.file_begin <= info.file_end && info.file_end <= file_size);
    covered += info.file_end - info.file_begin;
    if (!info.dtype) continue;
    const int64_t n = info.numel();
    require(n >= 0 && n * static_cast<int64_t>(size_of(*info.dtype)) == info.file_end - info.file_begin);
    const bool is_float = *info.dtype != DType::I32 && *info.dtype != DType::I64 && *info.dtype != DType::U8;
    for (const DType to : {*info.dtype, DType::F32, DType::F64, DType::BF16}) {
      if (to != *info.dtype && !is_float) continue;
      const size_t width = size_of(to);
      std::vector<char> whole(static_cast<size_t>(n) * width), parts(whole.size());
      file.read(name, 0, n, to, whole.data());
      file.read(name, 0, n / 2, to, parts.data());
      file.read(name, n / 2, n - n / 2, to, parts.data() + static_cast<size_t>(n / 2) * width);
      require(whole == parts);
    }
  }
  require(covered <= file_size - 8);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("safetensors", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  require(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == static_cast<ssize_t>(size));
  try {
    read_everything(SafetensorsFile(path), static_cast<int64_t>(size));
  } catch (const Error&) {
  }
  // The header alone, as of files so large that sums of sizes may overflow.
  if (size < 8) return 0;
  const std::string_view header(reinterpret_cast<const char*>(data) + 8, size - 8);
  for (const int64_t file_size : {INT64_MAX, int64_t{1} << 40}) {
    try {
      parse_safetensors_header(header, file_size, "header");
    } catch (const Error&) {
    }
  }
  return 0;
}
