// ResidualStream: h_0 .. h_L of (T, C), the inputs of the L blocks and the output of the last. The forward makes them
// in this order, the backward reads them from the last to the first.
//
// Offloaded, they lie in pinned memory of the host, and the GPU has room for two: h_l is in buffer l % 2. What moves
// while block l computes:
//
//   forward    h_l -> h_{l+1}    h_l to the host; h_{L-1} and h_L stay, the backward begins with them
//   backward   reads h_l         h_{l-1} from the host
#pragma once

#include <memory>
#include <vector>

#include "layers/core/arena.h"
#include "layers/core/host_buffer.h"

class ResidualStream {
 public:
  /// `max_tokens`: of the largest T. Offload is for a CUDA device.
  ResidualStream(Arena& arena, DType dtype, int64_t max_tokens, int64_t C, int64_t num_layers, bool offload,
                 Device& device);
  /// Of the host, that offload takes.
  static size_t offloaded_bytes(DType dtype, int64_t max_tokens, int64_t C, int64_t num_layers);

  /// The first T tokens of h_l, for the forward to write.
  Tensor write(int64_t l, int64_t T);
  /// h_l once it is written, in the forward; in the backward h_L only.
  Tensor written(int64_t l, int64_t T) const;
  /// When h_l is written and before h_{l+2} is: keeps it for the backward.
  void keep(int64_t l, int64_t T);
  /// Starts to bring back h_l, l < L, for the backward. h_{l+2} is not read any more.
  void fetch(int64_t l, int64_t T);
  /// h_l, fetched.
  Tensor fetched(int64_t l, int64_t T);

 private:
  static int64_t num_offloaded(int64_t num_layers) { return num_layers > 1 ? num_layers - 1 : 0; }
  bool is_offloaded(int64_t l) const { return host_ && l < num_offloaded(num_layers_); }
  int slot(int64_t l) const { return static_cast<int>(l % 2); }
  char* on_host(int64_t l) const { return host_->data() + static_cast<size_t>(l) * size_bytes_; }

  int64_t num_layers_;
  size_t size_bytes_;            // of an h_l on the host
  std::vector<Tensor> buffers_;  // (max_tokens, C): of each h_l, or 2
  bool offload_;
  std::unique_ptr<HostBuffer> host_;
};
