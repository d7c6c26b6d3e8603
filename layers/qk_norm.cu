// The norm of q and k on CUDA. Contract: qk_norm.h; the CPU loops that specify it: qk_norm.cpp; what a team of threads
// does with a norm: rmsnorm_row.cuh.
//
// Work: a block has a token, its teams take the norms of the token in turn, then all threads copy v. An element that
//   rotates needs its partner r/2 away, which is normed again by who needs it: it is in L1.
//
// Bytes from DRAM, of the least possible (N = NH + 2 NKV heads; a norm is read twice, the second time from L1 or L2):
//     forward:  reads qkv, writes y                2 T N HD sizeof(T)                    the minimum
//     backward: reads q, k and dy, writes dqkv     T (3 N - NKV) HD sizeof(T)            the minimum
//     rotation: reads cos, sin                     T r/2 8                               the minimum; a pass of its own
//                                                  over q and k would read and write     2 T (N - NKV) r sizeof(T) more
//               dw: partial sums written and read  2 blocks (widths of q and k) 4, at most 512 blocks: at 16384 tokens
//                                                  in bf16 less than 1% for norms of heads, 3% for full ones
#include "layers/qk_norm.h"

#include "layers/rmsnorm_row.cuh"

namespace {

using namespace rmsnorm;

/// The angles of one token, for rows that are whole heads.
template <int kWidth>
struct HeadRotation {
  const float *cos, *sin;  // (half)
  int half, head_dim;
  bool interleaved;

  /// Pairs of packs where kWidth > 1: half is made of whole packs then. `sign`: 1, or -1 for the gradient.
  template <class ElementsAt>
  __device__ __forceinline__ void operator()(float (&to)[kWidth], int c, float sign,
                                             const ElementsAt& elements_at) const {
    elements_at(to, c);
    const int d = c % head_dim;
    if (d >= 2 * half) return;
    if (kWidth > 1 && interleaved) {
      float ck[kWidth / 2 + (kWidth == 1)], sk[kWidth / 2 + (kWidth == 1)];
      load_floats(ck, cos + d / 2), load_floats(sk, sin + d / 2);
      for (int k = 0; k < kWidth / 2; k++) {
        const float x0 = to[2 * k], x1 = to[2 * k + 1];
        to[2 * k] = x0 * ck[k] - sign * x1 * sk[k];
        to[2 * k + 1] = x1 * ck[k] + sign * x0 * sk[k];
      }
      return;
    }
    const bool is_first = interleaved ? d % 2 == 0 : d < half;
    const int distance = interleaved ? 1 : half, m = interleaved ? d / 2 : is_first ? d : d - half;
    float partner[kWidth], ck[kWidth], sk[kWidth];
    elements_at(partner, is_first ? c + distance : c - distance);
    load_floats(ck, cos + m), load_floats(sk, sin + m);
    const float turn = is_first ? -sign : sign;
    for (int k = 0; k < kWidth; k++) to[k] = to[k] * ck[k] + turn * partner[k] * sk[k];
  }
};

/// Rotation, for kernels: the tables of all tokens.
struct Tables {
  const float *cos, *sin;  // (T, half)
  int half;
  bool interleaved;

  explicit Tables(const Rotation& rotation)
      : cos(rotation ? rotation.cos.as<float>() : nullptr),
        sin(rotation ? rotation.sin.as<float>() : nullptr),
        half(static_cast<int>(rotation.half())),
        interleaved(rotation.interleaved) {}

  template <int kWidth>
  __device__ __forceinline__ HeadRotation<kWidth> of_token(int64_t t, int64_t head_dim) const {
    return {cos + t * half, sin + t * half, half, static_cast<int>(head_dim), interleaved};
  }
};

/// to <- from: v of a token, by all threads of the block.
template <class T, int kWidth>
__device__ __forceinline__ void copy_v(T* to, const T* from, const QkNormShape& shape) {
  for (int c = threadIdx.x * kWidth; c < shape.v_width(); c += kThreads * kWidth) {
    store_pack<kWidth>(to + shape.v_begin() + c, load_pack<kWidth>(from + shape.v_begin() + c));
  }
}

// A block a token. y, qkv (T, NH + 2 NKV, HD), rstd (T, num_norms).
template <class T, int kWidth, int kTeam>
__global__ void __launch_bounds__(kThreads)
    qk_norm_forward_kernel(T* y, float* rstd, const T* qkv, const T* q_weight, const T* k_weight, QkNormShape shape,
                           float eps, NormKind kind, Tables tables) {
  const HeadRotation<kWidth> rotate = tables.of_token<kWidth>(blockIdx.x, shape.head_dim);
  const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  T* yt = y + blockIdx.x * shape.token_width();
  const T* xt = qkv + blockIdx.x * shape.token_width();
  for (int64_t i = team; i < shape.num_norms(); i += kThreads / kTeam) {
    const auto [begin, width, is_k] = shape.norm(i);
    const float s =
        row_forward<T, kWidth, kTeam, false, false>(yt + begin, xt + begin, is_k ? k_weight : q_weight,
                                                    static_cast<int>(width), eps, kind, lane, nullptr, nullptr, rotate);
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
                            int q_slots_per_lane, int slots_per_lane, Tables tables) {
  static_assert(kInShared || kTeam == kThreads);
  const int lane = threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  float* partial_of_block = partial + int64_t{blockIdx.x} * slots_per_lane * kTeam;
  float* sums = (kInShared ? dynamic_shared<float>() : partial_of_block) + threadIdx.x;
  for (int i = 0; i < slots_per_lane; i++) sums[i * kThreads] = 0;

  const int num_norms = static_cast<int>(shape.num_norms());
  const int64_t end = (int64_t{blockIdx.x} + 1) * num_tokens / gridDim.x;
  for (int64_t t = blockIdx.x * num_tokens / gridDim.x; t < end; t++) {
    const int64_t token = t * shape.token_width();
    const HeadRotation<kWidth> rotate = tables.of_token<kWidth>(t, shape.head_dim);
    for (int i = team; i < num_norms; i += kThreads / kTeam) {
      const auto [begin, width, is_k] = shape.norm(i);
      const int64_t at = token + begin;
      row_backward<T, kWidth, kTeam>(dqkv + at, is_k ? sums + q_slots_per_lane * kThreads : sums, dy + at, qkv + at,
                                     rstd[t * num_norms + i], is_k ? k_weight : q_weight, static_cast<int>(width), kind,
                                     lane, nullptr, rotate);
    }
    copy_v<T, kWidth>(dqkv + token, dy + token, shape);
  }
  if constexpr (kInShared) add_teams<kTeam>(partial_of_block, dynamic_shared<float>(), slots_per_lane);
}

/// Calls `op` with the element type and the width as constants; `pointers` and the pairs that rotate decide on the
/// width.
template <class Op>
void dispatch(const QkNormShape& shape, const Rotation& rotation, DType dtype,
              std::initializer_list<const void*> pointers, Op&& op) {
  dispatch_cuda(dtype, "qk_norm", [&]<class T>(T) {
    const bool packable = is_packable<T>(shape.head_dim, pointers) &&
                          is_packable<T>(rotation.half(), {rotation.cos.data, rotation.sin.data});
    packable ? op.template operator()<T, kPackWidth<T>>() : op.template operator()<T, 1>();
  });
}

}  // namespace

void qk_norm_forward_cuda(Device& device, Tensor y, Tensor rstd, ConstTensor qkv, ConstTensor q_weight,
                          ConstTensor k_weight, const QkNormShape& shape, double eps, NormKind kind,
                          const Rotation& rotation) {
  dispatch(shape, rotation, qkv.dtype, {y.data, qkv.data, q_weight.data, k_weight.data}, [&]<class T, int kWidth>() {
    const auto run = [&]<int kTeam>(std::integral_constant<int, kTeam>, auto) {
      launch(device, {qkv.shape[0], kThreads}, qk_norm_forward_kernel<T, kWidth, kTeam>, y.as<T>(), rstd.as<float>(),
             qkv.as<T>(), q_weight.as<T>(), k_weight.as<T>(), shape, static_cast<float>(eps), kind, Tables(rotation));
    };
    with_team(row_length(std::max(shape.q_width(), shape.k_width())), 0, run);
  });
}

void qk_norm_backward_cuda(Device& device, Tensor dqkv, Tensor dq_weight, Tensor dk_weight, ConstTensor dy,
                           ConstTensor qkv, ConstTensor rstd, ConstTensor q_weight, ConstTensor k_weight,
                           const QkNormShape& shape, NormKind kind, const Rotation& rotation) {
  const int64_t num_tokens = qkv.shape[0];
  const int q_width = row_length(shape.q_width()), k_width = row_length(shape.k_width());
  if (num_tokens == 0) return;
  dispatch(
      shape, rotation, qkv.dtype, {dqkv.data, dy.data, qkv.data, q_weight.data, k_weight.data},
      [&]<class T, int kWidth>() {
        const auto slots_of = [&](int team) {
          return std::pair(SlotLayout::of(q_width, kWidth, team), SlotLayout::of(k_width, kWidth, team));
        };
        const auto run = [&]<int kTeam, bool kInShared>(std::integral_constant<int, kTeam>,
                                                        std::bool_constant<kInShared>) {
          const auto [q_slots, k_slots] = slots_of(kTeam);
          const int64_t num_slots = q_slots.size() + k_slots.size(),
                        slots_per_lane = q_slots.per_lane + k_slots.per_lane;
          const size_t partial_bytes = static_cast<size_t>(num_slots) * sizeof(float);
          const int64_t blocks = backward_blocks(num_tokens, 1, partial_bytes);
          float* partial = static_cast<float*>(device.workspace(static_cast<size_t>(blocks) * partial_bytes));
          const size_t shared = kInShared ? static_cast<size_t>(slots_per_lane) * kThreads * sizeof(float) : 0;
          launch(device, {blocks, kThreads, shared}, qk_norm_backward_kernel<T, kWidth, kTeam, kInShared>, dqkv.as<T>(),
                 partial, dy.as<T>(), qkv.as<T>(), rstd.as<float>(), q_weight.as<T>(), k_weight.as<T>(), num_tokens,
                 shape, kind, static_cast<int>(q_slots.per_lane), static_cast<int>(slots_per_lane), Tables(rotation));
          add_partials(device, dq_weight.as<float>(), partial, blocks, num_slots, q_width, q_slots);
          add_partials(device, dk_weight.as<float>(), partial + q_slots.size(), blocks, num_slots, k_width, k_slots);
        };
        const auto [q_slots, k_slots] = slots_of(kThreads);
        with_team(std::max(q_width, k_width), q_slots.size() + k_slots.size(), run);
      });
}
