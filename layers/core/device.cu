// The CUDA half of Device: device, stream, memory and copies by the CUDA runtime API. No kernel.
#include <cuda_runtime.h>

#include "layers/core/cuda_util.cuh"
#include "layers/core/device_cuda.h"

namespace {

cudaStream_t as_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

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

void* cuda_allocate(size_t size_bytes) {
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, size_bytes);
  if (error == cudaErrorMemoryAllocation) {
    size_t free_bytes = 0, total_bytes = 0;
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes));
    cudaGetLastError();  // out of memory is not sticky: the next check is not to see it
    fail("cannot allocate {} MiB of GPU memory: {} of {} MiB are free; see --plan for what needs it", size_bytes >> 20,
         free_bytes >> 20, total_bytes >> 20);
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

void cuda_synchronize(void* stream) {
  cuda_check(cudaStreamSynchronize(as_stream(stream)));
}
