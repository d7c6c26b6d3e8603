// The rows of a mixture of experts on CUDA: to the experts, back, and the gradients of what is added there. Contract:
// moe.h; the CPU loops that specify it: moe.cpp. Who goes where: moe.cu.
//
// Work: a block has a token, its threads a pack each (a pack: 128 bits, or one element where C or a pointer does not
//   allow more). Every element has one writer, who reads all that it needs before; so `to` may be the addend. A token
//   is read once and written k times, or the other way round: rows are contiguous, so that either side moves whole
//   lines.
//
// Bytes from DRAM, for T tokens, R = T k rows of C elements:
//   gather             reads T C, writes R C               the minimum
//   combine            reads R C, writes T C, and T C a term; biases (E, C) stay in L2
//                                                          the minimum
//   bias backward      reads d_to for the weights T C, for the biases R C at most (what L2 does not hold); biases stay
//                      in L2; the minimum is T C
//   shared gate        reads 2 T C, writes T C             the minimum
#include "layers/column_sums.h"
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/moe.h"

namespace {

constexpr int kMaxThreads = 256;                              // of a block that has a token
constexpr int kThreads = 128, kWarps = kThreads / kWarpSize;  // of a block that sums

// to (R, C): row rows[t k + i] = from (T, C) at t.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    route_gather_kernel(T* to, const T* from, const int32_t* rows, int k, int64_t C) {
  const int64_t t = blockIdx.x;
  rows += t * k;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < C; c += blockDim.x * kWidth) {
    const Pack<T, kWidth> pack = load_pack<kWidth>(from + t * C + c);
    for (int i = 0; i < k; i++) store_pack<kWidth>(to + rows[i] * C + c, pack);
  }
}

/// CombineTerms in T.
template <class T>
struct Terms {
  const T *bias, *shared, *shared_gate, *addend;
};

/// sum += factor x.
template <int kWidth, class T>
__device__ __forceinline__ void add(float (&sum)[kWidth], float factor, const T* x) {
  float value[kWidth];
  load_floats(value, x);
  for (int j = 0; j < kWidth; j++) sum[j] += factor * value[j];
}

// to (T, C) = rows of the token + w bias + gate shared + addend, in that order.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    route_combine_kernel(T* to, const T* from, const int32_t* experts, const int32_t* rows, const float* row_weights,
                         Terms<T> terms, int k, int64_t C) {
  const int64_t t = blockIdx.x;
  rows += t * k, experts += t * k;
  const float gate = terms.shared_gate ? sigmoid(to_float(terms.shared_gate[t])) : 1.0f;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < C; c += blockDim.x * kWidth) {
    float sum[kWidth] = {};
#pragma unroll 4
    for (int i = 0; i < k; i++) add(sum, 1.0f, from + rows[i] * C + c);
    for (int i = 0; terms.bias && i < k; i++) add(sum, row_weights[rows[i]], terms.bias + experts[i] * C + c);
    if (terms.shared) add(sum, gate, terms.shared + t * C + c);
    if (terms.addend) add(sum, 1.0f, terms.addend + t * C + c);
    store_floats(to + t * C + c, sum);
  }
}

/// a . b, each (C), by all lanes of a warp; the lanes' sums are added in a fixed order.
template <int kWidth, class T>
__device__ __forceinline__ float warp_dot(const T* a, const T* b, int64_t C) {
  float sum = 0;
#pragma unroll 4
  for (int64_t c = lane_index() * kWidth; c < C; c += kWarpSize * kWidth) {
    float ak[kWidth], bk[kWidth];
    load_floats(ak, a + c);
    load_floats(bk, b + c);
    for (int j = 0; j < kWidth; j++) sum += ak[j] * bk[j];
  }
  return warp_sum(sum);
}

// d_row_weights (R) += d_to of the row's token . bias of its expert. A warp a token, whose row of d_to stays in L1.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    route_bias_weights_kernel(float* d_row_weights, const T* d_to, const T* bias, const int32_t* experts,
                              const int32_t* rows, int64_t num_tokens, int k, int64_t C) {
  const int64_t t = int64_t{blockIdx.x} * kWarps + warp_index();
  if (t >= num_tokens) return;  // all lanes of a warp alike
  for (int i = 0; i < k; i++) {
    const float d_weight = warp_dot<kWidth>(d_to + t * C, bias + experts[t * k + i] * C, C);
    if (lane_index() == 0) d_row_weights[rows[t * k + i]] += d_weight;
  }
}

// A block a token: y = s shared, s = sigmoid(gate):   d_shared = s dy     d_gate = (dy . shared) s (1 - s)
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    shared_gate_backward_kernel(T* d_shared, T* d_gate, const T* d_to, const T* shared, const T* gate, int64_t C) {
  const int64_t t = blockIdx.x;
  const float s = sigmoid(to_float(gate[t]));
  float sum = 0;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < C; c += kThreads * kWidth) {
    float d[kWidth], x[kWidth];
    load_floats(d, d_to + t * C + c);
    load_floats(x, shared + t * C + c);
    for (int j = 0; j < kWidth; j++) {
      sum += d[j] * x[j];
      d[j] *= s;
    }
    store_floats(d_shared + t * C + c, d);
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) d_gate[t] = from_float<T>(sum * s * (1.0f - s));
}

/// Calls `op` with the element type and the width as constants, for rows of C elements; `pointers` decide too.
template <class Op>
void dispatch(DType dtype, int64_t C, std::initializer_list<const void*> pointers, Op&& op) {
  dispatch_cuda(dtype, "moe", [&]<class T>(T) {
    is_packable<T>(C, pointers) ? op.template operator()<T, kPackWidth<T>>() : op.template operator()<T, 1>();
  });
}

/// A block for each of T tokens of C elements.
template <int kWidth>
LaunchShape on_tokens(int64_t T, int64_t C) {
  return {T, block_threads(ceil_div(C, kWidth), kMaxThreads)};
}

int top_k(const Routing& routing) {
  return static_cast<int>(routing.experts.shape[1]);
}

}  // namespace

void route_gather_cuda(Device& device, Tensor to, ConstTensor from, const Routing& routing) {
  const int64_t C = from.shape[1];
  dispatch(from.dtype, C, {to.data, from.data}, [&]<class T, int kWidth>() {
    launch(device, on_tokens<kWidth>(from.shape[0], C), route_gather_kernel<T, kWidth>, to.as<T>(), from.as<T>(),
           routing.rows.as<int32_t>(), top_k(routing), C);
  });
}

void route_combine_cuda(Device& device, Tensor to, ConstTensor from, const Routing& routing,
                        const CombineTerms& terms) {
  const int64_t C = from.shape[1];
  const auto pointers = {ConstTensor(to).data, from.data, terms.bias.data, terms.shared.data, terms.addend.data};
  dispatch(from.dtype, C, pointers, [&]<class T, int kWidth>() {
    const auto pointer = [](const ConstTensor& t) { return t ? t.as<T>() : nullptr; };
    const Terms<T> in = {pointer(terms.bias), pointer(terms.shared), pointer(terms.shared_gate), pointer(terms.addend)};
    launch(device, on_tokens<kWidth>(to.shape[0], C), route_combine_kernel<T, kWidth>, to.as<T>(), from.as<T>(),
           routing.experts.as<int32_t>(), routing.rows.as<int32_t>(), routing.row_weights.as<float>(), in,
           top_k(routing), C);
  });
}

void route_bias_backward_cuda(Device& device, Tensor d_bias, Tensor d_row_weights, ConstTensor d_to, ConstTensor bias,
                              const Routing& routing) {
  const int64_t T_ = d_to.shape[0], C = d_to.shape[1];
  dispatch(d_to.dtype, C, {d_to.data, bias.data}, [&]<class T, int kWidth>() {
    launch(device, {ceil_div(T_, kWarps), kThreads}, route_bias_weights_kernel<T, kWidth>, d_row_weights.as<float>(),
           d_to.as<T>(), bias.as<T>(), routing.experts.as<int32_t>(), routing.rows.as<int32_t>(), T_, top_k(routing),
           C);
  });
  add_column_sums_cuda(
      device, d_bias, d_to, routing.slots.numel(),
      {routing.offsets.as<int32_t>(), routing.slots.as<int32_t>(), routing.row_weights.as<float>(), top_k(routing)});
}

void shared_gate_backward_cuda(Device& device, Tensor d_shared, Tensor d_gate, ConstTensor d_to, ConstTensor shared,
                               ConstTensor gate) {
  const int64_t C = d_to.shape[1];
  dispatch(d_to.dtype, C, {d_shared.data, d_to.data, shared.data}, [&]<class T, int kWidth>() {
    launch(device, {d_to.shape[0], kThreads}, shared_gate_backward_kernel<T, kWidth>, d_shared.as<T>(), d_gate.as<T>(),
           d_to.as<T>(), shared.as<T>(), gate.as<T>(), C);
  });
}
