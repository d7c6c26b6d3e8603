// Front doors and the CPU loops of the Ulysses layouts. Contract: ulysses.h.
#include "layers/ulysses.h"

#include <algorithm>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kGrain = 64;  // tokens

template <class T>
void pack_qkv_cpu(T* sent, const T* qkv, int64_t Ts, const UlyssesShape& s) {
  const int64_t D = s.head_dim, H = s.num_heads + 2 * s.num_kv_heads, h = s.part_qkv_heads();
  parallel_for(Ts, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {  // a token at a time: what several parts need is read once
      const T* from = qkv + t * H * D;
      for (int64_t part = 0; part < s.parts; part++) {
        T* to = sent + (part * Ts + t) * h * D;
        const UlyssesShape::HeadRuns runs = s.runs(part);
        for (const UlyssesShape::HeadRun& run : {runs.q, runs.k, runs.v}) {
          std::copy_n(from + run.head * D, run.count * D, to + run.part_head * D);
        }
      }
    }
  });
}

template <class T>
void unpack_dqkv_cpu(T* dqkv, const T* received, int64_t Ts, const UlyssesShape& s) {
  const int64_t D = s.head_dim, H = s.num_heads + 2 * s.num_kv_heads, h = s.part_qkv_heads();
  parallel_for(Ts, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      T* to = dqkv + t * H * D;
      for (int64_t part = 0; part < s.parts; part++) {
        const T* from = received + (part * Ts + t) * h * D;
        const UlyssesShape::HeadRuns runs = s.runs(part);
        std::copy_n(from, runs.q.count * D, to + runs.q.head * D);
        const bool is_first = part % s.sharers() == 0;
        for (const UlyssesShape::HeadRun& run : {runs.k, runs.v}) {
          const T* part_from = from + run.part_head * D;
          T* part_to = to + run.head * D;
          for (int64_t i = 0; i < run.count * D; i++) part_to[i] = is_first ? part_from[i] : part_to[i] + part_from[i];
        }
      }
    }
  });
}

template <class T>
void unpack_heads_cpu(T* o, const T* received, int64_t Ts, const UlyssesShape& s) {
  const int64_t n = s.part_heads() * s.head_dim;
  parallel_for(Ts, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      for (int64_t part = 0; part < s.parts; part++) {
        std::copy_n(received + (part * Ts + t) * n, n, o + (t * s.parts + part) * n);
      }
    }
  });
}

template <class T>
void pack_heads_cpu(T* sent, const T* d_o, int64_t Ts, const UlyssesShape& s) {
  const int64_t n = s.part_heads() * s.head_dim;
  for (int64_t part = 0; part < s.parts; part++) {
    parallel_for(Ts, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        std::copy_n(d_o + (t * s.parts + part) * n, n, sent + (part * Ts + t) * n);
      }
    });
  }
}

void check_shape(const UlyssesShape& s, const char* op) {
  CHECK(s.parts >= 1 && s.is_legal(), "{}: {} query and {} kv heads do not go into {} parts", op, s.num_heads,
        s.num_kv_heads, s.parts);
}

void check_qkv(ConstTensor qkv, ConstTensor parts, const UlyssesShape& s, const char* op) {
  check_shape(s, op);
  const int64_t Ts = qkv.shape[0];
  check_tensor(qkv, op, {Ts, s.num_heads + 2 * s.num_kv_heads, s.head_dim}, qkv.dtype);
  check_tensor(parts, op, {s.parts, Ts, s.part_qkv_heads(), s.head_dim}, qkv.dtype);
}

void check_heads(ConstTensor heads, ConstTensor parts, const UlyssesShape& s, const char* op) {
  check_shape(s, op);
  const int64_t Ts = heads.shape[0];
  check_tensor(heads, op, {Ts, s.num_heads, s.head_dim}, heads.dtype);
  check_tensor(parts, op, {s.parts, Ts, s.part_heads(), s.head_dim}, heads.dtype);
}

}  // namespace

void ulysses_pack_qkv(Device& device, Tensor sent, ConstTensor qkv, const UlyssesShape& shape) {
  check_qkv(qkv, sent, shape, "ulysses_pack_qkv");
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return ulysses_pack_qkv_cuda(device, sent, qkv, shape);
  }
  dispatch_float(qkv.dtype, "ulysses_pack_qkv",
                 [&]<class T>(T) { pack_qkv_cpu(sent.as<T>(), qkv.as<T>(), qkv.shape[0], shape); });
}

void ulysses_unpack_dqkv(Device& device, Tensor dqkv, ConstTensor received, const UlyssesShape& shape) {
  check_qkv(dqkv, received, shape, "ulysses_unpack_dqkv");
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return ulysses_unpack_dqkv_cuda(device, dqkv, received, shape);
  }
  dispatch_float(dqkv.dtype, "ulysses_unpack_dqkv",
                 [&]<class T>(T) { unpack_dqkv_cpu(dqkv.as<T>(), received.as<T>(), dqkv.shape[0], shape); });
}

void ulysses_unpack_heads(Device& device, Tensor o, ConstTensor received, const UlyssesShape& shape) {
  check_heads(o, received, shape, "ulysses_unpack_heads");
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return ulysses_unpack_heads_cuda(device, o, received, shape);
  }
  dispatch_float(o.dtype, "ulysses_unpack_heads",
                 [&]<class T>(T) { unpack_heads_cpu(o.as<T>(), received.as<T>(), o.shape[0], shape); });
}

void ulysses_pack_heads(Device& device, Tensor sent, ConstTensor d_o, const UlyssesShape& shape) {
  check_heads(d_o, sent, shape, "ulysses_pack_heads");
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return ulysses_pack_heads_cuda(device, sent, d_o, shape);
  }
  dispatch_float(d_o.dtype, "ulysses_pack_heads",
                 [&]<class T>(T) { pack_heads_cpu(sent.as<T>(), d_o.as<T>(), d_o.shape[0], shape); });
}
