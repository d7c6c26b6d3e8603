// LM head and cross-entropy on CUDA: products by cuBLASLt, the rest by kernels. Contract and formulas: loss.h; the CPU
// loops that specify it: loss.cpp.
//
// A tile of rows that have a target runs
//   x_tile -> logits, fp32 (GEMM) -> nll and dz (loss_row_kernel) -> dw +=, dx_tile (GEMMs) -> dx
//
// The rows of a last tile are filled up with zeros to a multiple of 64: batches differ in their number of targets, and
//   cuBLASLt should not have to choose algorithms for every number.
//
// Bytes from DRAM, of the least possible, for a tile of n rows and T = bf16 or fp32:
//   loss_row_kernel      reads z, writes dz   n V (4 + sizeof(T))     the minimum, while the rows that run at a time
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

// The cap of loss.h; `inverse` is 1 / cap, or 0 for none.
struct Cap {
  float cap, inverse;

  __device__ __forceinline__ float of(float z) const { return cap > 0 ? cap * tanhf(z * inverse) : z; }
  /// d cap tanh(u / cap) / du, by the capped value.
  __device__ __forceinline__ float slope(float capped) const { return 1.0f - (capped * inverse) * (capped * inverse); }
};

/// c = the capped logits at z, kWidth neighbours.
template <int kWidth>
__device__ __forceinline__ void load_capped(float (&c)[kWidth], const float* z, const Cap& cap) {
  constexpr int kLoad = kWidth == 1 ? 1 : kPackWidth<float>;
  for (int j = 0; j < kWidth; j += kLoad) {
    const Pack<float, kLoad> pack = load_pack<kLoad>(z + j);
    for (int k = 0; k < kLoad; k++) c[j + k] = cap.of(pack.element[k]);
  }
}

// A row of logits z (rows, V), a block each. The first `num_targets` rows:
//   nll = log sum_v exp(z_v - max) + max - z_target         dz_v = ((exp(z_v - max) / sum) - onehot_v) scale slope(z_v)
// The others fill a tile up: dz = 0. A thread sums its own columns below its own maximum, rescaled when that grows;
// then all maxima and sums are brought together. dz may be null, or z itself: a thread writes what only it reads.
template <class T, int kWidth>
__global__ void __launch_bounds__(kRowThreads)
    loss_row_kernel(double* nll, T* dz, const float* z, const int32_t* rows, const int32_t* targets,
                    int64_t num_targets, int V, Cap cap, float scale) {
  const int64_t i = blockIdx.x;
  const float* zr = z + i * V;
  if (i >= num_targets) {
    const Pack<T, kWidth> zero = {};
    for (int v = threadIdx.x * kWidth; v < V; v += kRowThreads * kWidth) store_pack<kWidth>(dz + i * V + v, zero);
    return;
  }
  float max = -std::numeric_limits<float>::max(), sum = 0;
  for (int v = threadIdx.x * kWidth; v < V; v += kRowThreads * kWidth) {
    float c[kWidth];
    load_capped(c, zr + v, cap);
    float grown = max;
    for (int k = 0; k < kWidth; k++) grown = fmaxf(grown, c[k]);
    if (grown > max) {
      sum *= expf(max - grown);
      max = grown;
    }
    for (int k = 0; k < kWidth; k++) sum += expf(c[k] - max);
  }
  const int target = targets[rows[i]];
  const float zt = cap.of(zr[target]);  // before the barriers: dz, which may be z, is written after them
  const float row_max = block_max<kRowThreads>(max);
  const float row_sum = block_sum<kRowThreads>(sum * expf(max - row_max));
  if (threadIdx.x == 0) {
    nll[i] = log(static_cast<double>(row_sum)) + (static_cast<double>(row_max) - static_cast<double>(zt));
  }
  if (!dz) return;
  const float to_gradient = scale / row_sum;
  for (int v = threadIdx.x * kWidth; v < V; v += kRowThreads * kWidth) {
    float c[kWidth];
    load_capped(c, zr + v, cap);
    Pack<T, kWidth> dzp;
    for (int k = 0; k < kWidth; k++) {
      const float onehot = v + k == target ? scale : 0.0f;
      dzp.element[k] = from_float<T>((expf(c[k] - row_max) * to_gradient - onehot) * cap.slope(c[k]));
    }
    store_pack<kWidth>(dz + i * V + v, dzp);
  }
}

// logits[rows[i]] = the capped z[i]; a block a row of V. For debugging only: scalar accesses.
__global__ void __launch_bounds__(kRowThreads)
    loss_logits_kernel(float* logits, const float* z, const int32_t* rows, int V, Cap cap) {
  const float* zr = z + int64_t{blockIdx.x} * V;
  float* to = logits + int64_t{rows[blockIdx.x]} * V;
  for (int v = threadIdx.x; v < V; v += kRowThreads) to[v] = cap.of(zr[v]);
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
        cap_{static_cast<float>(shape.softcap), shape.softcap > 0 ? static_cast<float>(1 / shape.softcap) : 0.0f},
        grad_scale_(static_cast<float>(grad_scale)),
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
  /// scratch.logits <- the logits, before the cap, of the rows at [begin, begin + count), then zeros up to `padded`.
  void make_logits(int64_t begin, int64_t count, int64_t padded) {
    const int64_t C = x_.shape[1];
    const bool packed = is_packable<T>(C, {x_.data, scratch_.x.data});
    launch(device_, {padded, kMoveThreads}, packed ? loss_gather_kernel<T, kPackWidth<T>> : loss_gather_kernel<T, 1>,
           scratch_.x.template as<T>(), x_.template as<T>(), order_ + begin, count, C);
    blas_gemm(device_, scratch_.logits.rows(0, padded), {scratch_.x.rows(0, padded)}, {w_, true});
    if (!logits_) return;
    launch(device_, {count, kRowThreads}, loss_logits_kernel, logits_.template as<float>(),
           scratch_.logits.template as<float>(), order_ + begin, V_, cap_);
  }

  void loss_tile(int64_t begin, int64_t count, int64_t padded) {
    make_logits(begin, count, padded);
    const Tensor dz = scratch_.dlogits.rows(0, padded);
    const bool packed = is_packable<T>(V_, {dz.data, scratch_.logits.data});
    launch(device_, {dx_ ? padded : count, kRowThreads},
           packed ? loss_row_kernel<T, kPackWidth<T>> : loss_row_kernel<T, 1>,
           scratch_.nll.template as<double>() + begin, dx_ ? dz.template as<T>() : nullptr,
           scratch_.logits.template as<float>(), order_ + begin, targets_, count, V_, cap_, grad_scale_);
    if (!dx_) return;
    const Tensor dx_tile = scratch_.dx.rows(0, padded);
    linear_backward_cuda(device_, dx_tile, dw_, {}, dz, scratch_.x.rows(0, padded), w_);
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
  Cap cap_;
  float grad_scale_;
  detail::LossScratch scratch_;
};

}  // namespace

void loss_cuda(Device& device, Tensor nll, Tensor dx, Tensor dw, ConstTensor x, ConstTensor w, ConstTensor targets,
               const LossRows& rows, double grad_scale, const LossShape& shape, Tensor workspace, Tensor logits) {
  dispatch_cuda(x.dtype, "loss", [&]<class T>(T) {
    Run<T>(device, dx, dw, x, w, targets, rows, grad_scale, shape, workspace, logits)(nll);
  });
}
