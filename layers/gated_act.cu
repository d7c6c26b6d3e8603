// The gate of the MLP on CUDA. Contract: gated_act.h; formulas and the CPU loops that specify it: gated_act.cpp.
//
// Work: a row is cut into blocks; a thread has one pack of gate and the pack of up that belongs to it (a pack: 128
//   bits, or one element where F or a pointer does not allow more). It reads all it needs before it writes, and nobody
//   else touches these elements; so d_gate_up may be gate_up. A backward with weights of rows gives a row to one block,
//   for the gradient of its weight is a sum over the row: of a thread's packs in order, then of the threads.
//
// Bytes from DRAM, each the minimum (weights and their gradients are 4 bytes a row):
//   forward:  reads gate_up, writes y                  3 T F sizeof(T)
//   backward: reads gate_up and dy, writes d_gate_up   5 T F sizeof(T)
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/gated_act.h"

namespace {

constexpr int kMaxThreads = 256;  // of a block
constexpr int kRowThreads = 128;  // of a block that has a row: experts are narrow

/// What Clamped is told.
struct Clamp {
  float alpha, limit;
};

/// act(gate) up of one element, and its derivatives.
struct Gated {
  float y, by_gate, by_up;
};

// act = z s, s = sigmoid(a(z)):   by up: act;   by gate: up (s + z s (1 - s) a'(z))
template <GateKind kKind>
__device__ __forceinline__ Gated gated(float z, float up, const Clamp& clamp) {
  constexpr float kTwoSqrtTwoOverPi = 1.5957691216057308f, kCubic = 0.044715f;
  bool gate_moves = true, up_moves = true;  // on the limit itself too
  float a = z, slope = 1;
  if constexpr (kKind == GateKind::GeluTanh) {
    a = kTwoSqrtTwoOverPi * z * (1.0f + kCubic * z * z);
    slope = kTwoSqrtTwoOverPi * (1.0f + 3 * kCubic * z * z);
  } else if constexpr (kKind == GateKind::Clamped) {
    gate_moves = z <= clamp.limit, up_moves = up >= -clamp.limit && up <= clamp.limit;
    z = z < clamp.limit ? z : clamp.limit;
    up = (up < -clamp.limit ? -clamp.limit : up > clamp.limit ? clamp.limit : up) + 1.0f;
    a = clamp.alpha * z, slope = clamp.alpha;
  }
  const float s = sigmoid(a), act = z * s;
  return {act * up, gate_moves ? up * (s + act * (1.0f - s) * slope) : 0.0f, up_moves ? act : 0.0f};
}

/// The two packs of columns [f, f + kWidth): gates, then ups; or gate and up by turns.
template <GateKind kKind>
struct Columns {
  static constexpr bool kInterleaved = kKind == GateKind::Clamped;
  int64_t first, second;  ///< in a row of 2 F elements

  template <int kWidth>
  static __device__ __forceinline__ Columns at(int64_t f, int64_t F) {
    return kInterleaved ? Columns{2 * f, 2 * f + kWidth} : Columns{f, F + f};
  }
  /// The gate, or the up, of column k of the packs.
  template <int kWidth>
  static __device__ __forceinline__ float& gate(float (&packs)[2][kWidth], int k) {
    return kInterleaved ? packs[2 * k / kWidth][2 * k % kWidth] : packs[0][k];
  }
  template <int kWidth>
  static __device__ __forceinline__ float& up(float (&packs)[2][kWidth], int k) {
    return kInterleaved ? packs[(2 * k + 1) / kWidth][(2 * k + 1) % kWidth] : packs[1][k];
  }
};

/// y (F) = weight act(gate) up, columns [f, f + kWidth) of a row.
template <class T, int kWidth, GateKind kKind>
__device__ __forceinline__ void columns_forward(T* y, const T* gate_up, int64_t f, int64_t F, float weight,
                                                const Clamp& clamp) {
  const auto at = Columns<kKind>::template at<kWidth>(f, F);
  float in[2][kWidth], out[kWidth];
  load_floats(in[0], gate_up + at.first);
  load_floats(in[1], gate_up + at.second);
#pragma unroll
  for (int k = 0; k < kWidth; k++) {
    out[k] = weight * gated<kKind>(Columns<kKind>::gate(in, k), Columns<kKind>::up(in, k), clamp).y;
  }
  store_floats(y + f, out);
}

/// d_gate_up (2 F) <- dy (F), columns [f, f + kWidth) of a row; returns the sum of dy act(gate) up over them.
template <class T, int kWidth, GateKind kKind>
__device__ __forceinline__ float columns_backward(T* d_gate_up, const T* dy, const T* gate_up, int64_t f, int64_t F,
                                                  float weight, const Clamp& clamp) {
  const auto at = Columns<kKind>::template at<kWidth>(f, F);
  float in[2][kWidth], dyk[kWidth], d_weight = 0;
  load_floats(in[0], gate_up + at.first);
  load_floats(in[1], gate_up + at.second);
  load_floats(dyk, dy + f);
#pragma unroll
  for (int k = 0; k < kWidth; k++) {
    const Gated g = gated<kKind>(Columns<kKind>::gate(in, k), Columns<kKind>::up(in, k), clamp);
    Columns<kKind>::gate(in, k) = weight * dyk[k] * g.by_gate;
    Columns<kKind>::up(in, k) = weight * dyk[k] * g.by_up;
    d_weight += dyk[k] * g.y;
  }
  store_floats(d_gate_up + at.first, in[0]);
  store_floats(d_gate_up + at.second, in[1]);
  return d_weight;
}

/// The pack of this thread: row t, columns [f, f + kWidth) of F. Block b has the (b % blocks_per_row)-th part of a row.
template <int kWidth>
struct Place {
  int64_t t, f;

  __device__ __forceinline__ explicit Place(unsigned blocks_per_row)
      : t(blockIdx.x / blocks_per_row), f((int64_t{blockIdx.x % blocks_per_row} * blockDim.x + threadIdx.x) * kWidth) {}
};

// row_weights (T) or null: all 1.
template <class T, int kWidth, GateKind kKind>
__global__ void __launch_bounds__(kMaxThreads)
    gated_act_forward_kernel(T* y, const T* gate_up, const float* row_weights, int64_t F, unsigned blocks_per_row,
                             Clamp clamp) {
  const Place<kWidth> at(blocks_per_row);
  if (at.f >= F) return;
  const float weight = row_weights ? row_weights[at.t] : 1.0f;
  columns_forward<T, kWidth, kKind>(y + at.t * F, gate_up + at.t * 2 * F, at.f, F, weight, clamp);
}

template <class T, int kWidth, GateKind kKind>
__global__ void __launch_bounds__(kMaxThreads)
    gated_act_backward_kernel(T* d_gate_up, const T* dy, const T* gate_up, int64_t F, unsigned blocks_per_row,
                              Clamp clamp) {
  const Place<kWidth> at(blocks_per_row);
  if (at.f >= F) return;
  columns_backward<T, kWidth, kKind>(d_gate_up + at.t * 2 * F, dy + at.t * F, gate_up + at.t * 2 * F, at.f, F, 1.0f,
                                     clamp);
}

// A block a row. d_row_weights (T) = dy . act(gate) up.
template <class T, int kWidth, GateKind kKind>
__global__ void __launch_bounds__(kRowThreads)
    gated_act_weighted_backward_kernel(T* d_gate_up, float* d_row_weights, const T* dy, const T* gate_up,
                                       const float* row_weights, int64_t F, Clamp clamp) {
  const int64_t t = blockIdx.x;
  const float weight = row_weights[t];
  float d_weight = 0;
#pragma unroll 1
  for (int64_t f = int64_t{threadIdx.x} * kWidth; f < F; f += kRowThreads * kWidth) {
    d_weight +=
        columns_backward<T, kWidth, kKind>(d_gate_up + t * 2 * F, dy + t * F, gate_up + t * 2 * F, f, F, weight, clamp);
  }
  d_weight = block_sum<kRowThreads>(d_weight);
  if (threadIdx.x == 0) d_row_weights[t] = d_weight;
}

/// Blocks for rows of F elements, `kWidth` a thread.
struct Grid {
  unsigned threads, blocks_per_row;

  Grid(int64_t F, int width)
      : threads(block_threads(ceil_div(F, width), kMaxThreads)),
        blocks_per_row(static_cast<unsigned>(ceil_div(F, int64_t{width} * threads))) {}
  LaunchShape rows(int64_t num_tokens) const { return {num_tokens * blocks_per_row, threads}; }
};

/// Calls `op` with the element type, the width and the kind as constants; `pointers` decide on the width.
template <class Op>
void dispatch(DType dtype, GateKind kind, int64_t F, std::initializer_list<const void*> pointers, Op&& op) {
  dispatch_cuda(dtype, "gated_act", [&]<class T>(T) {
    const auto with_width = [&]<GateKind kKind>() {
      is_packable<T>(F, pointers) ? op.template operator()<T, kPackWidth<T>, kKind>()
                                  : op.template operator()<T, 1, kKind>();
    };
    switch (kind) {
      case GateKind::Silu:
        return with_width.template operator()<GateKind::Silu>();
      case GateKind::GeluTanh:
        return with_width.template operator()<GateKind::GeluTanh>();
      case GateKind::Clamped:
        return with_width.template operator()<GateKind::Clamped>();
    }
  });
}

Clamp clamp_of(const Gate& gate) {
  return {static_cast<float>(gate.alpha), static_cast<float>(gate.limit)};
}

}  // namespace

void gated_act_forward_cuda(Device& device, Tensor y, ConstTensor gate_up, const Gate& gate, ConstTensor row_weights) {
  const int64_t num_tokens = y.shape[0], F = y.shape[1];
  dispatch(y.dtype, gate.kind, F, {y.data, gate_up.data}, [&]<class T, int kWidth, GateKind kKind>() {
    const Grid grid(F, kWidth);
    launch(device, grid.rows(num_tokens), gated_act_forward_kernel<T, kWidth, kKind>, y.as<T>(), gate_up.as<T>(),
           row_weights ? row_weights.as<float>() : nullptr, F, grid.blocks_per_row, clamp_of(gate));
  });
}

void gated_act_backward_cuda(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, const Gate& gate,
                             ConstTensor row_weights, Tensor d_row_weights) {
  const int64_t num_tokens = dy.shape[0], F = dy.shape[1];
  const std::initializer_list<const void*> pointers = {d_gate_up.data, dy.data, gate_up.data};
  dispatch(dy.dtype, gate.kind, F, pointers, [&]<class T, int kWidth, GateKind kKind>() {
    if (row_weights) {
      launch(device, {num_tokens, kRowThreads}, gated_act_weighted_backward_kernel<T, kWidth, kKind>, d_gate_up.as<T>(),
             d_row_weights.as<float>(), dy.as<T>(), gate_up.as<T>(), row_weights.as<float>(), F, clamp_of(gate));
      return;
    }
    const Grid grid(F, kWidth);
    launch(device, grid.rows(num_tokens), gated_act_backward_kernel<T, kWidth, kKind>, d_gate_up.as<T>(), dy.as<T>(),
           gate_up.as<T>(), F, grid.blocks_per_row, clamp_of(gate));
  });
}
