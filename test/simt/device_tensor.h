// Tensors in the memory of the emulated GPU, for the tests of kernels.
#pragma once

#include "layers/core/device.h"
#include "test/simt/simt.h"
#include "test/testing.h"

/// Owns device memory that ends where the tensor ends. `offset` elements lie before it: 1 spoils its alignment.
class DeviceTensor {
 public:
  /// Undefined contents: what is read before it is written is NaN, and reported by the check build.
  DeviceTensor(Device& device, DType dtype, Shape shape, int64_t offset = 0)
      : device_(device),
        dtype_(dtype),
        shape_(shape),
        offset_bytes_(static_cast<size_t>(offset) * size_of(dtype)),
        memory_(device.allocate(size_bytes())) {
    if (memory_) simt_poison(memory_, size_bytes());
  }
  DeviceTensor(Device& device, const HostTensor& contents, int64_t offset = 0)
      : DeviceTensor(device, contents.dtype(), contents.shape(), offset) {
    const ConstTensor from = contents;
    device.copy_from_host(view().data, from.data, from.size_bytes());
  }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  ~DeviceTensor() { device_.deallocate(memory_, size_bytes()); }

  operator Tensor() { return view(); }
  operator ConstTensor() { return view(); }
  Tensor view() { return {static_cast<char*>(memory_) + offset_bytes_, dtype_, shape_, "device tensor"}; }

  HostTensor to_host() {
    HostTensor result(dtype_, shape_);
    const Tensor to = result;
    device_.copy_to_host(to.data, view().data, to.size_bytes());
    return result;
  }

 private:
  size_t size_bytes() const { return offset_bytes_ + static_cast<size_t>(shape_.numel()) * size_of(dtype_); }

  Device& device_;
  DType dtype_;
  Shape shape_;
  size_t offset_bytes_;
  void* memory_;
};
