// What a test may ask of the SIMT runtime, which runs CUDA kernels on the CPU. See README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

/// Which of the three builds of the kernels this program is linked with.
enum class SimtBuild { Plain, Asan, Check };
SimtBuild simt_build();

/// The order in which threads and blocks run: ascending, descending, or (any other number) random by that seed.
constexpr uint64_t kSimtAscending = 0, kSimtDescending = 1;

struct SimtOptions {
  uint64_t schedule = kSimtAscending;
  uint64_t streams = 0;        ///< 0: work is done when it is queued; else the seed of a late, random, legal order
  double watchdog_s = 60;      ///< a launch that takes longer is ended
  int max_reports = 8;         ///< of one launch; the rest are counted
  bool blas_adds_bias = true;  ///< cuBLASLt has algorithms that add a bias
  bool cudnn_has_backward = true;
};
SimtOptions& simt_options();

/// From here on this device memory holds nothing: it is filled with NaN, and the check build reports reads of it.
void simt_poison(void* device_data, size_t size_bytes);

/// Kernels that ran so far, without namespaces, template and function parameters: "rmsnorm_forward_kernel".
std::set<std::string> simt_launched_kernels();
