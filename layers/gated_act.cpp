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

template <GateKind kKind, class T>
inline T argument(T z) {
  if constexpr (kKind == GateKind::Silu) return z;
  return T(kTwoSqrtTwoOverPi) * z * (T(1) + T(kCubic) * z * z);
}

template <GateKind kKind, class T>
inline T argument_derivative(T z) {
  if constexpr (kKind == GateKind::Silu) return T(1);
  return T(kTwoSqrtTwoOverPi) * (T(1) + T(3 * kCubic) * z * z);
}

template <GateKind kKind, class T>
void forward_cpu(T* y, const T* gate_up, int64_t num_tokens, int64_t F) {
  parallel_for(num_tokens, kGrainElements / std::max<int64_t>(F, 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const T* gate = gate_up + t * 2 * F;
      const T* up = gate + F;
      T* yt = y + t * F;
#pragma omp simd
      for (int64_t f = 0; f < F; f++) yt[f] = gate[f] * fast_sigmoid(argument<kKind>(gate[f])) * up[f];
    }
  });
}

// y = act(z) up with act = z s, s = sigmoid(a(z)):   dup = dy act(z)   dz = dy up (s + z s (1 - s) a'(z))
template <GateKind kKind, class T>
void backward_cpu(T* d_gate_up, const T* dy, const T* gate_up, int64_t num_tokens, int64_t F) {
  parallel_for(num_tokens, kGrainElements / std::max<int64_t>(F, 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const T* gate = gate_up + t * 2 * F;
      const T* up = gate + F;
      const T* dyt = dy + t * F;
      T* d_gate = d_gate_up + t * 2 * F;
      T* d_up = d_gate + F;
#pragma omp simd
      for (int64_t f = 0; f < F; f++) {
        const T z = gate[f], u = up[f];
        const T s = fast_sigmoid(argument<kKind>(z));
        const T act = z * s;
        d_up[f] = dyt[f] * act;
        d_gate[f] = dyt[f] * u * (s + act * (T(1) - s) * argument_derivative<kKind>(z));
      }
    }
  });
}

/// Calls `op` with the kind as a constant, so that the inner loops have no branch.
template <class Op>
void dispatch_kind(GateKind kind, Op&& op) {
  if (kind == GateKind::Silu) return op.template operator()<GateKind::Silu>();
  op.template operator()<GateKind::GeluTanh>();
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

void gated_act_forward(Device& device, Tensor y, ConstTensor gate_up, GateKind kind) {
  check_shapes("gated_act_forward", gate_up, "y", y);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return gated_act_forward_cuda(device, y, gate_up, kind);
  }
  const int64_t num_tokens = y.shape[0], F = y.shape[1];
  dispatch_float(gate_up.dtype, "gated_act_forward", [&]<class T>(T) {
    dispatch_kind(kind, [&]<GateKind kKind>() { forward_cpu<kKind>(y.as<T>(), gate_up.as<T>(), num_tokens, F); });
  });
}

void gated_act_backward(Device& device, Tensor d_gate_up, ConstTensor dy, ConstTensor gate_up, GateKind kind) {
  check_shapes("gated_act_backward", gate_up, "dy", dy);
  check_tensor(d_gate_up, "gated_act_backward: d_gate_up", gate_up.shape, gate_up.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return gated_act_backward_cuda(device, d_gate_up, dy, gate_up, kind);
  }
  const int64_t num_tokens = dy.shape[0], F = dy.shape[1];
  dispatch_float(gate_up.dtype, "gated_act_backward", [&]<class T>(T) {
    dispatch_kind(kind, [&]<GateKind kKind>() {
      backward_cpu<kKind>(d_gate_up.as<T>(), dy.as<T>(), gate_up.as<T>(), num_tokens, F);
    });
  });
}
