#include "layers/core/arena.h"

#include <algorithm>

Arena::Arena(Device& device, size_t capacity_bytes)
    : device_(&device), base_(static_cast<char*>(device.allocate(capacity_bytes))), capacity_bytes_(capacity_bytes) {}

Arena::~Arena() {
  if (device_) device_->deallocate(base_, capacity_bytes_);
}

Tensor Arena::place(DType dtype, Shape shape, std::string name) {
  const size_t exact = static_cast<size_t>(shape.numel()) * size_of(dtype);
  const size_t padded = (exact + kAlignment - 1) / kAlignment * kAlignment;
  CHECK(measures_only() || used_bytes_ + padded <= capacity_bytes_,
        "the arena is full: '{}' {} {} of section '{}' needs {} bytes, {} of {} are used (the plan and the run differ)",
        name, name_of(dtype), shape.str(), section_, padded, used_bytes_, capacity_bytes_);
  void* data = measures_only() ? nullptr : base_ + used_bytes_;
  used_bytes_ += padded;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  entries_.push_back({section_, name, shape, dtype, padded});
  names_.push_back(std::move(name));
  return {data, dtype, shape, names_.back().c_str()};
}
