// Words for reports: threads, source lines and functions.
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "test/simt/machine.h"

namespace {

/// What addr2line says about a code address of this program, by lines.
std::string addr2line(const char* options, uintptr_t offset) {
  const std::string command =
      fmt::format("addr2line -s {} -e /proc/{}/exe {:#x} 2>/dev/null", options, getpid(), offset);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::string text;
  char buffer[512];
  while (pipe && std::fgets(buffer, sizeof buffer, pipe.get())) text += buffer;
  return text;
}

}  // namespace

Region program_image() {
  Region image;
  const auto visit = [](dl_phdr_info* info, size_t, void* result) {
    uintptr_t begin = ~uintptr_t{0}, end = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
      const auto& segment = info->dlpi_phdr[i];
      if (segment.p_type != PT_LOAD) continue;
      begin = std::min<uintptr_t>(begin, info->dlpi_addr + segment.p_vaddr);
      end = std::max<uintptr_t>(end, info->dlpi_addr + segment.p_vaddr + segment.p_memsz);
    }
    *static_cast<Region*>(result) = {begin, end - begin};
    return 1;  // the first entry is the program
  };
  dl_iterate_phdr(visit, &image);
  return image;
}

std::string describe(const Fiber& fiber) {
  const uint3& t = fiber.thread_index;
  return fmt::format("block ({},{},{}) thread ({},{},{})", blockIdx.x, blockIdx.y, blockIdx.z, t.x, t.y, t.z);
}

std::string describe(const SimtSite& site) {
  const std::string file = site.file_name();
  return fmt::format("{}:{}", file.substr(file.rfind('/') + 1), site.line());
}

std::string source_line(uintptr_t return_address) {
  // -i: also the lines that the access was inlined into, from the inside out
  std::string text = addr2line("-i", return_address - 1 - program_image().begin);
  std::string line;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string frame = text.substr(begin, std::min(text.find_first_of(" \n", begin), end) - begin);
    if (frame.rfind("device_functions.h:", 0) != 0 && frame.rfind("cuda_runtime.h:", 0) != 0 &&
        frame.rfind("cuda_primitives.cuh:", 0) != 0) {
      line += (line.empty() ? "" : " <- ") + frame;
    }
    begin = end + 1;
  }
  // an inlined chain may go through the launch and the standard library: the kernel's own lines come first
  return line.empty() ? "?" : line.substr(0, line.find(" <- invoke.h"));
}

std::string function_name(const void* function) {
  std::string name = addr2line("-f -C", reinterpret_cast<uintptr_t>(function) - program_image().begin);
  name = name.substr(0, name.find('\n'));
  // "void (anonymous namespace)::f_kernel<float, 4>(float*)" -> "f_kernel"
  const std::string anonymous = "(anonymous namespace)::";
  for (size_t at; (at = name.find(anonymous)) != std::string::npos;) name.erase(at, anonymous.size());
  name = name.substr(0, name.find_first_of("<("));
  return name.substr(name.find_last_of(": ") + 1);
}

void add_report(std::string text) {
  if (++machine.num_reports <= machine.options.max_reports) machine.reports += "\n  " + text;
}
