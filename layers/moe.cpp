// Front doors and the CPU loops that specify the routing of tokens to experts. Contract and formulas: moe.h.
#include "layers/moe.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kGrainElements = 8192;

int64_t token_grain(int64_t width) {
  return kGrainElements / std::max<int64_t>(width, 1);
}

template <class T>
T sigmoid(T z) {
  return T(1) / (T(1) + std::exp(-z));
}

/// p (E) = softmax(z).
template <class T>
void softmax(T* p, const T* z, int64_t E) {
  const T max = *std::max_element(z, z + E);
  T sum = 0;
  for (int64_t e = 0; e < E; e++) sum += p[e] = std::exp(z[e] - max);
  for (int64_t e = 0; e < E; e++) p[e] /= sum;
}

/// chosen (k): the numbers of the k largest of scores (n), best first; of equals the first. A score that is not above
/// -infinity is not chosen while there are others.
template <class T>
void choose_best(int32_t* chosen, const T* scores, int64_t n, int64_t k) {
  std::array<T, RouterShape::kMaxTopK> best;
  int64_t count = 0;
  for (int64_t e = 0; e < n; e++) {
    int64_t at = std::min(count, k);
    while (at > 0 && scores[e] > best[static_cast<size_t>(at - 1)]) at--;
    if (at == k) continue;
    count = std::min(count + 1, k);
    for (int64_t i = count - 1; i > at; i--) {
      best[static_cast<size_t>(i)] = best[static_cast<size_t>(i - 1)], chosen[i] = chosen[i - 1];
    }
    best[static_cast<size_t>(at)] = scores[e], chosen[at] = static_cast<int32_t>(e);
  }
}

/// choice (E) <- s (E): what is chosen by; the experts of all but the best groups are at -infinity.
template <class T>
void limit_to_groups(T* choice, const RouterShape& shape) {
  const int64_t width = shape.num_experts / shape.num_groups;
  std::vector<T> group_scores;
  for (int64_t g = 0; g < shape.num_groups; g++) {
    std::array<int32_t, 2> two;
    choose_best(two.data(), choice + g * width, width, 2);
    group_scores.push_back(choice[g * width + two[0]] + choice[g * width + two[1]]);
  }
  std::vector<int32_t> kept(static_cast<size_t>(shape.top_groups));
  choose_best(kept.data(), group_scores.data(), shape.num_groups, shape.top_groups);
  for (int64_t g = 0; g < shape.num_groups; g++) {
    if (std::find(kept.begin(), kept.end(), g) != kept.end()) continue;
    std::fill_n(choice + g * width, width, -std::numeric_limits<T>::infinity());
  }
}

/// The experts (k) of one token, and their weights (k).
template <class T>
void route_token(int32_t* experts, T* weights, const T* logits, const T* select_bias, const RouterShape& s,
                 std::vector<T>& scores) {
  const int64_t E = s.num_experts, k = s.top_k;
  if (s.score == RouterScore::Sigmoid) {
    for (int64_t e = 0; e < E; e++)
      scores[static_cast<size_t>(e)] = sigmoid(logits[e]) + (select_bias ? select_bias[e] : 0);
    if (s.num_groups > 1) limit_to_groups(scores.data(), s);
    choose_best(experts, scores.data(), E, k);
    T sum = 0;
    for (int64_t i = 0; i < k; i++) sum += weights[i] = sigmoid(logits[experts[i]]);
    const T factor = T(s.scale) / (s.renormalize ? sum + T(1e-20) : T(1));
    for (int64_t i = 0; i < k; i++) weights[i] *= factor;
    return;
  }
  choose_best(experts, logits, E, k);
  if (s.score == RouterScore::SoftmaxAll) {
    softmax(scores.data(), logits, E);
    for (int64_t i = 0; i < k; i++) weights[i] = scores[static_cast<size_t>(experts[i])];
    return;
  }
  for (int64_t i = 0; i < k; i++) weights[i] = logits[experts[i]];
  softmax(weights, weights, k);
}

/// d (E) <- the gradients of the weights (k) of one token.
///   SoftmaxSelected: d_i = w_i (dw_i - sum w dw), 0 for the others
///   SoftmaxAll:      d_e = p_e (dp_e - sum p dp), dp = dw for those chosen and 0 for the others
///   Sigmoid:         ds_i = scale (dw_i - sum s dw / S) / S or scale dw_i;  d_i = ds_i s (1 - s)
template <class T>
void route_token_backward(T* d, const T* d_weights, const int32_t* experts, const T* logits, const RouterShape& s,
                          std::vector<T>& scores) {
  const int64_t E = s.num_experts, k = s.top_k;
  std::fill_n(d, E, T(0));
  T sum = 0, product = 0;
  switch (s.score) {
    case RouterScore::SoftmaxSelected:
      for (int64_t i = 0; i < k; i++) scores[static_cast<size_t>(i)] = logits[experts[i]];
      softmax(scores.data(), scores.data(), k);
      for (int64_t i = 0; i < k; i++) product += scores[static_cast<size_t>(i)] * d_weights[i];
      for (int64_t i = 0; i < k; i++) d[experts[i]] = scores[static_cast<size_t>(i)] * (d_weights[i] - product);
      return;
    case RouterScore::SoftmaxAll:
      softmax(scores.data(), logits, E);
      for (int64_t i = 0; i < k; i++) product += scores[static_cast<size_t>(experts[i])] * d_weights[i];
      for (int64_t i = 0; i < k; i++) d[experts[i]] = d_weights[i];
      for (int64_t e = 0; e < E; e++) d[e] = scores[static_cast<size_t>(e)] * (d[e] - product);
      return;
    case RouterScore::Sigmoid:
      for (int64_t i = 0; i < k; i++) {
        const T si = scores[static_cast<size_t>(i)] = sigmoid(logits[experts[i]]);
        sum += si, product += si * d_weights[i];
      }
      sum += T(1e-20);
      for (int64_t i = 0; i < k; i++) {
        const T si = scores[static_cast<size_t>(i)];
        const T ds = T(s.scale) * (s.renormalize ? (d_weights[i] - product / sum) / sum : d_weights[i]);
        d[experts[i]] = ds * si * (T(1) - si);
      }
      return;
  }
}

/// d (E) += p (slope - sum p slope), p = softmax(logits).
template <class T>
void add_balance(T* d, const T* slope, const T* logits, int64_t E, std::vector<T>& scores) {
  softmax(scores.data(), logits, E);
  T product = 0;
  for (int64_t e = 0; e < E; e++) product += scores[static_cast<size_t>(e)] * slope[e];
  for (int64_t e = 0; e < E; e++) d[e] += scores[static_cast<size_t>(e)] * (slope[e] - product);
}

struct Sizes {
  int64_t T, k, R, E;
};

/// What all have in common.
Sizes check_routing(const char* who, const Routing& r, DType weights) {
  CHECK(r.experts.shape.rank() == 2 && r.offsets.shape.rank() == 1 && r.offsets.numel() > 1,
        "{}: experts ('{}') {} and offsets ('{}') {} must be (T, k) and (E + 1)", who, r.experts.name,
        r.experts.shape.str(), r.offsets.name, r.offsets.shape.str());
  const Sizes s = {r.experts.shape[0], r.experts.shape[1], r.experts.numel(), r.offsets.numel() - 1};
  CHECK(s.k >= 1 && s.k <= std::min(s.E, RouterShape::kMaxTopK), "{}: {} experts of {} a token, at most {}", who, s.k,
        s.E, RouterShape::kMaxTopK);
  CHECK(s.R <= std::numeric_limits<int32_t>::max(), "{}: {} rows do not fit 32 bits", who, s.R);
  check_tensor(r.experts, fmt::format("{}: experts", who).c_str(), r.experts.shape, DType::I32);
  check_tensor(r.rows, fmt::format("{}: rows", who).c_str(), r.experts.shape, DType::I32);
  check_tensor(r.slots, fmt::format("{}: slots", who).c_str(), {s.R}, DType::I32);
  check_tensor(r.offsets, fmt::format("{}: offsets", who).c_str(), {s.E + 1}, DType::I32);
  check_tensor(r.row_weights, fmt::format("{}: row_weights", who).c_str(), {s.R}, weights);
  return s;
}

void check_shape(const char* who, const Sizes& s, const RouterShape& shape) {
  CHECK(shape.num_experts == s.E && shape.top_k == s.k, "{}: the routing is of {} of {} experts, the shape of {} of {}",
        who, s.k, s.E, shape.top_k, shape.num_experts);
  if (shape.score != RouterScore::Sigmoid || shape.num_groups == 1) return;
  CHECK(shape.num_groups > 0 && s.E % shape.num_groups == 0 && s.E / shape.num_groups >= 2 && shape.top_groups >= 1 &&
            shape.top_groups <= std::min(shape.num_groups, RouterShape::kMaxTopK) &&
            s.k <= shape.top_groups * (s.E / shape.num_groups),
        "{}: {} experts in {} groups, of which {} are chosen from", who, s.E, shape.num_groups, shape.top_groups);
}

}  // namespace

void route_forward(Device& device, const Routing& routing, ConstTensor logits, ConstTensor select_bias,
                   const RouterShape& shape) {
  const char* who = "route_forward";
  const Sizes s = check_routing(who, routing, logits.dtype);
  check_shape(who, s, shape);
  check_tensor(logits, "route_forward: logits", {s.T, s.E}, accumulator_dtype(logits.dtype));
  if (select_bias) {
    CHECK(shape.score == RouterScore::Sigmoid, "route_forward: a bias of the selection ('{}') goes with Sigmoid only",
          select_bias.name);
    check_tensor(select_bias, "route_forward: select_bias", {s.E}, logits.dtype);
  }
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return route_forward_cuda(device, routing, logits, select_bias, shape);
  }
  dispatch_float(logits.dtype, who, [&]<class F>(F) {
    int32_t *const experts = routing.experts.as<int32_t>(), *const rows = routing.rows.as<int32_t>(),
                   *const slots = routing.slots.as<int32_t>(), *const offsets = routing.offsets.as<int32_t>();
    F* const row_weights = routing.row_weights.as<F>();
    std::vector<F> weights(static_cast<size_t>(s.R));
    parallel_for(s.T, token_grain(s.E), [&](int64_t begin, int64_t end) {
      std::vector<F> scores(static_cast<size_t>(s.E));
      for (int64_t t = begin; t < end; t++) {
        route_token(experts + t * s.k, weights.data() + t * s.k, logits.as<F>() + t * s.E,
                    select_bias ? select_bias.as<F>() : nullptr, shape, scores);
      }
    });
    std::fill_n(offsets, s.E + 1, 0);
    for (int64_t i = 0; i < s.R; i++) offsets[experts[i] + 1]++;
    for (int64_t e = 0; e < s.E; e++) offsets[e + 1] += offsets[e];
    std::vector<int32_t> next(offsets, offsets + s.E);
    for (int64_t i = 0; i < s.R; i++) {
      const int32_t row = next[static_cast<size_t>(experts[i])]++;
      rows[i] = row, slots[row] = static_cast<int32_t>(i), row_weights[row] = weights[static_cast<size_t>(i)];
    }
  });
}

void route_backward(Device& device, Tensor d_logits, ConstTensor d_row_weights, ConstTensor logits,
                    const Routing& routing, const RouterShape& shape, ConstTensor balance_slope, ConstTensor is_token) {
  const char* who = "route_backward";
  const Sizes s = check_routing(who, routing, logits.dtype);
  check_shape(who, s, shape);
  check_tensor(logits, "route_backward: logits", {s.T, s.E}, accumulator_dtype(logits.dtype));
  check_tensor(d_row_weights, "route_backward: d_row_weights", {s.R}, logits.dtype);
  check_tensor(d_logits, "route_backward: d_logits", logits.shape, d_logits.dtype);
  CHECK(static_cast<bool>(balance_slope) == static_cast<bool>(is_token),
        "route_backward: balance_slope and is_token come together");
  if (balance_slope) {
    check_tensor(balance_slope, "route_backward: balance_slope", {s.E}, logits.dtype);
    check_tensor(is_token, "route_backward: is_token", {s.T}, DType::I32);
  }
  if constexpr (kHasCuda) {
    if (device.is_cuda()) {
      return route_backward_cuda(device, d_logits, d_row_weights, logits, routing, shape, balance_slope, is_token);
    }
  }
  dispatch_float(logits.dtype, who, [&]<class F>(F) {
    const int32_t *const experts = routing.experts.as<int32_t>(), *const rows = routing.rows.as<int32_t>();
    parallel_for(s.T, token_grain(s.E), [&](int64_t begin, int64_t end) {
      std::vector<F> scores(static_cast<size_t>(s.E)), d_weights(static_cast<size_t>(s.k));
      for (int64_t t = begin; t < end; t++) {
        for (int64_t i = 0; i < s.k; i++) d_weights[static_cast<size_t>(i)] = d_row_weights.as<F>()[rows[t * s.k + i]];
        F* const d = d_logits.as<F>() + t * s.E;
        const F* const z = logits.as<F>() + t * s.E;
        route_token_backward(d, d_weights.data(), experts + t * s.k, z, shape, scores);
        if (balance_slope && is_token.as<int32_t>()[t]) add_balance(d, balance_slope.as<F>(), z, s.E, scores);
      }
    });
  });
}

void route_statistics(Device& device, Tensor counts, Tensor probabilities, ConstTensor logits, const Routing& routing,
                      ConstTensor is_token) {
  const char* who = "route_statistics";
  const Sizes s = check_routing(who, routing, logits.dtype);
  check_tensor(counts, "route_statistics: counts", {s.E}, DType::F64);
  if (probabilities) check_tensor(probabilities, "route_statistics: probabilities", {s.E}, DType::F64);
  check_tensor(logits, "route_statistics: logits", {s.T, s.E}, accumulator_dtype(logits.dtype));
  check_tensor(is_token, "route_statistics: is_token", {s.T}, DType::I32);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return route_statistics_cuda(device, counts, probabilities, logits, routing, is_token);
  }
  dispatch_float(logits.dtype, who, [&]<class F>(F) {
    std::vector<F> p(static_cast<size_t>(s.E));
    for (int64_t t = 0; t < s.T; t++) {
      if (!is_token.as<int32_t>()[t]) continue;
      for (int64_t i = 0; i < s.k; i++) counts.as<double>()[routing.experts.as<int32_t>()[t * s.k + i]] += 1;
      if (!probabilities) continue;
      softmax(p.data(), logits.as<F>() + t * s.E, s.E);
      for (int64_t e = 0; e < s.E; e++) probabilities.as<double>()[e] += double(p[static_cast<size_t>(e)]);
    }
  });
}

void route_gather(Device& device, Tensor to, ConstTensor from, const Routing& routing) {
  const char* who = "route_gather";
  const Sizes s = check_routing(who, routing, accumulator_dtype(from.dtype));
  CHECK(from.shape.rank() == 2, "{}: from ('{}') is {}, expected (T, C)", who, from.name, from.shape.str());
  const int64_t C = from.shape[1];
  check_tensor(from, "route_gather: from", {s.T, C}, from.dtype);
  check_tensor(to, "route_gather: to", {s.R, C}, from.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return route_gather_cuda(device, to, from, routing);
  }
  dispatch_float(from.dtype, who, [&]<class F>(F) {
    parallel_for(s.R, token_grain(C), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        std::copy_n(from.as<F>() + routing.slots.as<int32_t>()[r] / s.k * C, C, to.as<F>() + r * C);
      }
    });
  });
}

void route_combine(Device& device, Tensor to, ConstTensor from, const Routing& routing, const CombineTerms& terms) {
  const char* who = "route_combine";
  const DType sums = accumulator_dtype(from.dtype);
  const Sizes s = check_routing(who, routing, sums);
  CHECK(from.shape.rank() == 2, "{}: from ('{}') is {}, expected (R, C)", who, from.name, from.shape.str());
  const int64_t C = from.shape[1];
  check_tensor(from, "route_combine: from", {s.R, C}, from.dtype);
  check_tensor(to, "route_combine: to", {s.T, C}, from.dtype);
  if (terms.bias) check_tensor(terms.bias, "route_combine: bias", {s.E, C}, from.dtype);
  if (terms.shared) check_tensor(terms.shared, "route_combine: shared", to.shape, from.dtype);
  if (terms.shared_gate) check_tensor(terms.shared_gate, "route_combine: shared_gate", {s.T, 1}, from.dtype);
  if (terms.addend) check_tensor(terms.addend, "route_combine: addend", to.shape, from.dtype);
  CHECK(!terms.shared_gate || terms.shared, "route_combine: a gate ('{}') of nothing", terms.shared_gate.name);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return route_combine_cuda(device, to, from, routing, terms);
  }
  dispatch_float(from.dtype, who, [&]<class F>(F) {
    const int32_t *const experts = routing.experts.as<int32_t>(), *const rows = routing.rows.as<int32_t>();
    const F* const row_weights = routing.row_weights.as<F>();
    parallel_for(s.T, token_grain(s.k * C), [&](int64_t begin, int64_t end) {
      std::vector<F> sum(static_cast<size_t>(C));
      const auto add = [&](F factor, const F* x) {
        for (int64_t c = 0; c < C; c++) sum[static_cast<size_t>(c)] += factor * x[c];
      };
      for (int64_t t = begin; t < end; t++) {
        std::fill(sum.begin(), sum.end(), F(0));
        for (int64_t i = t * s.k; i < (t + 1) * s.k; i++) add(F(1), from.as<F>() + rows[i] * C);
        for (int64_t i = t * s.k; terms.bias && i < (t + 1) * s.k; i++) {
          add(row_weights[rows[i]], terms.bias.as<F>() + experts[i] * C);
        }
        if (terms.shared) {
          add(terms.shared_gate ? sigmoid(terms.shared_gate.as<F>()[t]) : F(1), terms.shared.as<F>() + t * C);
        }
        if (terms.addend) add(F(1), terms.addend.as<F>() + t * C);
        std::copy_n(sum.data(), C, to.as<F>() + t * C);
      }
    });
  });
}

void route_bias_backward(Device& device, Tensor d_bias, Tensor d_row_weights, ConstTensor d_to, ConstTensor bias,
                         const Routing& routing) {
  const char* who = "route_bias_backward";
  const DType sums = accumulator_dtype(d_to.dtype);
  const Sizes s = check_routing(who, routing, sums);
  CHECK(d_to.shape.rank() == 2, "{}: d_to ('{}') is {}, expected (T, C)", who, d_to.name, d_to.shape.str());
  const int64_t C = d_to.shape[1];
  check_tensor(d_to, "route_bias_backward: d_to", {s.T, C}, d_to.dtype);
  check_tensor(bias, "route_bias_backward: bias", {s.E, C}, d_to.dtype);
  check_tensor(d_bias, "route_bias_backward: d_bias", bias.shape, sums);
  check_tensor(d_row_weights, "route_bias_backward: d_row_weights", {s.R}, sums);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return route_bias_backward_cuda(device, d_bias, d_row_weights, d_to, bias, routing);
  }
  dispatch_float(d_to.dtype, who, [&]<class F>(F) {
    const int32_t *const offsets = routing.offsets.as<int32_t>(), *const slots = routing.slots.as<int32_t>();
    parallel_for(s.E, 1, [&](int64_t begin, int64_t end) {
      for (int64_t e = begin; e < end; e++) {
        const F* const b = bias.as<F>() + e * C;
        F* const db = d_bias.as<F>() + e * C;
        for (int64_t r = offsets[e]; r < offsets[e + 1]; r++) {
          const F* const d = d_to.as<F>() + slots[r] / s.k * C;
          const F w = routing.row_weights.as<F>()[r];
          F dw = 0;
          for (int64_t c = 0; c < C; c++) dw += d[c] * b[c], db[c] += w * d[c];
          d_row_weights.as<F>()[r] += dw;
        }
      }
    });
  });
}

void shared_gate_backward(Device& device, Tensor d_shared, Tensor d_gate, ConstTensor d_to, ConstTensor shared,
                          ConstTensor gate) {
  const char* who = "shared_gate_backward";
  CHECK(d_to.shape.rank() == 2, "{}: d_to ('{}') is {}, expected (T, C)", who, d_to.name, d_to.shape.str());
  const int64_t T = d_to.shape[0], C = d_to.shape[1];
  check_tensor(d_to, "shared_gate_backward: d_to", {T, C}, d_to.dtype);
  check_tensor(d_shared, "shared_gate_backward: d_shared", {T, C}, d_to.dtype);
  check_tensor(shared, "shared_gate_backward: shared", {T, C}, d_to.dtype);
  check_tensor(d_gate, "shared_gate_backward: d_gate", {T, 1}, d_to.dtype);
  check_tensor(gate, "shared_gate_backward: gate", {T, 1}, d_to.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return shared_gate_backward_cuda(device, d_shared, d_gate, d_to, shared, gate);
  }
  dispatch_float(d_to.dtype, who, [&]<class F>(F) {
    parallel_for(T, token_grain(C), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const F *const d = d_to.as<F>() + t * C, *const x = shared.as<F>() + t * C;
        const F open = sigmoid(gate.as<F>()[t]);
        F dot = 0;
        for (int64_t c = 0; c < C; c++) dot += d[c] * x[c], d_shared.as<F>()[t * C + c] = open * d[c];
        d_gate.as<F>()[t] = dot * open * (F(1) - open);
      }
    });
  });
}

void route_balance(Device& device, Tensor slope, Tensor loss, ConstTensor counts, ConstTensor probabilities,
                   double weight, int64_t num_rows) {
  const char* who = "route_balance";
  CHECK(counts.shape.rank() == 2, "{}: counts ('{}') is {}, expected (layers, E)", who, counts.name,
        counts.shape.str());
  const int64_t layers = counts.shape[0], E = counts.shape[1];
  check_tensor(counts, "route_balance: counts", counts.shape, DType::F64);
  check_tensor(probabilities, "route_balance: probabilities", {E}, DType::F64);
  check_tensor(slope, "route_balance: slope", {E}, slope.dtype);
  check_tensor(loss, "route_balance: loss", {1}, DType::F64);
  CHECK(num_rows > 0, "{}: no rows", who);
  const double factor =
      weight * static_cast<double>(E) / (static_cast<double>(num_rows) * static_cast<double>(num_rows));
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return route_balance_cuda(device, slope, loss, counts, probabilities, factor);
  }
  dispatch_float(slope.dtype, who, [&]<class F>(F) {
    for (int64_t e = 0; e < E; e++) {
      double count = 0;
      for (int64_t l = 0; l < layers; l++) count += counts.as<double>()[l * E + e];
      slope.as<F>()[e] = F(factor * count);
      *loss.as<double>() += factor * count * probabilities.as<double>()[e];
    }
  });
}
