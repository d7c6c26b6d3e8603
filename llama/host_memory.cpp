#include "llama/host_memory.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

namespace {

constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();

/// The number of the line "NAME NUMBER ..." or "NAME: NUMBER ..." in a text of /proc or of a cgroup.
std::optional<int64_t> number_of(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    int64_t number = 0;
    if (words >> word && (word == name || word == name + ":") && words >> number) return number;
  }
  return std::nullopt;
}

/// "" where there is none.
std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<int64_t> number_in(const std::string& path) {  // "max" is none
  std::ifstream file(path);
  int64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;
}

/// Of the cgroup at `directory`.
int64_t available_of(const std::string& directory, const char* limit, const char* usage, const char* cache) {
  const auto most = number_in(directory + limit), used = number_in(directory + usage);
  if (!most || !used) return kUnknown;
  return std::max<int64_t>(0, *most - *used + number_of(text_of(directory + "/memory.stat"), cache).value_or(0));
}

}  // namespace

ProcessMemory read_process_memory() {
  const std::string status = text_of("/proc/self/status");  // once: the two numbers are of one moment
  return {number_of(status, "VmHWM").value_or(0) * 1024, number_of(status, "VmRSS").value_or(0) * 1024};
}

int64_t available_host_memory() {
  int64_t available = kUnknown;
  const std::string meminfo = text_of("/proc/meminfo");
  if (const auto kib = number_of(meminfo, "MemAvailable")) {
    available = (*kib + number_of(meminfo, "SwapFree").value_or(0)) * 1024;
  }
  // "0::/path" of cgroup v2, "4:memory:/path" of v1. A container sees its own as the root.
  std::ifstream cgroups("/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    const bool is_v2 = line.starts_with("0::"), is_v1 = line.find(":memory:") != std::string::npos;
    if (!is_v2 && !is_v1) continue;
    std::string path = line.substr(line.rfind(':') + 1);
    for (;;) {  // a parent may allow less
      available =
          std::min(available, is_v2 ? available_of("/sys/fs/cgroup" + path, "/memory.max", "/memory.current", "file")
                                    : available_of("/sys/fs/cgroup/memory" + path, "/memory.limit_in_bytes",
                                                   "/memory.usage_in_bytes", "total_cache"));
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  return available;
}
