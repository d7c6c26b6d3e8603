// The CUDA half of Device, defined in device.cu and called only where kHasCuda. No CUDA type crosses this seam.
#pragma once

#include <cstddef>
#include <string>

struct Blas;

int cuda_count_devices();
void* cuda_open(int ordinal);  ///< selects the device, returns its compute stream
void cuda_close(void* stream) noexcept;
std::string cuda_bus_id(int ordinal);
double cuda_peak_flops(int ordinal, bool is_bf16);
void* cuda_allocate(size_t size_bytes);  ///< contents undefined
void cuda_deallocate(void* data) noexcept;
void cuda_fill_zero(void* data, size_t size_bytes, void* stream);
void cuda_copy(void* to, const void* from, size_t size_bytes, void* stream);        ///< either direction, waits
void cuda_queue_copy(void* to, const void* from, size_t size_bytes, void* stream);  ///< within the device
void cuda_synchronize(void* stream);
struct CudaMemory {
  size_t free_bytes = 0, total_bytes = 0;
};
CudaMemory cuda_memory();

void* cuda_open_uploads();
void cuda_close_uploads(void* uploads) noexcept;
/// Queues a copy of `from`, which is free when the call returns.
void cuda_upload(void* uploads, void* to, const void* from, size_t size_bytes, void* stream);

// host_buffer.cu
void* cuda_allocate_pinned(size_t size_bytes);
void cuda_deallocate_pinned(void* data) noexcept;
void* cuda_open_copies(void* compute_stream, int num_slots);
void cuda_close_copies(void* copies) noexcept;  ///< waits for them
void cuda_start_copy(void* copies, int slot, void* to, const void* from, size_t size_bytes);
void cuda_wait_for_copies(void* copies, int slot);

// blas.cu
Blas* cuda_open_blas();  ///< of the selected device
void cuda_close_blas(Blas* blas) noexcept;
