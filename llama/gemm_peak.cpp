#include "llama/gemm_peak.h"

#include <algorithm>
#include <chrono>

#include "layers/core/arena.h"
#include "layers/linear.h"

double gemm_peak(Device& device, DType dtype) {
  if (device.is_cuda()) return device.peak_flops(dtype);
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kSize = 1024;
  constexpr double kSeconds = 0.3;
  constexpr double kFlops = 2.0 * kSize * kSize * kSize;
  const auto place = [&](Arena& arena, const char* name) { return arena.place(DType::F32, {kSize, kSize}, name); };
  Arena arena(device, 3 * kSize * kSize * sizeof(float) + 3 * Arena::kAlignment);
  const Tensor x = place(arena, "x"), w = place(arena, "w"), y = place(arena, "y");
  const auto seconds_since = [](Clock::time_point t) {
    return std::chrono::duration<double>(Clock::now() - t).count();
  };
  double best = 0;
  for (const auto first = Clock::now(); seconds_since(first) < kSeconds;) {
    const auto start = Clock::now();
    linear_forward(device, y, x, w, {});
    device.synchronize();
    best = std::max(best, kFlops / seconds_since(start));
  }
  return best;
}
