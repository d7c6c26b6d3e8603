// The CUDA half of Device: device, stream, memory and copies by the CUDA runtime API. No kernel.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>

#include "layers/core/cuda_util.cuh"
#include "layers/core/device.h"
#include "layers/core/device_cuda.h"

namespace {

cudaStream_t as_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

/// Pinned memory from which copies to the device are queued: two halves by turns. A half is used again when the copies
/// out of it are done.
class Uploads {
 public:
  static constexpr size_t kHalf = Device::kUploadBytes / 2;

  Uploads() {
    cuda_check(cudaMallocHost(reinterpret_cast<void**>(&memory_), 2 * kHalf));
    for (cudaEvent_t& event : is_free_) cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  Uploads(const Uploads&) = delete;
  ~Uploads() {
    for (cudaEvent_t event : is_free_) cudaEventDestroy(event);
    cudaFreeHost(memory_);
  }

  void copy(char* to, const char* from, size_t size_bytes, cudaStream_t stream) {
    while (size_bytes > 0) {
      if (used_ == kHalf) {
        cuda_check(cudaEventRecord(is_free_[half_], stream));
        half_ = 1 - half_, used_ = 0;
        cuda_check(cudaEventSynchronize(is_free_[half_]));  // at once when it was never recorded
      }
      const size_t part = std::min(size_bytes, kHalf - used_);
      char* pinned = memory_ + static_cast<size_t>(half_) * kHalf + used_;
      std::memcpy(pinned, from, part);
      cuda_check(cudaMemcpyAsync(to, pinned, part, cudaMemcpyDefault, stream));
      used_ += part, to += part, from += part, size_bytes -= part;
    }
  }

 private:
  char* memory_ = nullptr;
  cudaEvent_t is_free_[2] = {};
  int half_ = 0;
  size_t used_ = 0;
};

}  // namespace

int cuda_count_devices() {
  int count = 0;
  // Without a driver, or without a GPU, this is an error and `count` is left alone: there is no device.
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void* cuda_open(int ordinal) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  CHECK(error == cudaSuccess && count > 0, "device cuda:{} was asked for, but there is no CUDA GPU here ({}); use {}",
        ordinal, error == cudaSuccess ? "0 devices" : cudaGetErrorString(error), "--train.device cpu");
  CHECK(ordinal >= 0 && ordinal < count, "device cuda:{} was asked for, but this host has {} (cuda:0 to cuda:{})",
        ordinal, count, count - 1);
  cuda_check(cudaSetDevice(ordinal));
  cudaStream_t stream = nullptr;
  cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

void cuda_close(void* stream) noexcept {
  cudaStreamDestroy(as_stream(stream));
}

std::string cuda_bus_id(int ordinal) {
  char id[32] = "";
  cuda_check(cudaDeviceGetPCIBusId(id, sizeof(id), ordinal));
  return id;
}

double cuda_peak_flops(int ordinal, bool is_bf16) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    cuda_check(cudaDeviceGetAttribute(&value, which, ordinal));
    return value;
  };
  const int arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
  struct Peak {
    int arch;
    double bf16, fp32;  ///< flops of a multiprocessor in a clock
    double max_ghz;     ///< at which the maker states its peak; cards may be clocked higher for a while
  };
  // A100: 312 TFLOP/s. RTX 30, 40: with fp32 sums. H100, H200: 989. B200: 2250. RTX 50, RTX PRO.
  constexpr Peak kPeaks[] = {{80, 2048, 128, 1.41}, {86, 512, 256, 9},      {89, 512, 256, 9},
                             {90, 4096, 256, 1.83}, {100, 8192, 256, 1.86}, {120, 512, 256, 9}};
  Peak peak = kPeaks[0];
  for (const Peak& p : kPeaks) {
    if (p.arch <= arch) peak = p;
  }
  const double ghz = std::min(peak.max_ghz, attribute(cudaDevAttrClockRate) * 1e-6);
  return 1e9 * ghz * attribute(cudaDevAttrMultiProcessorCount) * (is_bf16 ? peak.bf16 : peak.fp32);
}

CudaMemory cuda_memory() {
  CudaMemory memory;
  cuda_check(cudaMemGetInfo(&memory.free_bytes, &memory.total_bytes));
  return memory;
}

void* cuda_allocate(size_t size_bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, size_bytes);
  if (error == cudaErrorMemoryAllocation) {
    const CudaMemory memory = cuda_memory();
    cudaGetLastError();  // out of memory is not sticky: the next check is not to see it
    fail("cannot allocate {} MiB of GPU memory: {} of {} MiB are free; see --plan for what needs it", size_bytes >> 20,
         memory.free_bytes >> 20, memory.total_bytes >> 20);
  }
  cuda_check(error);
  return data;
}

void cuda_deallocate(void* data) noexcept {
  cudaFree(data);
}

void cuda_fill_zero(void* data, size_t size_bytes, void* stream) {
  cuda_check(cudaMemsetAsync(data, 0, size_bytes, as_stream(stream)));
}

void cuda_copy(void* to, const void* from, size_t size_bytes, void* stream) {
  cuda_check(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, as_stream(stream)));
  cuda_check(cudaStreamSynchronize(as_stream(stream)));
}

void cuda_queue_copy(void* to, const void* from, size_t size_bytes, void* stream) {
  cuda_check(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, as_stream(stream)));
}

void* cuda_open_uploads() {
  return new Uploads;
}

void cuda_close_uploads(void* uploads) noexcept {
  delete static_cast<Uploads*>(uploads);
}

void cuda_upload(void* uploads, void* to, const void* from, size_t size_bytes, void* stream) {
  static_cast<Uploads*>(uploads)->copy(static_cast<char*>(to), static_cast<const char*>(from), size_bytes,
                                       as_stream(stream));
}

void cuda_synchronize(void* stream) {
  cuda_check(cudaStreamSynchronize(as_stream(stream)));
}
