// The CPU half of Device, and the seam to the CUDA half (device.cu), which is linked when kHasCuda.
#include "layers/core/device.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "layers/core/check.h"
#include "layers/core/device_cuda.h"

Device Device::cuda(int ordinal) {
  if constexpr (kHasCuda) {
    Device device(DeviceKind::Cuda, ordinal);
    device.stream_ = cuda_open(ordinal);
    device.workspace_ = cuda_allocate(kWorkspaceBytes);
    device.uploads_ = cuda_open_uploads();
    device.blas_ = cuda_open_blas();
    return device;
  } else {
    fail(
        "device cuda:{} was asked for, but this program was built without CUDA; use --train.device cpu, or rebuild "
        "with nvcc on the PATH",
        ordinal);
  }
}

Device::Device(Device&& other) noexcept
    : kind_(other.kind_),
      ordinal_(other.ordinal_),
      stream_(std::exchange(other.stream_, nullptr)),
      workspace_(std::exchange(other.workspace_, nullptr)),
      uploads_(std::exchange(other.uploads_, nullptr)),
      blas_(std::exchange(other.blas_, nullptr)) {}

Device::~Device() {
  if constexpr (kHasCuda) {
    if (blas_) cuda_close_blas(blas_);
    if (workspace_) cuda_deallocate(workspace_);
    if (uploads_) cuda_close_uploads(uploads_);
    if (stream_) cuda_close(stream_);
  }
}

std::string Device::name() const {
  return is_cuda() ? fmt::format("cuda:{}", ordinal_) : "cpu";
}

std::string Device::id() const {
  if constexpr (kHasCuda) {
    if (is_cuda()) return cuda_bus_id(ordinal_);
  }
  return "cpu";
}

void* Device::allocate(size_t size_bytes) {
  if (size_bytes == 0) return nullptr;
  if constexpr (kHasCuda) {
    if (is_cuda()) {
      void* data = cuda_allocate(size_bytes);
      cuda_fill_zero(data, size_bytes, stream_);
      return data;
    }
  }
  // Anonymous pages are zero and cost nothing until they are touched; huge pages spare the TLB.
  void* data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED, "cannot allocate {} MiB of host memory: {}; see --plan for what needs it", size_bytes >> 20,
        std::strerror(errno));
  madvise(data, size_bytes, MADV_HUGEPAGE);
  return data;
}

void Device::deallocate(void* data, size_t size_bytes) noexcept {
  if (!data) return;
  if constexpr (kHasCuda) {
    if (is_cuda()) return cuda_deallocate(data);
  }
  munmap(data, size_bytes);
}

void Device::fill_zero(void* data, size_t size_bytes) {
  if (size_bytes == 0) return;
  if constexpr (kHasCuda) {
    if (is_cuda()) return cuda_fill_zero(data, size_bytes, stream_);
  }
  std::memset(data, 0, size_bytes);
}

void Device::copy(void* to, const void* from, size_t size_bytes) {
  if (size_bytes == 0) return;
  if constexpr (kHasCuda) {
    if (is_cuda()) return cuda_queue_copy(to, from, size_bytes, stream_);
  }
  std::memcpy(to, from, size_bytes);
}

void Device::upload(void* to, const void* from, size_t size_bytes) {
  if (size_bytes == 0) return;
  if constexpr (kHasCuda) {
    if (is_cuda()) return cuda_upload(uploads_, to, from, size_bytes, stream_);
  }
  std::memcpy(to, from, size_bytes);
}

void Device::copy_from_host(void* to, const void* from, size_t size_bytes) {
  if (size_bytes == 0) return;
  if constexpr (kHasCuda) {
    if (is_cuda()) return cuda_copy(to, from, size_bytes, stream_);
  }
  std::memcpy(to, from, size_bytes);
}

void Device::copy_to_host(void* to, const void* from, size_t size_bytes) {
  copy_from_host(to, from, size_bytes);
}

void Device::synchronize() {
  if constexpr (kHasCuda) {
    if (is_cuda()) cuda_synchronize(stream_);
  }
}

int64_t Device::free_bytes() const {
  if constexpr (kHasCuda) {
    if (is_cuda()) return static_cast<int64_t>(cuda_memory().free_bytes);
  }
  fail("the free memory of {} is not known", name());
}

double Device::peak_flops(DType dtype) const {
  if constexpr (kHasCuda) {
    if (is_cuda()) return cuda_peak_flops(ordinal_, dtype == DType::BF16);
  }
  fail("the peak of {} is not known", name());
}

void* Device::workspace(size_t size_bytes) {
  constexpr size_t kAlignment = 256;
  const size_t padded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
  CHECK(workspace_, "device {} has no workspace", name());
  CHECK(padded <= kWorkspaceBytes, "an op needs {} bytes of workspace, the device has {}", size_bytes, kWorkspaceBytes);
  return static_cast<char*>(workspace_) + (kWorkspaceBytes - padded);
}

Blas& Device::blas() {
  CHECK(blas_, "device {} has no cuBLASLt", name());
  return *blas_;
}

int cuda_device_count() {
  if constexpr (kHasCuda) return cuda_count_devices();
  return 0;
}
