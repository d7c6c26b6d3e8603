// Memory of this process and of its host, as the kernel tells it.
#pragma once

#include <cstdint>

/// 0 where the kernel does not tell.
struct ProcessMemory {
  int64_t peak_bytes = 0, resident_bytes = 0;  ///< VmHWM, VmRSS
};
ProcessMemory read_process_memory();

/// What processes here can still use: of the host (MemAvailable and free swap), and of the cgroup, whose page cache
/// counts as free. The largest number where the kernel does not tell.
int64_t available_host_memory();
