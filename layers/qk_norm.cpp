// Front doors and the CPU loops that specify the norm of q and k. Contract: qk_norm.h; the formula of a row: rmsnorm.h.
#include "layers/qk_norm.h"

#include <cstring>

#include "layers/core/parallel.h"
#include "layers/rmsnorm_row.h"

namespace {

constexpr int64_t kTokenGrain = 16;

/// How the qkv of one token splits: the norms of q, the norms of k, then v.
struct Layout {
  struct Norm {
    int64_t begin, width;
    bool is_k;
  };

  int64_t q_norms, q_width, k_width, num_norms, v_begin, v_width, token_width;

  explicit Layout(const QkNormShape& s)
      : q_norms(s.per_head ? s.num_heads : 1),
        q_width(s.per_head ? s.head_dim : s.num_heads * s.head_dim),
        k_width(s.per_head ? s.head_dim : s.num_kv_heads * s.head_dim),
        num_norms(s.num_norms()),
        v_begin((s.num_heads + s.num_kv_heads) * s.head_dim),
        v_width(s.num_kv_heads * s.head_dim),
        token_width(v_begin + v_width) {}

  Norm norm(int64_t i) const {
    if (i < q_norms) return {i * q_width, q_width, false};
    return {q_norms * q_width + (i - q_norms) * k_width, k_width, true};
  }
};

template <class T>
void forward_cpu(T* y, T* rstd, const T* qkv, const T* q_weight, const T* k_weight, int64_t num_tokens,
                 const Layout& layout, double eps, NormKind kind) {
  parallel_for(num_tokens, kTokenGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      T* yt = y + t * layout.token_width;
      const T* xt = qkv + t * layout.token_width;
      for (int64_t i = 0; i < layout.num_norms; i++) {
        const auto [at, width, is_k] = layout.norm(i);
        rstd[t * layout.num_norms + i] =
            detail::rmsnorm_row_forward(yt + at, xt + at, is_k ? k_weight : q_weight, width, eps, kind);
      }
      std::memmove(yt + layout.v_begin, xt + layout.v_begin, static_cast<size_t>(layout.v_width) * sizeof(T));
    }
  });
}

template <class T>
void backward_cpu(T* dqkv, T* dq_weight, T* dk_weight, const T* dy, const T* qkv, const T* rstd, const T* q_weight,
                  const T* k_weight, int64_t num_tokens, const Layout& layout, NormKind kind) {
  const auto add_tokens = [&](int64_t begin, int64_t end, T* dw) {  // dw: that of q, then that of k
    for (int64_t t = begin; t < end; t++) {
      T* dxt = dqkv + t * layout.token_width;
      const T* dyt = dy + t * layout.token_width;
      const T* xt = qkv + t * layout.token_width;
      for (int64_t i = 0; i < layout.num_norms; i++) {
        const auto [at, width, is_k] = layout.norm(i);
        detail::rmsnorm_row_backward(dxt + at, is_k ? dw + layout.q_width : dw, dyt + at, xt + at,
                                     rstd[t * layout.num_norms + i], is_k ? k_weight : q_weight, width, kind);
      }
      std::memmove(dxt + layout.v_begin, dyt + layout.v_begin, static_cast<size_t>(layout.v_width) * sizeof(T));
    }
  };
  const auto dw = detail::sum_over_rows<T>(num_tokens, layout.q_width + layout.k_width, add_tokens);
  for (int64_t c = 0; c < layout.q_width; c++) dq_weight[c] += dw[static_cast<size_t>(c)];
  for (int64_t c = 0; c < layout.k_width; c++) dk_weight[c] += dw[static_cast<size_t>(layout.q_width + c)];
}

/// Checks what forward and backward have in common; returns the number of tokens.
int64_t check_common(const char* who, const ConstTensor& qkv, const ConstTensor& rstd, const ConstTensor& q_weight,
                     const ConstTensor& k_weight, const QkNormShape& shape, const Layout& layout) {
  const int64_t heads = shape.num_heads + 2 * shape.num_kv_heads;
  CHECK(shape.num_heads > 0 && shape.num_kv_heads > 0 && shape.head_dim > 0,
        "{}: {} heads, {} kv heads, head_dim {}: all must be positive", who, shape.num_heads, shape.num_kv_heads,
        shape.head_dim);
  CHECK(qkv.shape.rank() == 3, "{}: qkv ('{}') is {}, expected (T, {}, {})", who, qkv.name, qkv.shape.str(), heads,
        shape.head_dim);
  const int64_t num_tokens = qkv.shape[0];
  check_tensor(qkv, fmt::format("{}: qkv", who).c_str(), {num_tokens, heads, shape.head_dim}, qkv.dtype);
  check_tensor(rstd, fmt::format("{}: rstd", who).c_str(), {num_tokens, shape.num_norms()}, qkv.dtype);
  check_tensor(q_weight, fmt::format("{}: q_weight", who).c_str(), {layout.q_width}, qkv.dtype);
  check_tensor(k_weight, fmt::format("{}: k_weight", who).c_str(), {layout.k_width}, qkv.dtype);
  return num_tokens;
}

}  // namespace

void qk_norm_forward(Device& device, Tensor y, Tensor rstd, ConstTensor qkv, ConstTensor q_weight, ConstTensor k_weight,
                     const QkNormShape& shape, double eps, NormKind kind) {
  const Layout layout(shape);
  const int64_t T = check_common("qk_norm_forward", qkv, rstd, q_weight, k_weight, shape, layout);
  check_tensor(y, "qk_norm_forward: y", qkv.shape, qkv.dtype);
  CHECK(eps >= 0, "qk_norm_forward: eps = {} is negative", eps);
  require_cpu(device, "qk_norm_forward");
  dispatch_float(qkv.dtype, "qk_norm_forward", [&]<class F>(F) {
    forward_cpu(y.as<F>(), rstd.as<F>(), qkv.as<F>(), q_weight.as<F>(), k_weight.as<F>(), T, layout, eps, kind);
  });
}

void qk_norm_backward(Device& device, Tensor dqkv, Tensor dq_weight, Tensor dk_weight, ConstTensor dy, ConstTensor qkv,
                      ConstTensor rstd, ConstTensor q_weight, ConstTensor k_weight, const QkNormShape& shape,
                      NormKind kind) {
  const Layout layout(shape);
  const int64_t T = check_common("qk_norm_backward", qkv, rstd, q_weight, k_weight, shape, layout);
  check_tensor(dqkv, "qk_norm_backward: dqkv", qkv.shape, qkv.dtype);
  check_tensor(dy, "qk_norm_backward: dy", qkv.shape, qkv.dtype);
  check_tensor(dq_weight, "qk_norm_backward: dq_weight", q_weight.shape, qkv.dtype);
  check_tensor(dk_weight, "qk_norm_backward: dk_weight", k_weight.shape, qkv.dtype);
  require_cpu(device, "qk_norm_backward");
  dispatch_float(qkv.dtype, "qk_norm_backward", [&]<class F>(F) {
    backward_cpu(dqkv.as<F>(), dq_weight.as<F>(), dk_weight.as<F>(), dy.as<F>(), qkv.as<F>(), rstd.as<F>(),
                 q_weight.as<F>(), k_weight.as<F>(), T, layout, kind);
  });
}
