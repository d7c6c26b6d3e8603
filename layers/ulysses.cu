// The Ulysses layouts on CUDA. Contract: ulysses.h; the CPU loops that specify them: ulysses.cpp.
//
// Work: a block has the heads of one part in one token; its threads move them a pack at a time (a pack: 128 bits, or
// one
//   element where the head or a pointer does not allow more). The parts of a token are neighbours in the grid, so that
//   what several of them read is in L2. Every output has one writer: a kv head that parts share is written by the first
//   of them, which adds the others to its own in their order, in fp32, and rounds once.
//
// Bytes from DRAM, each the minimum (h = part_qkv_heads):
//   pack_qkv, unpack_dqkv:     P Ts h HD sizeof(T) on the side of the parts, Ts (NH + 2 NKV) HD sizeof(T) on the other
//   unpack_heads, pack_heads:  2 Ts NH HD sizeof(T)
#include "layers/ulysses.h"

#include "layers/core/cuda_util.cuh"

namespace {

constexpr int kMaxThreads = 256;  // of a block

/// What a block does: token t of a part.
struct Place {
  int64_t t;
  unsigned part;

  __device__ __forceinline__ explicit Place(unsigned parts) : t(blockIdx.x / parts), part(blockIdx.x % parts) {}
};

/// The element of a token's qkv that element c of a part's token is.
__device__ __forceinline__ int64_t whole_element(const UlyssesShape& s, const UlyssesShape::HeadRuns& runs, int64_t c) {
  const UlyssesShape::HeadRun& run = c < runs.k.part_head * s.head_dim   ? runs.q
                                     : c < runs.v.part_head * s.head_dim ? runs.k
                                                                         : runs.v;
  return c + (run.head - run.part_head) * s.head_dim;
}

// sent (P, Ts, part_width) <- qkv (Ts, token_width).
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    ulysses_pack_qkv_kernel(T* sent, const T* qkv, int64_t Ts, int64_t token_width, int64_t part_width,
                            UlyssesShape s) {
  const Place at(static_cast<unsigned>(s.parts));
  const UlyssesShape::HeadRuns runs = s.runs(at.part);
  T* to = sent + (at.part * Ts + at.t) * part_width;
  const T* from = qkv + at.t * token_width;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < part_width; c += blockDim.x * kWidth) {
    store_pack<kWidth>(to + c, load_pack<kWidth>(from + whole_element(s, runs, c)));
  }
}

// dqkv (Ts, token_width) <- received (P, Ts, part_width). The parts that share kv heads have them at the same c.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    ulysses_unpack_dqkv_kernel(T* dqkv, const T* received, int64_t Ts, int64_t token_width, int64_t part_width,
                               UlyssesShape s) {
  const Place at(static_cast<unsigned>(s.parts));
  const UlyssesShape::HeadRuns runs = s.runs(at.part);
  const int64_t next_part = Ts * part_width;
  T* to = dqkv + at.t * token_width;
  const T* from = received + at.part * next_part + at.t * part_width;
  const int sharers = static_cast<int>(s.sharers());
  const bool is_first = at.part % sharers == 0;
  const int64_t q_width = runs.q.count * s.head_dim, width = is_first ? part_width : q_width;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < width; c += blockDim.x * kWidth) {
    Pack<T, kWidth> pack = load_pack<kWidth>(from + c);
    if (c >= q_width && sharers > 1) {
      float sum[kWidth];
      for (int k = 0; k < kWidth; k++) sum[k] = to_float(pack.element[k]);
      for (int i = 1; i < sharers; i++) {
        const Pack<T, kWidth> other = load_pack<kWidth>(from + i * next_part + c);
        for (int k = 0; k < kWidth; k++) sum[k] += to_float(other.element[k]);
      }
      for (int k = 0; k < kWidth; k++) pack.element[k] = from_float<T>(sum[k]);
    }
    store_pack<kWidth>(to + whole_element(s, runs, c), pack);
  }
}

// to (B, A, width) <- from (A, B, width): heads are unpacked with A = P parts, B = Ts tokens, and packed the other way.
// A block has one (a, b).
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    ulysses_swap_kernel(T* to, const T* from, int64_t num_a, int64_t num_b, int64_t width) {
  const int64_t a = blockIdx.x / num_b, b = blockIdx.x % num_b;
  to += (b * num_a + a) * width;
  from += (a * num_b + b) * width;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < width; c += blockDim.x * kWidth) {
    store_pack<kWidth>(to + c, load_pack<kWidth>(from + c));
  }
}

/// Calls `op` with the element type and the width as constants, for runs of `width` elements; `pointers` decide too.
template <class Op>
void dispatch(DType dtype, int64_t width, std::initializer_list<const void*> pointers, Op&& op) {
  dispatch_cuda(dtype, "ulysses", [&]<class T>(T) {
    is_packable<T>(width, pointers) ? op.template operator()<T, kPackWidth<T>>() : op.template operator()<T, 1>();
  });
}

/// A block for each of `num_blocks` runs of `width` elements.
template <int kWidth>
LaunchShape grid(int64_t num_blocks, int64_t width) {
  return {num_blocks, block_threads(ceil_div(width, kWidth), kMaxThreads)};
}

void swap(Device& device, Tensor to, ConstTensor from, int64_t num_a, int64_t num_b, int64_t width) {
  dispatch(to.dtype, width, {to.data, from.data}, [&]<class T, int kWidth>() {
    launch(device, grid<kWidth>(num_a * num_b, width), ulysses_swap_kernel<T, kWidth>, to.as<T>(), from.as<T>(), num_a,
           num_b, width);
  });
}

}  // namespace

void ulysses_pack_qkv_cuda(Device& device, Tensor sent, ConstTensor qkv, const UlyssesShape& shape) {
  const int64_t Ts = qkv.shape[0], D = shape.head_dim;
  const int64_t token_width = qkv.shape[1] * D, part_width = shape.part_qkv_heads() * D;
  dispatch(qkv.dtype, D, {sent.data, qkv.data}, [&]<class T, int kWidth>() {
    launch(device, grid<kWidth>(shape.parts * Ts, part_width), ulysses_pack_qkv_kernel<T, kWidth>, sent.as<T>(),
           qkv.as<T>(), Ts, token_width, part_width, shape);
  });
}

void ulysses_unpack_dqkv_cuda(Device& device, Tensor dqkv, ConstTensor received, const UlyssesShape& shape) {
  const int64_t Ts = dqkv.shape[0], D = shape.head_dim;
  const int64_t token_width = dqkv.shape[1] * D, part_width = shape.part_qkv_heads() * D;
  dispatch(dqkv.dtype, D, {dqkv.data, received.data}, [&]<class T, int kWidth>() {
    launch(device, grid<kWidth>(shape.parts * Ts, part_width), ulysses_unpack_dqkv_kernel<T, kWidth>, dqkv.as<T>(),
           received.as<T>(), Ts, token_width, part_width, shape);
  });
}

void ulysses_unpack_heads_cuda(Device& device, Tensor o, ConstTensor received, const UlyssesShape& shape) {
  swap(device, o, received, shape.parts, o.shape[0], shape.part_heads() * shape.head_dim);
}

void ulysses_pack_heads_cuda(Device& device, Tensor sent, ConstTensor d_o, const UlyssesShape& shape) {
  swap(device, sent, d_o, d_o.shape[0], shape.parts, shape.part_heads() * shape.head_dim);
}
