// The layouts of latent attention on CUDA. Contract: mla.h; the CPU loops that specify it: mla.cpp.
//
// Work: a thread moves one pack (128 bits, or one element where a width or a pointer does not allow more) of the
// result;
//   a block has packs of one token. The sum over the heads of dk_rope: a thread a pack, the heads in order.
//
// Bytes from DRAM, of the least possible (E = sizeof(T)); k_rope is read NH times, from L1 or L2:
//     assemble:  reads q, kv, k_rope, writes qkv      T (NH (HD + dn + dv) + dr + 3 NH HD) E         the minimum
//     backward:  reads dqkv (v without its padding)   T (NH (2 HD + dv) + NH (HD + dn + dv) + dr) E  the minimum
//     narrow:    T NH 2 dv E      widen:  T NH (dv + HD) E                                           the minimum
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/mla.h"

namespace {

constexpr int kMaxThreads = 256;

/// MlaShape, in packs, for kernels.
struct Widths {
  int heads, nope, rope, v, head_dim;
};

template <int kWidth, class T>
__device__ __forceinline__ Pack<T, kWidth> pack_at(const T* row, int pack) {
  return load_pack<kWidth>(row + int64_t{pack} * kWidth);
}

// A block a token; thread i has packs i, i + blockDim.x, ... of its 3 NH HD.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    mla_assemble_kernel(T* qkv, const T* q, const T* kv, const T* k_rope, Widths w) {
  const int64_t t = blockIdx.x;
  const int row = w.heads * w.head_dim, kv_width = w.nope + w.v;
  const T* const qt = q + t * row * kWidth;
  const T* const kvt = kv + t * w.heads * kv_width * kWidth;
  const T* const rope = k_rope + t * w.rope * kWidth;
  T* const to = qkv + t * 3 * row * kWidth;
  for (int i = threadIdx.x; i < 3 * row; i += blockDim.x) {
    const int head = i % row / w.head_dim, c = i % w.head_dim;
    Pack<T, kWidth> pack = {};
    if (i < row) {
      pack = pack_at<kWidth>(qt, head * w.head_dim + (c < w.rope ? w.nope + c : c - w.rope));
    } else if (i < 2 * row) {
      pack = c < w.rope ? pack_at<kWidth>(rope, c) : pack_at<kWidth>(kvt, head * kv_width + c - w.rope);
    } else if (c < w.v) {
      pack = pack_at<kWidth>(kvt, head * kv_width + w.nope + c);
    }
    store_pack<kWidth>(to + int64_t{i} * kWidth, pack);
  }
}

// A block a token; thread i has packs i, i + blockDim.x, ... of dq, dkv and dk_rope, one after the other.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    mla_assemble_backward_kernel(T* dq, T* dkv, T* dk_rope, const T* dqkv, Widths w) {
  const int64_t t = blockIdx.x;
  const int row = w.heads * w.head_dim, kv_width = w.nope + w.v, kv_row = w.heads * kv_width;
  const T* const from = dqkv + t * 3 * row * kWidth;
  for (int i = threadIdx.x; i < row + kv_row + w.rope; i += blockDim.x) {
    if (i < row) {
      const int head = i / w.head_dim, c = i % w.head_dim;
      const auto pack = pack_at<kWidth>(from, head * w.head_dim + (c < w.nope ? w.rope + c : c - w.nope));
      store_pack<kWidth>(dq + (t * row + i) * kWidth, pack);
    } else if (i < row + kv_row) {
      const int j = i - row, head = j / kv_width, c = j % kv_width;
      const int at = c < w.nope ? row + head * w.head_dim + w.rope + c : 2 * row + head * w.head_dim + c - w.nope;
      store_pack<kWidth>(dkv + (t * kv_row + j) * kWidth, pack_at<kWidth>(from, at));
    } else {
      const int c = i - row - kv_row;
      float sum[kWidth] = {};
      for (int head = 0; head < w.heads; head++) {
        const auto pack = pack_at<kWidth>(from, row + head * w.head_dim + c);
        for (int k = 0; k < kWidth; k++) sum[k] += to_float(pack.element[k]);
      }
      store_floats(dk_rope + (t * w.rope + c) * kWidth, sum);
    }
  }
}

// to (rows, to_width) <- from (rows, from_width), in packs: the first of each row, then zeros. A pack a thread.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    mla_resize_kernel(T* to, const T* from, int64_t num_packs, int to_width, int from_width) {
  const int64_t i = int64_t{blockIdx.x} * kMaxThreads + threadIdx.x;
  if (i >= num_packs) return;
  const int c = static_cast<int>(i % to_width);
  Pack<T, kWidth> pack = {};
  if (c < from_width) pack = load_pack<kWidth>(from + (i / to_width * from_width + c) * kWidth);
  store_pack<kWidth>(to + i * kWidth, pack);
}

/// Calls `op` with the element type, the width of a pack, and the shape in packs.
template <class Op>
void dispatch(DType dtype, const MlaShape& s, std::initializer_list<const void*> pointers, Op&& op) {
  constexpr int64_t kMax = int64_t{1} << 24;
  CHECK(s.num_heads * s.head_dim() <= kMax, "mla: {} heads of {}, the CUDA kernels allow {} elements of a token",
        s.num_heads, s.head_dim(), kMax);
  dispatch_cuda(dtype, "mla", [&]<class T>(T) {
    const bool packable = is_packable<T>(s.nope, pointers) && is_packable<T>(s.rope, {}) && is_packable<T>(s.v, {});
    const auto with_width = [&]<int kWidth>() {
      const auto packs = [](int64_t n) { return static_cast<int>(n / kWidth); };
      op.template operator()<T, kWidth>(
          Widths{static_cast<int>(s.num_heads), packs(s.nope), packs(s.rope), packs(s.v), packs(s.head_dim())});
    };
    packable ? with_width.template operator()<kPackWidth<T>>() : with_width.template operator()<1>();
  });
}

void resize(Device& device, Tensor to, ConstTensor from, const MlaShape& shape, int64_t to_width, int64_t from_width) {
  dispatch(to.dtype, shape, {to.data, from.data}, [&]<class T, int kWidth>(const Widths&) {
    const int64_t num_packs = to.numel() / kWidth;
    launch(device, {ceil_div(num_packs, kMaxThreads), kMaxThreads}, mla_resize_kernel<T, kWidth>, to.as<T>(),
           from.as<T>(), num_packs, static_cast<int>(to_width / kWidth), static_cast<int>(from_width / kWidth));
  });
}

}  // namespace

void mla_assemble_cuda(Device& device, Tensor qkv, ConstTensor q, ConstTensor kv, ConstTensor k_rope,
                       const MlaShape& shape) {
  dispatch(qkv.dtype, shape, {qkv.data, q.data, kv.data, k_rope.data}, [&]<class T, int kWidth>(const Widths& w) {
    launch(device, {qkv.shape[0], kMaxThreads}, mla_assemble_kernel<T, kWidth>, qkv.as<T>(), q.as<T>(), kv.as<T>(),
           k_rope.as<T>(), w);
  });
}

void mla_assemble_backward_cuda(Device& device, Tensor dq, Tensor dkv, Tensor dk_rope, ConstTensor dqkv,
                                const MlaShape& shape) {
  dispatch(dqkv.dtype, shape, {dq.data, dkv.data, dk_rope.data, dqkv.data}, [&]<class T, int kWidth>(const Widths& w) {
    launch(device, {dqkv.shape[0], kMaxThreads}, mla_assemble_backward_kernel<T, kWidth>, dq.as<T>(), dkv.as<T>(),
           dk_rope.as<T>(), dqkv.as<T>(), w);
  });
}

void mla_narrow_cuda(Device& device, Tensor narrow, ConstTensor wide, const MlaShape& shape) {
  resize(device, narrow, wide, shape, shape.v, shape.head_dim());
}

void mla_widen_cuda(Device& device, Tensor wide, ConstTensor narrow, const MlaShape& shape) {
  resize(device, wide, narrow, shape, shape.head_dim(), shape.v);
}
