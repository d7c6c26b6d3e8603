// The norm of q and k on CUDA. Contract: qk_norm.h; the CPU loops that specify it: qk_norm.cpp; what a team of threads
// does with a norm: rmsnorm_row.cuh.
//
// Work: a block has a token, its teams take the norms of the token in turn, then all threads copy v.
//
// Bytes from DRAM, of the least possible (N = NH + 2 NKV heads; a norm is read twice, the second time from L1 or L2):
//     forward:  reads qkv, writes y                2 T N HD sizeof(T)                    the minimum
//     backward: reads q, k and dy, writes dqkv     T (3 N - NKV) HD sizeof(T)            the minimum
//               v stays where dqkv is dy           T (3 N - 3 NKV) HD sizeof(T)          the minimum
//               dw: partial sums written and read  2 blocks (widths of q and k) 4, at most 512 blocks: at 16384 tokens
//                                                  in bf16 less than 1% for norms of heads, 3% for full ones
#include "layers/qk_norm.h"

#include "layers/rmsnorm_row.cuh"

namespace {

using namespace rmsnorm;

/// to <- from: v of a token, by all threads of the block.
template <class T, int kWidth>
__device__ __forceinline__ void copy_v(T* to, const T* from, const QkNormShape& shape) {
  if (to == from) return;
  for (int c = threadIdx.x * kWidth; c < shape.v_width(); c += kThreads * kWidth) {
    store_pack<kWidth>(to + shape.v_begin() + c, load_pack<kWidth>(from + shape.v_begin() + c));
  }
}

// A block a token. y, qkv (T, NH + 2 NKV, HD), rstd (T, num_norms).
template <class T, int kWidth, int kTeam>
__global__ void __launch_bounds__(kThreads)
    qk_norm_forward_kernel(T* y, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, QkNormShape shape,
                           float eps, NormKind kind) {
  const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  T* yt = y + blockIdx.x * shape.token_width();
  const T* xt = qkv + blockIdx.x * shape.token_width();
  for (int64_t i = team; i < shape.num_norms(); i += kThreads / kTeam) {
    const auto [begin, width, is_k] = shape.norm(i);
    const float s = row_forward<T, kWidth, kTeam>(yt + begin, xt + begin, is_k ? k_weight : q_weight,
                                                  static_cast<int>(width), eps, kind, lane);
    if (lane == 0) rstd[blockIdx.x * shape.num_norms() + i] = s;
  }
  copy_v<T, kWidth>(yt, xt, shape);
}

// A block a contiguous range of tokens. `partial` (blocks, slots of q then slots of k): the block's dw, summed in
// shared memory, (slots of a lane, kThreads), where a thread touches its own column only; or in `partial` itself if
// that is too long (a team is a block there).
template <class T, int kWidth, int kTeam, bool kInShared>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    qk_norm_backward_kernel(T* dqkv, float* partial, const T* dy, const T* qkv, const float* rstd, const T* q_weight,
                            const T* k_weight, int64_t num_tokens, QkNormShape shape, NormKind kind,
                            int q_slots_per_lane, int slots_per_lane) {
  static_assert(kInShared || kTeam == kThreads);
  const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  float* partial_of_block = partial + int64_t{blockIdx.x} * slots_per_lane * kTeam;
  float* sums = (kInShared ? dynamic_shared<float>() : partial_of_block) + threadIdx.x;
  for (int i = 0; i < slots_per_lane; i++) sums[i * kThreads] = 0;

  const int num_norms = static_cast<int>(shape.num_norms());
  const int64_t end = (int64_t{blockIdx.x} + 1) * num_tokens / gridDim.x;
  for (int64_t t = blockIdx.x * num_tokens / gridDim.x; t < end; t++) {
    const int64_t token = t * shape.token_width();
    for (int i = team; i < num_norms; i += kThreads / kTeam) {
      const auto [begin, width, is_k] = shape.norm(i);
      const int64_t at = token + begin;
      row_backward<T, kWidth, kTeam>(dqkv + at, is_k ? sums + q_slots_per_lane * kThreads : sums, dy + at, qkv + at,
                                     rstd[t * num_norms + i], is_k ? k_weight : q_weight, static_cast<int>(width), kind,
                                     lane);
    }
    copy_v<T, kWidth>(dqkv + token, dy + token, shape);
  }
  if constexpr (kInShared) add_teams<kTeam>(partial_of_block, dynamic_shared<float>(), slots_per_lane);
}

/// Calls `op` with the element type and the width as constants; `pointers` decide on the width.
template <class Op>
void dispatch(const QkNormShape& shape, DType dtype, std::initializer_list<const void*> pointers, Op&& op) {
  dispatch_cuda(dtype, "qk_norm", [&]<class T>(T) {
    is_packable<T>(shape.head_dim, pointers) ? op.template operator()<T, kPackWidth<T>>()
                                             : op.template operator()<T, 1>();
  });
}

}  // namespace

void qk_norm_forward_cuda(Device& device, Tensor y, Tensor rstd, ConstTensor qkv, ConstTensor q_weight,
                          ConstTensor k_weight, const QkNormShape& shape, double eps, NormKind kind) {
  dispatch(shape, qkv.dtype, {y.data, qkv.data, q_weight.data, k_weight.data}, [&]<class T, int kWidth>() {
    const auto run = [&]<int kTeam>(std::integral_constant<int, kTeam>, auto) {
      launch(device, {qkv.shape[0], kThreads}, qk_norm_forward_kernel<T, kWidth, kTeam>, y.as<T>(), rstd.as<float>(),
             qkv.as<T>(), q_weight.as<T>(), k_weight.as<T>(), shape, static_cast<float>(eps), kind);
    };
    with_team(row_length(std::max(shape.q_width(), shape.k_width())), 0, run);
  });
}

void qk_norm_backward_cuda(Device& device, Tensor dqkv, Tensor dq_weight, Tensor dk_weight, ConstTensor dy,
                           ConstTensor qkv, ConstTensor rstd, ConstTensor q_weight, ConstTensor k_weight,
                           const QkNormShape& shape, NormKind kind) {
  const int64_t num_tokens = qkv.shape[0];
  const int q_width = row_length(shape.q_width()), k_width = row_length(shape.k_width());
  if (num_tokens == 0) return;
  dispatch(shape, qkv.dtype, {dqkv.data, dy.data, qkv.data, q_weight.data, k_weight.data}, [&]<class T, int kWidth>() {
    const auto slots_of = [&](int team) {
      return std::pair(SlotLayout::of(q_width, kWidth, team), SlotLayout::of(k_width, kWidth, team));
    };
    const auto run = [&]<int kTeam, bool kInShared>(std::integral_constant<int, kTeam>, std::bool_constant<kInShared>) {
      const auto [q_slots, k_slots] = slots_of(kTeam);
      const int64_t num_slots = q_slots.size() + k_slots.size(), slots_per_lane = q_slots.per_lane + k_slots.per_lane;
      const size_t partial_bytes = static_cast<size_t>(num_slots) * sizeof(float);
      const int64_t blocks = backward_blocks(num_tokens, 1, partial_bytes);
      float* partial = static_cast<float*>(device.workspace(static_cast<size_t>(blocks) * partial_bytes));
      const size_t shared = kInShared ? static_cast<size_t>(slots_per_lane) * kThreads * sizeof(float) : 0;
      launch(device, {blocks, kThreads, shared}, qk_norm_backward_kernel<T, kWidth, kTeam, kInShared>, dqkv.as<T>(),
             partial, dy.as<T>(), qkv.as<T>(), rstd.as<float>(), q_weight.as<T>(), k_weight.as<T>(), num_tokens, shape,
             kind, static_cast<int>(q_slots.per_lane), static_cast<int>(slots_per_lane));
      add_partials(device, dq_weight.as<float>(), partial, blocks, num_slots, q_width, q_slots);
      add_partials(device, dk_weight.as<float>(), partial + q_slots.size(), blocks, num_slots, k_width, k_slots);
    };
    const auto [q_slots, k_slots] = slots_of(kThreads);
    with_team(std::max(q_width, k_width), q_slots.size() + k_slots.size(), run);
  });
}
