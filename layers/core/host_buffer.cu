// The CUDA half of HostBuffer. No kernel.
#include <cuda_runtime.h>

#include <vector>

#include "layers/core/cuda_util.cuh"
#include "layers/core/device_cuda.h"

namespace {

struct Copies {
  cudaStream_t compute, stream = nullptr;
  cudaEvent_t is_ready = nullptr;    // what a copy comes after
  std::vector<cudaEvent_t> is_done;  // of each slot: its last copy

  Copies(void* compute_, int num_slots)
      : compute(static_cast<cudaStream_t>(compute_)), is_done(static_cast<size_t>(num_slots)) {
    cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda_check(cudaEventCreateWithFlags(&is_ready, cudaEventDisableTiming));
    for (cudaEvent_t& event : is_done) cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  ~Copies() {
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    cudaEventDestroy(is_ready);
    for (cudaEvent_t event : is_done) cudaEventDestroy(event);
  }
};

}  // namespace

void* cuda_allocate_pinned(size_t size_bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaMallocHost(&data, size_bytes);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // not sticky: the next check is not to see it
    fail("cannot allocate {} MiB of pinned host memory; see --plan for what needs it", size_bytes >> 20);
  }
  cuda_check(error);
  return data;
}

void cuda_deallocate_pinned(void* data) noexcept {
  cudaFreeHost(data);
}

void* cuda_open_copies(void* compute_stream, int num_slots) {
  return new Copies(compute_stream, num_slots);
}

void cuda_close_copies(void* copies) noexcept {
  delete static_cast<Copies*>(copies);
}

void cuda_start_copy(void* copies, int slot, void* to, const void* from, size_t size_bytes) {
  Copies& c = *static_cast<Copies*>(copies);
  cuda_check(cudaEventRecord(c.is_ready, c.compute));
  cuda_check(cudaStreamWaitEvent(c.stream, c.is_ready, 0));
  cuda_check(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDefault, c.stream));
  cuda_check(cudaEventRecord(c.is_done[static_cast<size_t>(slot)], c.stream));
}

void cuda_wait_for_copies(void* copies, int slot) {
  Copies& c = *static_cast<Copies*>(copies);
  cuda_check(cudaStreamWaitEvent(c.compute, c.is_done[static_cast<size_t>(slot)], 0));
}
