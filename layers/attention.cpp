// Front doors and CPU side of attention. Contract and formulas: attention.h.
#include "layers/attention.h"

#include <algorithm>
#include <cmath>

#include "layers/core/math.h"
#include "layers/core/parallel.h"

namespace {

void check_attention(const char* who, const ConstTensor& qkv, const ConstTensor& o, const ConstTensor& lse,
                     std::span<const int64_t> cu_seqlens, const AttentionShape& s, const ConstTensor& workspace) {
  CHECK(s.num_kv_heads > 0 && s.num_heads > 0 && s.num_heads % s.num_kv_heads == 0 && s.head_dim > 0,
        "{}: {} query heads of width {} cannot share {} kv heads", who, s.num_heads, s.head_dim, s.num_kv_heads);
  CHECK(s.window >= 0 && s.softcap >= 0, "{}: window {} and softcap {} cannot be negative", who, s.window, s.softcap);
  CHECK(qkv.shape.rank() == 3, "{}: qkv ('{}') {} must be (T, NH + 2 NKV, HD)", who, qkv.name, qkv.shape.str());
  const int64_t T = qkv.shape[0];
  check_tensor(qkv, who, {T, s.num_heads + 2 * s.num_kv_heads, s.head_dim}, qkv.dtype);
  check_tensor(o, who, {T, s.num_heads, s.head_dim}, qkv.dtype);
  check_tensor(lse, who, {s.num_heads, T}, qkv.dtype);
  CHECK(!cu_seqlens.empty() && cu_seqlens.front() == 0 && cu_seqlens.back() == T,
        "{}: cu_seqlens must run from 0 to T = {}", who, T);
  for (size_t i = 1; i < cu_seqlens.size(); i++) {
    CHECK(cu_seqlens[i] > cu_seqlens[i - 1], "{}: cu_seqlens[{}] = {} does not exceed cu_seqlens[{}] = {}", who, i,
          cu_seqlens[i], i - 1, cu_seqlens[i - 1]);
  }
  const size_t needed = attention_workspace_bytes(s, qkv.dtype, T);
  CHECK(workspace.size_bytes() >= needed, "{}: the workspace ('{}') has {} bytes, {} are needed for {} threads", who,
        workspace.name, workspace.size_bytes(), needed, num_threads());
}

template <class T>
T dot(const T* a, const T* b, int64_t n) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// Calls body(document begin, end, kv head, scratch of this thread) for every document and kv head.
template <class T, class Body>
void for_each_document(std::span<const int64_t> cu, const AttentionShape& s, int64_t tokens, void* workspace,
                       Body&& body) {
  const int64_t documents = static_cast<int64_t>(cu.size()) - 1;
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t task = 0; task < documents * s.num_kv_heads; task++) {
    const int64_t d = task / s.num_kv_heads;
    body(cu[d], cu[d + 1], task % s.num_kv_heads, static_cast<T*>(workspace) + omp_get_thread_num() * 2 * tokens);
  }
}

template <class T>
void forward_cpu(T* o, T* lse, const T* qkv, std::span<const int64_t> cu, const AttentionShape& s, int64_t tokens,
                 void* workspace) {
  const int64_t HD = s.head_dim, row = (s.num_heads + 2 * s.num_kv_heads) * HD, G = s.num_heads / s.num_kv_heads;
  for_each_document<T>(cu, s, tokens, workspace, [&](int64_t begin, int64_t end, int64_t kv, T* p) {
    const T* k = qkv + (s.num_heads + kv) * HD;
    const T* v = k + s.num_kv_heads * HD;
    for (int64_t h = kv * G; h < (kv + 1) * G; h++) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t lo = s.window > 0 ? std::max(begin, i - s.window + 1) : begin;
        T m = -1e30f, sum = 0;
        for (int64_t j = lo; j <= i; j++) {
          T x = T(s.scale) * dot(qkv + i * row + h * HD, k + j * row, HD);
          if (s.softcap > 0) x = T(s.softcap) * fast_tanh(x / T(s.softcap));
          p[j - lo] = x;
          m = std::max(m, x);
        }
        T* out = o + (i * s.num_heads + h) * HD;
        std::fill_n(out, HD, T(0));
        for (int64_t j = lo; j <= i; j++) {
          const T e = fast_exp(p[j - lo] - m);
          sum += e;
          for (int64_t c = 0; c < HD; c++) out[c] += e * v[j * row + c];
        }
        for (int64_t c = 0; c < HD; c++) out[c] /= sum;
        lse[h * tokens + i] = m + std::log(sum);
      }
    }
  });
}

// With p_ij = exp(s_ij - lse_i) and D_i = do_i . o_i:   dv_j += p_ij do_i     ds_ij = p_ij (do_i . v_j - D_i)
//   dq_i += scale ds_ij k_j     dk_j += scale ds_ij q_i     softcap: ds_ij *= 1 - (s_ij / cap)^2
template <class T>
void backward_cpu(T* dqkv, const T* d_o, const T* qkv, const T* o, const T* lse, std::span<const int64_t> cu,
                  const AttentionShape& s, int64_t tokens, void* workspace) {
  const int64_t HD = s.head_dim, row = (s.num_heads + 2 * s.num_kv_heads) * HD, G = s.num_heads / s.num_kv_heads;
  for_each_document<T>(cu, s, tokens, workspace, [&](int64_t begin, int64_t end, int64_t kv, T*) {
    const int64_t k_at = (s.num_heads + kv) * HD, v_at = k_at + s.num_kv_heads * HD;
    for (int64_t i = begin; i < end; i++) {
      std::fill_n(dqkv + i * row + kv * G * HD, G * HD, T(0));
      std::fill_n(dqkv + i * row + k_at, HD, T(0));
      std::fill_n(dqkv + i * row + v_at, HD, T(0));
    }
    for (int64_t h = kv * G; h < (kv + 1) * G; h++) {
      for (int64_t i = begin; i < end; i++) {
        const int64_t lo = s.window > 0 ? std::max(begin, i - s.window + 1) : begin;
        const T* q = qkv + i * row + h * HD;
        const T* doi = d_o + (i * s.num_heads + h) * HD;
        const T D = dot(doi, o + (i * s.num_heads + h) * HD, HD);
        T* dq = dqkv + i * row + h * HD;
        for (int64_t j = lo; j <= i; j++) {
          const T* k = qkv + j * row + k_at;
          T* dk = dqkv + j * row + k_at;
          T* dv = dqkv + j * row + v_at;
          T x = T(s.scale) * dot(q, k, HD), slope = 1;
          if (s.softcap > 0) {
            const T t = fast_tanh(x / T(s.softcap));
            x = T(s.softcap) * t, slope = 1 - t * t;
          }
          const T p = fast_exp(x - lse[h * tokens + i]);
          const T ds = T(s.scale) * slope * p * (dot(doi, qkv + j * row + v_at, HD) - D);
          for (int64_t c = 0; c < HD; c++) {
            dv[c] += p * doi[c];
            dq[c] += ds * k[c];
            dk[c] += ds * q[c];
          }
        }
      }
    }
  });
}

}  // namespace

size_t attention_workspace_bytes(const AttentionShape&, DType dtype, int64_t T) {
  return static_cast<size_t>(num_threads() * 2 * T) * size_of(dtype);
}

void attention_forward(Device& device, Tensor o, Tensor lse, ConstTensor qkv, std::span<const int64_t> cu_seqlens,
                       const AttentionShape& shape, Tensor workspace) {
  check_attention("attention_forward", qkv, o, lse, cu_seqlens, shape, workspace);
  require_cpu(device, "attention_forward");
  dispatch_float(qkv.dtype, "attention_forward", [&]<class T>(T) {
    forward_cpu<T>(o.as<T>(), lse.as<T>(), qkv.as<T>(), cu_seqlens, shape, qkv.shape[0], workspace.data);
  });
}

void attention_backward(Device& device, Tensor dqkv, ConstTensor d_o, ConstTensor qkv, ConstTensor o, ConstTensor lse,
                        std::span<const int64_t> cu_seqlens, const AttentionShape& shape, Tensor workspace) {
  check_attention("attention_backward", qkv, o, lse, cu_seqlens, shape, workspace);
  check_tensor(dqkv, "attention_backward: dqkv", qkv.shape, qkv.dtype);
  check_tensor(d_o, "attention_backward: do", o.shape, qkv.dtype);
  require_cpu(device, "attention_backward");
  dispatch_float(qkv.dtype, "attention_backward", [&]<class T>(T) {
    backward_cpu<T>(dqkv.as<T>(), d_o.as<T>(), qkv.as<T>(), o.as<T>(), lse.as<T>(), cu_seqlens, shape, qkv.shape[0],
                    workspace.data);
  });
}
