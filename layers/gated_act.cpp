// Front doors and the CPU loops that specify the gate of the MLP. Contract: gated_act.h.
//
// Both kinds are z * sigmoid(a(z)), because 0.5 (1 + tanh(u)) = sigmoid(2u): one exponential, and no cancellation where
// tanh is near -1.
//   Silu:     a = z                                    a' = 1
//   GeluTanh: a = 2 sqrt(2/pi) (z + 0.044715 z^3)      a' = 2 sqrt(2/pi) (1 + 3 * 0.044715 z^2)
#include "layers/gated_act.h"

#include "layers/core/math.h"
#include "layers/core/parallel.h"

namespace {

constexpr int64_t kGrainElements = 8192;
constexpr double kTwoSqrtTwoOverPi = 1.5957691216057308;
constexpr double kCubic = 0.044715;

/// One element, and its derivatives by gate and up.
template <class T>
struct Gated {
  T y, by_gate, by_up;
};

// act = z s, s = sigmoid(a(z)):   by up: act;   by gate: up (s + z s (1 - s) a'(z))
template <GateKind kKind, class T>
inline Gated<T> gated(T z, T up, T alpha, T limit) {
  if constexpr (kKind == GateKind::Clamped) {
    const T g = z < limit ? z : limit, u = up < -limit ? -limit : up > limit ? limit : up;
    const T s = fast_sigmoid(alpha * g), act = g * s;
    const T by_g = (u + T(1)) * (s + act * (T(1) - s) * alpha);
    // As torch's clamp: on the limit itself the derivative is 1.
    return {(u + T(1)) * act, z <= limit ? by_g : T(0), up >= -limit && up <= limit ? act : T(0)};
  } else if constexpr (kKind == GateKind::Silu) {
    const T s = fast_sigmoid(z), act = z * s;
    return {act * up, up * (s + act * (T(1) - s)), act};
  } else {
    const T s = fast_sigmoid(T(kTwoSqrtTwoOverPi) * z * (T(1) + T(kCubic) * z * z)), act = z * s;
    const T slope = T(kTwoSqrtTwoOverPi) * (T(1) + T(3 * kCubic) * z * z);
    return {act * up, up * (s + act * (T(1) - s) * slope), act};
  }
}

/// Where gate and up of column f lie in a row (2F).
template <GateKind kKind>
inline int64_t gate_at(int64_t f) {
  return kKind == GateKind::Clamped ? 2 * f : f;
}
template <GateKind kKind>
inline int64_t up_at(int64_t f, int64_t F) {
  return kKind == GateKind::Clamped ? 2 * f + 1 : F + f;
}

template <GateKind kKind, class T>
void forward_cpu(T* y, const T* gate_up, const T* row_weights, int64_t num_tokens, int64_t F, T alpha, T limit) {
  parallel_for(num_tokens, kGrainElements / std::max<int64_t>(F, 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const T* row = gate_up + t * 2 * F;
      const T w = row_weights ? row_weights[t] : T(1);
      T* yt = y + t * F;
#pragma omp simd
      for (int64_t f = 0; f < F; f++) {
        yt[f] = w * gated<kKind>(row[gate_at<kKind>(f)], row[up_at<kKind>(f, F)], alpha, limit).y;
      }
    }
  });
}

template <GateKind kKind, class T>
void backward_cpu(T* d_gate_up, T* d_row_weights, const T* dy, const T* gate_up, const T* row_weights,
                  int64_t num_tokens, int64_t F, T alpha, T limit) {
  parallel_for(num_tokens, kGrainElements / std::max<int64_t>(F, 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const T* row = gate_up + t * 2 * F;
      const T* dyt = dy + t * F;
      T* d = d_gate_up + t * 2 * F;
      const T w = row_weights ? row_weights[t] : T(1);
      T dw = 0;
#pragma omp simd reduction(+ : dw)
      for (int64_t f = 0; f < F; f++) {
        const Gated<T> g = gated<kKind>(row[gate_at<kKind>(f)], row[up_at<kKind>(f, F)], alpha, limit);
        d[gate_at<kKind>(f)] = w * dyt[f] * g.by_gate;
        d[up_at<kKind>(f, F)] = w * dyt[f] * g.by_up;
        dw += dyt[f] * g.y;
      }
      if (row_weights) d_row_weights[t] = dw;
    }
  });
}

/// Calls `op` with the kind as a constant, so that the inner loops have no branch.
template <class Op>
void dispatch_kind(GateKind kind, Op&& op) {
  switch (kind) {
    case GateKind::Silu:
      return op.template operator()<GateKind::Silu>();
    case GateKind::GeluTanh:
      return op.template operator()<GateKind::GeluTanh>();
    case GateKind::Clamped:
      return op.template operator()<GateKind::Clamped>();
  }
}

/// Checks gate_up (T, 2F) and the tensor of width F beside it.
void check_shapes(const char* who, const ConstTensor& gate_up, const char* narrow_name, const ConstTensor& narrow) {
  CHECK(gate_up.shape.rank() == 2 && gate_up.shape[1] % 2 == 0, "{}: gate_up ('{}') is {}, expected (T, 2F)", who,
        gate_up.name, gate_up.shape.str());
  const int64_t T = gate_up.shape[0], F = gate_up.shape[1] / 2;
  check_tensor(gate_up, fmt::format("{}: gate_up", who).c_str(), gate_up.shape, gate_up.dtype);
  check_tensor(narrow, fmt::format("{}: {}", who, narrow_name).c_str(), {T, F}, gate_up.dtype);
}

}  // namespace

void gated_act_forward(Device& device, Tensor y, ConstTensor gate_up, const Gate& gate, ConstTensor row_weights) {
  check_shapes("gated_act_forward", gate_up, "y", y);
  const int64_t num_tokens = y.shape[0], F = y.shape[1];
  if (row_weights) {
    check_tensor(row_weights, "gated_act_forward: row_weights", {num_tokens}, accumulator_dtype(gate_up.dtype));
  }
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return gated_act_forward_cuda(device, y, gate_up, gate, row_weights);
  }
  dispatch_float(gate_up.dtype, "gated_act_forward", [&]<class T>(T) {
    dispatch_kind(gate.kind, [&]<GateKind kKind>() {
      forward_cpu<kKind>(y.as<T>(), gate_up.as<T>(), row_weights ? row_weights.as<T>() : nullptr, num_tokens, F,
                         T(gate.alpha), T(gate.limit));
    });
  });
}

void gated_act_backward(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, const Gate& gate,
                        ConstTensor row_weights, Tensor d_row_weights) {
  check_shapes("gated_act_backward", gate_up, "dy", dy);
  check_tensor(d_gate_up, "gated_act_backward: d_gate_up", gate_up.shape, gate_up.dtype);
  const int64_t num_tokens = dy.shape[0], F = dy.shape[1];
  CHECK(static_cast<bool>(row_weights) == static_cast<bool>(d_row_weights),
        "gated_act_backward: row_weights and d_row_weights come together");
  if (row_weights) {
    check_tensor(row_weights, "gated_act_backward: row_weights", {num_tokens}, accumulator_dtype(gate_up.dtype));
    check_tensor(d_row_weights, "gated_act_backward: d_row_weights", {num_tokens}, row_weights.dtype);
  }
  if constexpr (kHasCuda) {
    if (device.is_cuda()) {
      return gated_act_backward_cuda(device, d_gate_up, dy, gate_up, gate, row_weights, d_row_weights);
    }
  }
  dispatch_float(gate_up.dtype, "gated_act_backward", [&]<class T>(T) {
    dispatch_kind(gate.kind, [&]<GateKind kKind>() {
      backward_cpu<kKind>(d_gate_up.as<T>(), row_weights ? d_row_weights.as<T>() : nullptr, dy.as<T>(), gate_up.as<T>(),
                          row_weights ? row_weights.as<T>() : nullptr, num_tokens, F, T(gate.alpha), T(gate.limit));
    });
  });
}
