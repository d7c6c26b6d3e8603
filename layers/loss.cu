// LM head and cross-entropy on CUDA: products by cuBLASLt, the rest by kernels. Contract and formulas: loss.h; the CPU
// loops that specify it: loss.cpp.
//
// A tile of rows that have a target runs
//   x_tile -> u = x W^T, fp32 (GEMM) -> nll and du (loss_row_kernel) -> dw +=, dx_tile (GEMMs) -> dx
//
// The rows of a last tile are filled up with zeros to a multiple of 64: batches differ in their number of targets, and
//   cuBLASLt should not have to choose algorithms for every number.
//
// Bytes from DRAM, of the least possible, for a tile of n rows and T = bf16 or fp32:
//   loss_row_kernel      reads u, writes du   n V (4 + sizeof(T))     the minimum, while the rows that run at a time
//   stay
//                        in L2 from the first pass to the second: V to 47000 on an H100 (264 rows, 50 MB); the part of
//                        longer rows that does not is read twice, 10 bytes for 6 at worst in bf16
//   loss_gather_kernel   reads and writes     2 n C sizeof(T)         the minimum of a copy
//   loss_scatter_kernel  the same, or for rows without a target writes C sizeof(T)
//   loss_sum_kernel      reads 8 n            the minimum
#include "layers/loss.h"

#include <algorithm>
#include <limits>

#include "layers/core/blas.h"
#include "layers/core/cuda_util.cuh"
#include "layers/core/integer.h"
#include "layers/linear.h"
#include "layers/loss_scratch.h"

namespace {

constexpr int kRowThreads = 1024;  // a block a row of V
constexpr int kMoveThreads = 128;  // a block a row of C
constexpr int kSumThreads = 256;
constexpr int64_t kGranule = 64;  // of the rows of a tile that is not full

// From u = x W^T to the logits of loss.h. `inverse` is 1 / cap, or 0 for none.
struct LogitMap {
  float scale, cap, inverse;

  explicit LogitMap(const LossShape& shape)
      : scale(static_cast<float>(shape.logit_scale)),
        cap(static_cast<float>(shape.softcap)),
        inverse(shape.softcap > 0 ? static_cast<float>(1 / shape.softcap) : 0.0f) {}

  __device__ __forceinline__ float of(float u) const { return cap > 0 ? cap * tanhf(u * scale * inverse) : u * scale; }
  /// The derivative by u, but for the factor `scale`, by the logit.
  __device__ __forceinline__ float slope(float logit) const { return 1.0f - (logit * inverse) * (logit * inverse); }
};

/// z = the logits of u, kWidth neighbours.
template <int kWidth>
__device__ __forceinline__ void load_logits(float (&z)[kWidth], const float* u, const LogitMap& map) {
  constexpr int kLoad = kWidth == 1 ? 1 : kPackWidth<float>;
  for (int j = 0; j < kWidth; j += kLoad) {
    const Pack<float, kLoad> pack = load_pack<kLoad>(u + j);
    for (int k = 0; k < kLoad; k++) z[j + k] = map.of(pack.element[k]);
  }
}

// A row of u = x W^T (rows, V), a block each; z are its logits. The first `num_targets` rows:
//   nll = log sum_v exp(z_v - max) + max - z_target         du_v = ((exp(z_v - max) / sum) - onehot_v) scale slope(z_v)
// with `scale` the product of grad_scale and the scale of the logits. The others fill a tile up: du = 0. A thread sums
// its own columns below its own maximum, rescaled when that grows; then all maxima and sums are brought together. du
// may be null, or u itself: a thread writes what only it reads.
template <class T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    loss_row_kernel(double* nll, T* du, const float* u, const int32_t* rows, const int32_t* targets,
                    int64_t num_targets, int V, LogitMap map, float scale) {
  const int64_t i = blockIdx.x;
  const float* ur = u + i * V;
  if (i >= num_targets) {
    const Pack<T, kWidth> zero = {};
    for (int v = threadIdx.x * kWidth; v < V; v += kRowThreads * kWidth) store_pack<kWidth>(du + i * V + v, zero);
    return;
  }
  float max = -std::numeric_limits<float>::max(), sum = 0;
  for (int v = threadIdx.x * kWidth; v < V; v += kRowThreads * kWidth) {
    float z[kWidth];
    load_logits(z, ur + v, map);
    float grown = max;
    for (int k = 0; k < kWidth; k++) grown = fmaxf(grown, z[k]);
    if (grown > max) {
      sum *= expf(max - grown);
      max = grown;
    }
    for (int k = 0; k < kWidth; k++) sum += expf(z[k] - max);
  }
  const int target = targets[rows[i]];
  const float zt = map.of(ur[target]);  // before the barriers: du, which may be u, is written after them
  const float row_max = block_max<kRowThreads>(max);
  const float row_sum = block_sum<kRowThreads>(sum * expf(max - row_max));
  if (threadIdx.x == 0) {
    nll[i] = log(static_cast<double>(row_sum)) + (static_cast<double>(row_max) - static_cast<double>(zt));
  }
  if (!du) return;
  const float to_gradient = scale / row_sum;
  for (int v = threadIdx.x * kWidth; v < V; v += kRowThreads * kWidth) {
    float z[kWidth];
    load_logits(z, ur + v, map);
    Pack<T, kWidth> dup;
    for (int k = 0; k < kWidth; k++) {
      const float onehot = v + k == target ? scale : 0.0f;
      dup.element[k] = from_float<T>((expf(z[k] - row_max) * to_gradient - onehot) * map.slope(z[k]));
    }
    store_pack<kWidth>(du + i * V + v, dup);
  }
}

// logits[rows[i]] = those of u[i]; a block a row of V. For debugging only: scalar accesses.
__global__ void __launch_bounds__(kRowThreads)
    loss_logits_kernel(float* logits, const float* u, const int32_t* rows, int V, LogitMap map) {
  const float* ur = u + int64_t{blockIdx.x} * V;
  float* to = logits + int64_t{rows[blockIdx.x]} * V;
  for (int v = threadIdx.x; v < V; v += kRowThreads) to[v] = map.of(ur[v]);
}

// to[i] = from[rows[i]] for the first num_rows blocks, 0 for the others; a block a row of C.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMoveThreads)
    loss_gather_kernel(T* to, const T* from, const int32_t* rows, int64_t num_rows, int64_t C) {
  const int64_t i = blockIdx.x;
  const T* row = i < num_rows ? from + rows[i] * C : nullptr;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < C; c += kMoveThreads * kWidth) {
    store_pack<kWidth>(to + i * C + c, row ? load_pack<kWidth>(row + c) : Pack<T, kWidth>{});
  }
}

// to[rows[i]] = from[i], or 0 where `from` is null; a block a row of C.
template <class T, int kWidth>
__global__ void __launch_bounds__(kMoveThreads)
    loss_scatter_kernel(T* to, const T* from, const int32_t* rows, int64_t C) {
  const int64_t i = blockIdx.x;
  T* row = to + rows[i] * C;
  for (int64_t c = int64_t{threadIdx.x} * kWidth; c < C; c += kMoveThreads * kWidth) {
    store_pack<kWidth>(row + c, from ? load_pack<kWidth>(from + i * C + c) : Pack<T, kWidth>{});
  }
}

// nll (1) += of_row (n), one block: thread t sums t, t + kSumThreads, ..., then thread 0 the threads' sums in order.
__global__ void __launch_bounds__(kSumThreads) loss_sum_kernel(double* nll, const double* of_row, int64_t n) {
  __shared__ double sums[kSumThreads];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kSumThreads) sum += of_row[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0;
  for (int t = 0; t < kSumThreads; t++) sum += sums[t];
  *nll += sum;
}

/// The arguments of loss_cuda, in T.
template <class T>
class Run {
 public:
  Run(Device& device, Tensor dx, Tensor dw, ConstTensor x, ConstTensor w, ConstTensor targets, const LossRows& rows,
      double grad_scale, const LossShape& shape, Tensor workspace, Tensor logits)
      : device_(device),
        dx_(dx),
        dw_(dw),
        logits_(logits),
        x_(x),
        w_(w),
        targets_(targets.as<int32_t>()),
        order_(rows.rows.as<int32_t>()),
        num_targets_(rows.num_targets),
        V_(static_cast<int>(w.shape[0])),
        map_(shape),
        scale_(static_cast<float>(grad_scale * shape.logit_scale)),
        scratch_(workspace.data, shape, x.dtype, x.shape[0], x.shape[1], w.shape[0]) {
    constexpr int64_t kMax = int64_t{1} << 30;
    CHECK(w.shape[0] <= kMax, "loss: a vocabulary of {}, the CUDA kernels allow {}", w.shape[0], kMax);
  }

  // Rows without a target come first: their x is read before dx, which may be the same memory, is written.
  void operator()(Tensor nll) {
    const int64_t T_ = x_.shape[0], tile = scratch_.tile;
    for (int64_t begin = num_targets_; logits_ && begin < T_; begin += tile) {
      const int64_t count = std::min(tile, T_ - begin);
      make_logits(begin, count, count);
    }
    for (int64_t begin = 0; begin < num_targets_; begin += tile) {
      const int64_t count = std::min(tile, num_targets_ - begin);
      loss_tile(begin, count, std::min(tile, round_up(count, kGranule)));
    }
    if (dx_) scatter({}, num_targets_, T_ - num_targets_);
    if (num_targets_ == 0) return;
    launch(device_, {1, kSumThreads}, loss_sum_kernel, nll.as<double>(), scratch_.nll.template as<double>(),
           num_targets_);
  }

 private:
  /// scratch.logits <- x W^T of the rows at [begin, begin + count), then zeros up to `padded`.
  void make_logits(int64_t begin, int64_t count, int64_t padded) {
    const int64_t C = x_.shape[1];
    const bool packed = is_packable<T>(C, {x_.data, scratch_.x.data});
    launch(device_, {padded, kMoveThreads}, packed ? loss_gather_kernel<T, kPackWidth<T>> : loss_gather_kernel<T, 1>,
           scratch_.x.template as<T>(), x_.template as<T>(), order_ + begin, count, C);
    blas_gemm(device_, scratch_.logits.rows(0, padded), {scratch_.x.rows(0, padded)}, {w_, true});
    if (!logits_) return;
    launch(device_, {count, kRowThreads}, loss_logits_kernel, logits_.template as<float>(),
           scratch_.logits.template as<float>(), order_ + begin, V_, map_);
  }

  void loss_tile(int64_t begin, int64_t count, int64_t padded) {
    make_logits(begin, count, padded);
    const Tensor du = scratch_.dlogits.rows(0, padded);
    const bool packed = is_packable<T>(V_, {du.data, scratch_.logits.data});
    launch(device_, {dx_ ? padded : count, kRowThreads},
           packed ? loss_row_kernel<T, kPackWidth<T>> : loss_row_kernel<T, 1>,
           scratch_.nll.template as<double>() + begin, dx_ ? du.template as<T>() : nullptr,
           scratch_.logits.template as<float>(), order_ + begin, targets_, count, V_, map_, scale_);
    if (!dx_) return;
    const Tensor dx_tile = scratch_.dx.rows(0, padded);
    linear_backward_cuda(device_, dx_tile, dw_, {}, du, scratch_.x.rows(0, padded), w_);
    scatter(dx_tile, begin, count);
  }

  /// dx of the rows at [begin, begin + count) <- from, or zeros when it is null.
  void scatter(ConstTensor from, int64_t begin, int64_t count) {
    const int64_t C = x_.shape[1];
    const bool packed = is_packable<T>(C, {dx_.data, from.data});
    launch(device_, {count, kMoveThreads}, packed ? loss_scatter_kernel<T, kPackWidth<T>> : loss_scatter_kernel<T, 1>,
           dx_.template as<T>(), static_cast<const T*>(from.data), order_ + begin, C);
  }

  Device& device_;
  Tensor dx_, dw_, logits_;
  ConstTensor x_, w_;
  const int32_t* targets_;
  const int32_t* order_;  ///< of rows
  int64_t num_targets_;
  int V_;
  LogitMap map_;
  float scale_;  ///< of the gradient
  detail::LossScratch scratch_;
};

}  // namespace

void loss_cuda(Device& device, Tensor nll, Tensor dx, Tensor dw, ConstTensor x, ConstTensor w, ConstTensor targets,
               const LossRows& rows, double grad_scale, const LossShape& shape, Tensor workspace, Tensor logits) {
  dispatch_cuda(x.dtype, "loss", [&]<class T>(T) {
    Run<T>(device, dx, dw, x, w, targets, rows, grad_scale, shape, workspace, logits)(nll);
  });
}
