// GPUs that are not here, in cuDNN's JSON. Written by hand from NVIDIA's public data sheets, not read off devices:
// clocks and caches may sway cuDNN's choice among engines, not whether there is one.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

struct Gpu {
  const char* name;
  int sm;  ///< compute capability, 90 for 9.0
  int num_multiprocessors, shared_bytes_of_block;
  int64_t memory_bytes, clock_khz, memory_clock_khz, l2_bytes;
};

inline constexpr Gpu kGpus[] = {
    {"NVIDIA A100-SXM4-80GB", 80, 108, 166912, int64_t{80} << 30, 1410000, 1593000, 40 << 20},
    {"NVIDIA H200", 90, 132, 232448, int64_t{141} << 30, 1980000, 3201000, 60 << 20},
    {"NVIDIA B200", 100, 148, 232448, int64_t{180} << 30, 1965000, 3996000, 126 << 20},
};

inline std::string device_properties(const Gpu& gpu) {
  return fmt::format(
      R"({{"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
"warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
"maxThreadsPerBlock": 1024, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "cudaDeviceId": 0,
"driverVer": 13000, "maxCtasPerSM": 32, "maxThreadsPerSM": 2048, "deviceVer": {}, "multiProcessorCount": {},
"maxSharedMemoryPerBlockOptin": {}, "totalGlobalMem": {}, "smClockRateKHz": {}, "memClockRateKHz": {},
"l2CacheSize": {}, "deviceName": "{}"}})",
      gpu.sm * 10, gpu.num_multiprocessors, gpu.shared_bytes_of_block, gpu.memory_bytes, gpu.clock_khz,
      gpu.memory_clock_khz, gpu.l2_bytes, gpu.name);
}
