// Front doors and the CPU loops that specify the layouts of latent attention. Contract: mla.h.
#include "layers/mla.h"

#include <algorithm>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kTokenGrain = 8;

int64_t check_common(const char* who, const ConstTensor& qkv, const ConstTensor& q, const ConstTensor& kv,
                     const ConstTensor& k_rope, const MlaShape& s) {
  CHECK(s.num_heads > 0 && s.nope > 0 && s.rope > 0 && s.v > 0 && s.v <= s.head_dim(),
        "{}: {} heads of {} + {}, v of {}: all positive, and v no wider than q", who, s.num_heads, s.nope, s.rope, s.v);
  CHECK(qkv.shape.rank() == 3, "{}: qkv ('{}') is {}, expected (T, 3 NH, HD)", who, qkv.name, qkv.shape.str());
  const int64_t T = qkv.shape[0];
  check_tensor(qkv, fmt::format("{}: qkv", who).c_str(), {T, 3 * s.num_heads, s.head_dim()}, qkv.dtype);
  check_tensor(q, fmt::format("{}: q", who).c_str(), {T, s.num_heads * s.head_dim()}, qkv.dtype);
  check_tensor(kv, fmt::format("{}: kv", who).c_str(), {T, s.num_heads * (s.nope + s.v)}, qkv.dtype);
  check_tensor(k_rope, fmt::format("{}: k_rope", who).c_str(), {T, s.rope}, qkv.dtype);
  return T;
}

int64_t check_widths(const char* who, const ConstTensor& narrow, const ConstTensor& wide, const MlaShape& s) {
  CHECK(wide.shape.rank() == 3, "{}: wide ('{}') is {}, expected (T, NH, HD)", who, wide.name, wide.shape.str());
  const int64_t T = wide.shape[0];
  check_tensor(wide, fmt::format("{}: wide", who).c_str(), {T, s.num_heads, s.head_dim()}, wide.dtype);
  check_tensor(narrow, fmt::format("{}: narrow", who).c_str(), {T, s.num_heads * s.v}, wide.dtype);
  return T;
}

}  // namespace

void mla_assemble(Device& device, Tensor qkv, ConstTensor q, ConstTensor kv, ConstTensor k_rope, const MlaShape& s) {
  const int64_t T = check_common("mla_assemble", qkv, q, kv, k_rope, s);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return mla_assemble_cuda(device, qkv, q, kv, k_rope, s);
  }
  dispatch_float(qkv.dtype, "mla_assemble", [&]<class F>(F) {
    const int64_t HD = s.head_dim(), NH = s.num_heads;
    parallel_for(T, kTokenGrain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        for (int64_t h = 0; h < NH; h++) {
          const F* const qh = q.as<F>() + (t * NH + h) * HD;
          const F* const kvh = kv.as<F>() + (t * NH + h) * (s.nope + s.v);
          F* const q_to = qkv.as<F>() + (t * 3 * NH + h) * HD;
          F *const k_to = q_to + NH * HD, *const v_to = k_to + NH * HD;
          std::copy_n(qh + s.nope, s.rope, q_to), std::copy_n(qh, s.nope, q_to + s.rope);
          std::copy_n(k_rope.as<F>() + t * s.rope, s.rope, k_to), std::copy_n(kvh, s.nope, k_to + s.rope);
          std::copy_n(kvh + s.nope, s.v, v_to), std::fill_n(v_to + s.v, HD - s.v, F(0));
        }
      }
    });
  });
}

void mla_assemble_backward(Device& device, Tensor dq, Tensor dkv, Tensor dk_rope, ConstTensor dqkv, const MlaShape& s) {
  const int64_t T = check_common("mla_assemble_backward", dqkv, dq, dkv, dk_rope, s);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return mla_assemble_backward_cuda(device, dq, dkv, dk_rope, dqkv, s);
  }
  dispatch_float(dqkv.dtype, "mla_assemble_backward", [&]<class F>(F) {
    const int64_t HD = s.head_dim(), NH = s.num_heads;
    parallel_for(T, kTokenGrain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        F* const shared = dk_rope.as<F>() + t * s.rope;
        std::fill_n(shared, s.rope, F(0));
        for (int64_t h = 0; h < NH; h++) {
          F* const qh = dq.as<F>() + (t * NH + h) * HD;
          F* const kvh = dkv.as<F>() + (t * NH + h) * (s.nope + s.v);
          const F* const q_from = dqkv.as<F>() + (t * 3 * NH + h) * HD;
          const F *const k_from = q_from + NH * HD, *const v_from = k_from + NH * HD;
          std::copy_n(q_from, s.rope, qh + s.nope), std::copy_n(q_from + s.rope, s.nope, qh);
          std::copy_n(k_from + s.rope, s.nope, kvh), std::copy_n(v_from, s.v, kvh + s.nope);
          for (int64_t c = 0; c < s.rope; c++) shared[c] += k_from[c];
        }
      }
    });
  });
}

void mla_narrow(Device& device, Tensor narrow, ConstTensor wide, const MlaShape& s) {
  const int64_t T = check_widths("mla_narrow", narrow, wide, s);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return mla_narrow_cuda(device, narrow, wide, s);
  }
  dispatch_float(wide.dtype, "mla_narrow", [&]<class F>(F) {
    parallel_for(T * s.num_heads, kTokenGrain * s.num_heads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        std::copy_n(wide.as<F>() + i * s.head_dim(), s.v, narrow.as<F>() + i * s.v);
      }
    });
  });
}

void mla_widen(Device& device, Tensor wide, ConstTensor narrow, const MlaShape& s) {
  const int64_t T = check_widths("mla_widen", narrow, wide, s);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return mla_widen_cuda(device, wide, narrow, s);
  }
  dispatch_float(wide.dtype, "mla_widen", [&]<class F>(F) {
    parallel_for(T * s.num_heads, kTokenGrain * s.num_heads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        F* const to = wide.as<F>() + i * s.head_dim();
        std::copy_n(narrow.as<F>() + i * s.v, s.v, to), std::fill_n(to + s.v, s.head_dim() - s.v, F(0));
      }
    });
  });
}
