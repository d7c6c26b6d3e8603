// The gate of the MLP on CUDA. Contract: gated_act.h; formulas and the CPU loops that specify it: gated_act.cpp.
//
// Work: a row is cut into blocks; a thread has one pack of gate and the pack of up that belongs to it (a pack: 128
//   bits, or one element where F or a pointer does not allow more). It reads all it needs before it writes, and nobody
//   else touches these elements; so d_gate_up may be gate_up.
//
// Bytes from DRAM, each the minimum:
//   forward:  reads gate_up, writes y                  3 T F sizeof(T)
//   backward: reads gate_up and dy, writes d_gate_up   5 T F sizeof(T)
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/gated_act.h"

namespace {

constexpr int kMaxThreads = 256;  // of a block

/// z, its sigmoid(a(z)) and a'(z).
struct GateAt {
  float z, sigmoid, slope;

  __device__ __forceinline__ float act() const { return z * sigmoid; }
};

template <GateKind kKind>
__device__ __forceinline__ GateAt gate_at(float z) {
  constexpr float kTwoSqrtTwoOverPi = 1.5957691216057308f, kCubic = 0.044715f;
  float a = z, slope = 1;
  if constexpr (kKind == GateKind::GeluTanh) {
    a = kTwoSqrtTwoOverPi * z * (1.0f + kCubic * z * z);
    slope = kTwoSqrtTwoOverPi * (1.0f + 3 * kCubic * z * z);
  }
  return {z, 1.0f / (1.0f + expf(-a)), slope};
}

/// The pack of this thread: row t, columns [f, f + kWidth) of F. Block b has the (b % blocks_per_row)-th part of a row.
template <int kWidth>
struct Place {
  int64_t t, f;

  __device__ __forceinline__ explicit Place(unsigned blocks_per_row)
      : t(blockIdx.x / blocks_per_row), f((int64_t{blockIdx.x % blocks_per_row} * blockDim.x + threadIdx.x) * kWidth) {}
};

// y = act(gate) up
template <GateKind kKind, class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    gated_act_forward_kernel(T* y, const T* gate_up, int64_t F, unsigned blocks_per_row) {
  const Place<kWidth> at(blocks_per_row);
  if (at.f >= F) return;
  const T* gate = gate_up + at.t * 2 * F + at.f;
  const Pack<T, kWidth> zp = load_pack<kWidth>(gate), up = load_pack<kWidth>(gate + F);
  Pack<T, kWidth> yp;
  for (int k = 0; k < kWidth; k++) {
    yp.element[k] = from_float<T>(gate_at<kKind>(to_float(zp.element[k])).act() * to_float(up.element[k]));
  }
  store_pack<kWidth>(y + at.t * F + at.f, yp);
}

// y = act(z) up with act = z s, s = sigmoid(a(z)):   dup = dy act(z)   dz = dy up (s + z s (1 - s) a'(z))
template <GateKind kKind, class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    gated_act_backward_kernel(T* d_gate_up, const T* dy, const T* gate_up, int64_t F, unsigned blocks_per_row) {
  const Place<kWidth> at(blocks_per_row);
  if (at.f >= F) return;
  const T* gate = gate_up + at.t * 2 * F + at.f;
  const Pack<T, kWidth> zp = load_pack<kWidth>(gate), up = load_pack<kWidth>(gate + F),
                        dyp = load_pack<kWidth>(dy + at.t * F + at.f);
  Pack<T, kWidth> dzp, dup;
  for (int k = 0; k < kWidth; k++) {
    const GateAt g = gate_at<kKind>(to_float(zp.element[k]));
    const float dyk = to_float(dyp.element[k]);
    dup.element[k] = from_float<T>(dyk * g.act());
    dzp.element[k] =
        from_float<T>(dyk * to_float(up.element[k]) * (g.sigmoid + g.act() * (1.0f - g.sigmoid) * g.slope));
  }
  T* d_gate = d_gate_up + at.t * 2 * F + at.f;
  store_pack<kWidth>(d_gate, dzp);
  store_pack<kWidth>(d_gate + F, dup);
}

/// Blocks for rows of F elements, `kWidth` a thread.
struct Grid {
  unsigned threads, blocks_per_row;

  Grid(int64_t F, int width)
      : threads(block_threads(ceil_div(F, width), kMaxThreads)),
        blocks_per_row(static_cast<unsigned>(ceil_div(F, int64_t{width} * threads))) {}
  LaunchShape rows(int64_t num_tokens) const { return {num_tokens * blocks_per_row, threads}; }
};

/// Calls `op` with the element type, the kind and the width as constants; `pointers` decide on the width.
template <class Op>
void dispatch(DType dtype, GateKind kind, int64_t F, std::initializer_list<const void*> pointers, Op&& op) {
  dispatch_cuda(dtype, "gated_act", [&]<class T>(T) {
    const auto with_width = [&]<GateKind kKind>() {
      is_packable<T>(F, pointers) ? op.template operator()<kKind, T, kPackWidth<T>>()
                                  : op.template operator()<kKind, T, 1>();
    };
    if (kind == GateKind::Silu) return with_width.template operator()<GateKind::Silu>();
    with_width.template operator()<GateKind::GeluTanh>();
  });
}

}  // namespace

void gated_act_forward_cuda(Device& device, Tensor y, ConstTensor gate_up, const Gate& gate, ConstTensor row_weights) {
  CHECK(gate.kind != GateKind::Clamped && !row_weights, "gated_act: experts have no CUDA kernels yet");
  const int64_t num_tokens = y.shape[0], F = y.shape[1];
  dispatch(y.dtype, gate.kind, F, {y.data, gate_up.data}, [&]<GateKind kKind, class T, int kWidth>() {
    const Grid grid(F, kWidth);
    launch(device, grid.rows(num_tokens), gated_act_forward_kernel<kKind, T, kWidth>, y.as<T>(), gate_up.as<T>(), F,
           grid.blocks_per_row);
  });
}

void gated_act_backward_cuda(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, const Gate& gate,
                             ConstTensor row_weights, Tensor) {
  CHECK(gate.kind != GateKind::Clamped && !row_weights, "gated_act: experts have no CUDA kernels yet");
  const int64_t num_tokens = dy.shape[0], F = dy.shape[1];
  dispatch(dy.dtype, gate.kind, F, {d_gate_up.data, dy.data, gate_up.data}, [&]<GateKind kKind, class T, int kWidth>() {
    const Grid grid(F, kWidth);
    launch(device, grid.rows(num_tokens), gated_act_backward_kernel<kKind, T, kWidth>, d_gate_up.as<T>(), dy.as<T>(),
           gate_up.as<T>(), F, grid.blocks_per_row);
  });
}
