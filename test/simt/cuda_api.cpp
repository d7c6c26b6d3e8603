// The CUDA runtime API over the machine's memory; streams and events: streams.cpp.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "test/simt/machine.h"

namespace {

/// Copies by the host must stay inside one live allocation.
void check_range(const char* what, const void* data, size_t size_bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  CHECK(!machine.arena.contains(address) || is_allocated(address, size_bytes),
        "{} of {} bytes leaves its allocation: {}", what, size_bytes, describe_address(address));
}

}  // namespace

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
  }
  return "unknown error";
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
  }
  return "cudaErrorUnknown";
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
  return ordinal == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int ordinal) {
  // Several processes may say that they have a GPU each.
  const char* own = std::getenv("TRAIN_GPT_SIMT_OWN_GPU") ? std::getenv("OMPI_COMM_WORLD_RANK") : nullptr;
  std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", own ? std::atoi(own) & 0xff : ordinal);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

/// 80, or TRAIN_GPT_SIMT_SM: on 90 and 100 attention asks cuDNN.
static int compute_capability() {
  const char* sm = std::getenv("TRAIN_GPT_SIMT_SM");
  return sm ? std::atoi(sm) : 80;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  if (ordinal != 0) return cudaErrorInvalidValue;
  switch (attribute) {
    case cudaDevAttrClockRate:
      *value = 1000000;  // kHz
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = 1;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = compute_capability() / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = compute_capability() % 10;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = free_device_bytes();
  *total_bytes = machine.arena.size;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t size_bytes) {
  *data = allocate_device(size_bytes, "global");
  return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void* data) {
  finish_all_streams();
  return !data || release_device(data) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaMallocHost(void** data, size_t size_bytes) {
  *data = std::malloc(size_bytes);
  return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t size_bytes, cudaStream_t stream) {
  check_range("cudaMemset", data, size_bytes);
  enqueue(stream, [=] {
    std::memset(data, value, size_bytes);
    checker_host_writes(data, size_bytes);
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind, cudaStream_t stream) {
  check_range("cudaMemcpy", from, size_bytes);
  check_range("cudaMemcpy", to, size_bytes);
  enqueue(stream, [=] {
    checker_host_reads(from, size_bytes);
    std::memmove(to, from, size_bytes);
    checker_host_writes(to, size_bytes);
    return true;
  });
  return cudaSuccess;
}
