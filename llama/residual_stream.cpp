#include "llama/residual_stream.h"

ResidualStream::ResidualStream(Arena& arena, DType dtype, int64_t max_tokens, int64_t C, int64_t num_layers,
                               bool offload, Device& device)
    : num_layers_(num_layers), size_bytes_(static_cast<size_t>(max_tokens * C) * size_of(dtype)), offload_(offload) {
  const int64_t count = offload ? std::min<int64_t>(2, num_layers + 1) : num_layers + 1;
  for (int64_t i = 0; i < count; i++) buffers_.push_back(arena.place(dtype, {max_tokens, C}, "h"));
  if (!offload || arena.measures_only()) return;
  host_ = std::make_unique<HostBuffer>(device, offloaded_bytes(dtype, max_tokens, C, num_layers), 2);
}

size_t ResidualStream::offloaded_bytes(DType dtype, int64_t max_tokens, int64_t C, int64_t num_layers) {
  return static_cast<size_t>(num_offloaded(num_layers) * max_tokens * C) * size_of(dtype);
}

Tensor ResidualStream::written(int64_t l, int64_t T) const {
  return buffers_.at(static_cast<size_t>(offload_ ? l % 2 : l)).rows(0, T);
}

Tensor ResidualStream::write(int64_t l, int64_t T) {
  if (host_) host_->wait(slot(l));  // until h_{l-2} is on the host
  return written(l, T);
}

void ResidualStream::keep(int64_t l, int64_t T) {
  const Tensor h = written(l, T);
  if (is_offloaded(l)) host_->start_copy(slot(l), on_host(l), h.data, h.size_bytes());
}

void ResidualStream::fetch(int64_t l, int64_t T) {
  const Tensor h = written(l, T);
  if (is_offloaded(l)) host_->start_copy(slot(l), h.data, on_host(l), h.size_bytes());
}

Tensor ResidualStream::fetched(int64_t l, int64_t T) {
  if (is_offloaded(l)) host_->wait(slot(l));
  return written(l, T);
}
