// Pinned memory of the host, and copies between it and a CUDA device that run beside the compute stream.
#pragma once

#include "layers/core/device.h"

class HostBuffer {
 public:
  /// An Error names the size when there is not enough. Copies of each of `num_slots` slots are waited for together.
  HostBuffer(Device& device, size_t size_bytes, int num_slots);
  HostBuffer(const HostBuffer&) = delete;
  /// Waits for the copies.
  ~HostBuffer();

  char* data() const { return data_; }
  /// Starts a copy, one end of which is in data(), after all that the compute stream was given until now. Returns at
  /// once; copies run in the order of their starts.
  void start_copy(int slot, void* to, const void* from, size_t size_bytes);
  /// What the compute stream is given from now on comes after the copies of `slot`.
  void wait(int slot);

 private:
  char* data_ = nullptr;
  void* copies_ = nullptr;  // host_buffer.cu
};
