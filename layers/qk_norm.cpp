// Front doors and the CPU loops that specify the norm of q and k. Contract: qk_norm.h; the formula of a row: rmsnorm.h.
#include "layers/qk_norm.h"

#include <algorithm>
#include <vector>

#include "layers/core/parallel.h"
#include "layers/rmsnorm_row.h"
#include "layers/rope_head.h"

namespace {

constexpr int64_t kTokenGrain = 16;

/// The angles of a token for its heads.
template <class T>
struct Angles {
  const T *cos, *sin;  // (T, half)
  int64_t half;
  bool interleaved;

  explicit Angles(const Rotation& rotation)
      : cos(rotation ? rotation.cos.as<T>() : nullptr),
        sin(rotation ? rotation.sin.as<T>() : nullptr),
        half(rotation.half()),
        interleaved(rotation.interleaved) {}

  /// x (width): one or more heads of token t, in place. sign: 1, or -1 for the gradient.
  void rotate(T* x, int64_t t, T sign, int64_t width, int64_t head_dim) const {
    if (half == 0) return;
    const auto rotate_head = interleaved ? detail::rotate_head<true, T> : detail::rotate_head<false, T>;
    for (int64_t c = 0; c < width; c += head_dim) rotate_head(x + c, cos + t * half, sin + t * half, sign, half);
  }
};

template <class T>
void forward_cpu(T* y, T* rstd, const T* qkv, const T* q_weight, const T* k_weight, int64_t num_tokens,
                 const QkNormShape& shape, double eps, NormKind kind, const Angles<T>& angles) {
  parallel_for(num_tokens, kTokenGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      T* yt = y + t * shape.token_width();
      const T* xt = qkv + t * shape.token_width();
      for (int64_t i = 0; i < shape.num_norms(); i++) {
        const auto [at, width, is_k] = shape.norm(i);
        rstd[t * shape.num_norms() + i] =
            detail::rmsnorm_row_forward(yt + at, xt + at, is_k ? k_weight : q_weight, width, eps, kind);
        angles.rotate(yt + at, t, T(1), width, shape.head_dim);
      }
      std::copy_n(xt + shape.v_begin(), shape.v_width(), yt + shape.v_begin());
    }
  });
}

template <class T>
void backward_cpu(T* dqkv, T* dq_weight, T* dk_weight, const T* dy, const T* qkv, const T* rstd, const T* q_weight,
                  const T* k_weight, int64_t num_tokens, const QkNormShape& shape, NormKind kind,
                  const Angles<T>& angles) {
  const auto add_tokens = [&](int64_t begin, int64_t end, T* dw) {  // dw: that of q, then that of k
    std::vector<T> turned_back(static_cast<size_t>(std::max(shape.q_width(), shape.k_width())));
    T* const d = turned_back.data();
    for (int64_t t = begin; t < end; t++) {
      T* dxt = dqkv + t * shape.token_width();
      const T* dyt = dy + t * shape.token_width();
      const T* xt = qkv + t * shape.token_width();
      for (int64_t i = 0; i < shape.num_norms(); i++) {
        const auto [at, width, is_k] = shape.norm(i);
        std::copy_n(dyt + at, width, d);
        angles.rotate(d, t, T(-1), width, shape.head_dim);
        detail::rmsnorm_row_backward(dxt + at, is_k ? dw + shape.q_width() : dw, d, xt + at,
                                     rstd[t * shape.num_norms() + i], is_k ? k_weight : q_weight, width, kind);
      }
      std::copy_n(dyt + shape.v_begin(), shape.v_width(), dxt + shape.v_begin());
    }
  };
  const auto dw = detail::sum_over_rows<T>(num_tokens, shape.q_width() + shape.k_width(), add_tokens);
  for (int64_t c = 0; c < shape.q_width(); c++) dq_weight[c] += dw[static_cast<size_t>(c)];
  for (int64_t c = 0; c < shape.k_width(); c++) dk_weight[c] += dw[static_cast<size_t>(shape.q_width() + c)];
}

/// Checks what forward and backward have in common; returns the number of tokens.
int64_t check_common(const char* who, const ConstTensor& qkv, const ConstTensor& rstd, const ConstTensor& q_weight,
                     const ConstTensor& k_weight, const QkNormShape& shape, NormKind kind, const Rotation& rotation) {
  const int64_t heads = shape.num_heads + 2 * shape.num_kv_heads;
  CHECK(shape.num_heads > 0 && shape.num_kv_heads > 0 && shape.head_dim > 0,
        "{}: {} heads, {} kv heads, head_dim {}: all must be positive", who, shape.num_heads, shape.num_kv_heads,
        shape.head_dim);
  CHECK(kind != NormKind::LayerNorm, "{}: q and k are normalised by RMSNorm only, not by LayerNorm", who);
  CHECK(qkv.shape.rank() == 3, "{}: qkv ('{}') is {}, expected (T, {}, {})", who, qkv.name, qkv.shape.str(), heads,
        shape.head_dim);
  const int64_t num_tokens = qkv.shape[0];
  check_tensor(qkv, fmt::format("{}: qkv", who).c_str(), {num_tokens, heads, shape.head_dim}, qkv.dtype);
  check_tensor(rstd, fmt::format("{}: rstd", who).c_str(), {num_tokens, shape.num_norms()},
               accumulator_dtype(qkv.dtype));
  check_tensor(q_weight, fmt::format("{}: q_weight", who).c_str(), {shape.q_width()}, qkv.dtype);
  check_tensor(k_weight, fmt::format("{}: k_weight", who).c_str(), {shape.k_width()}, qkv.dtype);
  if (rotation) {
    check_tensor(rotation.cos, fmt::format("{}: cos", who).c_str(), {num_tokens, rotation.half()}, rstd.dtype);
    check_tensor(rotation.sin, fmt::format("{}: sin", who).c_str(), rotation.cos.shape, rstd.dtype);
    CHECK(2 * rotation.half() <= shape.head_dim, "{}: cos ('{}') {} rotates {} dimensions, a head has {}", who,
          rotation.cos.name, rotation.cos.shape.str(), 2 * rotation.half(), shape.head_dim);
  }
  return num_tokens;
}

}  // namespace

void qk_norm_forward(Device& device, Tensor y, Tensor rstd, ConstTensor qkv, ConstTensor q_weight, ConstTensor k_weight,
                     const QkNormShape& shape, double eps, NormKind kind, const Rotation& rotation) {
  const int64_t T = check_common("qk_norm_forward", qkv, rstd, q_weight, k_weight, shape, kind, rotation);
  check_tensor(y, "qk_norm_forward: y", qkv.shape, qkv.dtype);
  CHECK(y.data != qkv.data || T == 0, "qk_norm_forward: y ('{}') is qkv's own memory", y.name);
  CHECK(eps >= 0, "qk_norm_forward: eps = {} is negative", eps);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) {
      return qk_norm_forward_cuda(device, y, rstd, qkv, q_weight, k_weight, shape, eps, kind, rotation);
    }
  }
  dispatch_float(qkv.dtype, "qk_norm_forward", [&]<class F>(F) {
    forward_cpu(y.as<F>(), rstd.as<F>(), qkv.as<F>(), q_weight.as<F>(), k_weight.as<F>(), T, shape, eps, kind,
                Angles<F>(rotation));
  });
}

void qk_norm_backward(Device& device, Tensor dqkv, Tensor dq_weight, Tensor dk_weight, ConstTensor dy, ConstTensor qkv,
                      ConstTensor rstd, ConstTensor q_weight, ConstTensor k_weight, const QkNormShape& shape,
                      NormKind kind, const Rotation& rotation) {
  const int64_t T = check_common("qk_norm_backward", qkv, rstd, q_weight, k_weight, shape, kind, rotation);
  check_tensor(dqkv, "qk_norm_backward: dqkv", qkv.shape, qkv.dtype);
  check_tensor(dy, "qk_norm_backward: dy", qkv.shape, qkv.dtype);
  CHECK(dqkv.data != dy.data || T == 0, "qk_norm_backward: dqkv ('{}') is dy's own memory", dqkv.name);
  check_tensor(dq_weight, "qk_norm_backward: dq_weight", q_weight.shape, rstd.dtype);
  check_tensor(dk_weight, "qk_norm_backward: dk_weight", k_weight.shape, rstd.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) {
      return qk_norm_backward_cuda(device, dqkv, dq_weight, dk_weight, dy, qkv, rstd, q_weight, k_weight, shape, kind,
                                   rotation);
    }
  }
  dispatch_float(qkv.dtype, "qk_norm_backward", [&]<class F>(F) {
    backward_cpu(dqkv.as<F>(), dq_weight.as<F>(), dk_weight.as<F>(), dy.as<F>(), qkv.as<F>(), rstd.as<F>(),
                 q_weight.as<F>(), k_weight.as<F>(), T, shape, kind, Angles<F>(rotation));
  });
}
