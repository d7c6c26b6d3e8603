// Tensors of any device, a part at a time in the memory of the host: how files and generators fill and read them. On
// the CPU a part is the tensor's own memory.
#pragma once

#include <algorithm>
#include <vector>

#include "layers/core/device.h"
#include "layers/core/tensor.h"

constexpr int64_t kHostPart = int64_t{1} << 22;  // elements

namespace detail {

/// Calls op(part of the host, the same of the device, first element).
template <class Op>
void for_each_part(Device& device, Tensor t, Op&& op) {
  std::vector<char> buffer;
  for (int64_t begin = 0; begin < t.numel(); begin += kHostPart) {
    const Tensor part = t.rows(begin, std::min(kHostPart, t.numel() - begin));
    Tensor on_host = part;
    if (device.is_cuda()) {
      buffer.resize(part.size_bytes());
      on_host.data = buffer.data();
    }
    op(on_host, part, begin);
  }
}

}  // namespace detail

/// op(part, begin) writes elements [begin, begin + part.numel()) of the flat tensor `t`.
template <class Op>
void write_through_host(Device& device, Tensor t, Op&& op) {
  detail::for_each_part(device, t, [&](Tensor on_host, Tensor part, int64_t begin) {
    op(on_host, begin);
    if (device.is_cuda()) device.copy_from_host(part.data, on_host.data, part.size_bytes());
  });
}

/// op(part, begin) reads them.
template <class Op>
void read_through_host(Device& device, Tensor t, Op&& op) {
  detail::for_each_part(device, t, [&](Tensor on_host, Tensor part, int64_t begin) {
    if (device.is_cuda()) device.copy_to_host(on_host.data, part.data, part.size_bytes());
    op(ConstTensor(on_host), begin);
  });
}
