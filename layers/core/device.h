// A device is where tensors live and ops run: its kind, memory and streams. No op and no option lives here.
#pragma once

#include <cstddef>
#include <string>

#include "layers/core/dtype.h"

#ifdef TRAIN_GPT_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

enum class DeviceKind { Cpu, Cuda };

struct Blas;  // blas.cu

class Device {
 public:
  static Device cpu() { return Device(DeviceKind::Cpu, 0); }
  /// The CUDA device `ordinal` of this host; an error that names the remedy when there is none.
  static Device cuda(int ordinal);
  /// Says what it is, and has no memory: for arenas that only measure.
  static Device planned(DeviceKind kind) { return Device(kind, 0); }

  Device(Device&& other) noexcept;
  Device& operator=(Device&&) = delete;
  ~Device();

  DeviceKind kind() const { return kind_; }
  bool is_cuda() const { return kind_ == DeviceKind::Cuda; }
  /// "cpu" or "cuda:0".
  std::string name() const;
  /// What tells a GPU from the others of its host (its PCI bus id); "cpu".
  std::string id() const;
  /// The compute stream (a cudaStream_t; null on the CPU).
  void* stream() const { return stream_; }

  /// Zero-filled memory, aligned for every access; an Error names the size when there is not enough.
  void* allocate(size_t size_bytes);
  void deallocate(void* data, size_t size_bytes) noexcept;
  void fill_zero(void* data, size_t size_bytes);
  /// Within the device's memory; queued on the compute stream.
  void copy(void* to, const void* from, size_t size_bytes);
  /// Queued on the compute stream; `from` is free when the call returns. For a batch's tokens and the like: large
  /// copies wait for those before.
  void upload(void* to, const void* from, size_t size_bytes);
  /// These two wait until the copy is done, and for everything that was queued before.
  void copy_from_host(void* to, const void* from, size_t size_bytes);
  void copy_to_host(void* to, const void* from, size_t size_bytes);
  void synchronize();
  /// CUDA only: of its memory.
  int64_t free_bytes() const;

  /// CUDA only: FLOP/s of dense matrix products of F32 or BF16 elements with fp32 sums, at the maker's clock.
  double peak_flops(DType dtype) const;

  /// CUDA only: scratch memory of the op that is being queued; its contents are undefined, and the next op on the
  /// compute stream overwrites it. One fixed allocation, so that `--plan` can count it and no step allocates. The
  /// answer ends where the allocation ends: whoever writes past it leaves the allocation, and tools see that.
  void* workspace(size_t size_bytes);
  static constexpr size_t kWorkspaceBytes = size_t{64} << 20;
  /// Of the host's memory, that upload() copies through; CUDA only.
  static constexpr size_t kUploadBytes = size_t{16} << 20;

  /// CUDA only: cuBLASLt with what it has chosen so far; for blas.cu.
  Blas& blas();

 private:
  Device(DeviceKind kind, int ordinal) : kind_(kind), ordinal_(ordinal) {}

  DeviceKind kind_;
  int ordinal_;
  void* stream_ = nullptr;
  void* workspace_ = nullptr;
  void* uploads_ = nullptr;
  Blas* blas_ = nullptr;
};

/// CUDA devices that this process can use: 0 when built with CUDA=0, without a driver, or without a GPU.
int cuda_device_count();
