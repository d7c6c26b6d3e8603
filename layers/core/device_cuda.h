// The CUDA half of Device, defined in device.cu and called only where kHasCuda. No CUDA type crosses this seam.
#pragma once

#include <cstddef>

struct Blas;

int cuda_count_devices();
void* cuda_open(int ordinal);  ///< selects the device, returns its compute stream
void cuda_close(void* stream) noexcept;
void* cuda_allocate(size_t size_bytes);  ///< contents undefined
void cuda_deallocate(void* data) noexcept;
void cuda_fill_zero(void* data, size_t size_bytes, void* stream);
void cuda_copy(void* to, const void* from, size_t size_bytes, void* stream);  ///< either direction, waits
void cuda_synchronize(void* stream);

// blas.cu
Blas* cuda_open_blas();  ///< of the selected device
void cuda_close_blas(Blas* blas) noexcept;
