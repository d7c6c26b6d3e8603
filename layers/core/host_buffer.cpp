// The seam to the CUDA half (host_buffer.cu), which is linked when kHasCuda.
#include "layers/core/host_buffer.h"

#include "layers/core/check.h"
#include "layers/core/device_cuda.h"

HostBuffer::HostBuffer(Device& device, size_t size_bytes, int num_slots) {
  CHECK(device.is_cuda(), "pinned memory of the host is for the CUDA device");
  if constexpr (kHasCuda) {
    data_ = static_cast<char*>(cuda_allocate_pinned(size_bytes));
    copies_ = cuda_open_copies(device.stream(), num_slots);
  }
}

HostBuffer::~HostBuffer() {
  if constexpr (kHasCuda) {
    cuda_close_copies(copies_);
    cuda_deallocate_pinned(data_);
  }
}

void HostBuffer::start_copy(int slot, void* to, const void* from, size_t size_bytes) {
  if constexpr (kHasCuda) cuda_start_copy(copies_, slot, to, from, size_bytes);
}

void HostBuffer::wait(int slot) {
  if constexpr (kHasCuda) cuda_wait_for_copies(copies_, slot);
}
