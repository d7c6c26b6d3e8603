// Front doors and the CPU loops that specify the fused LM head and cross-entropy. Contract and formulas: loss.h.
//
// Rows that have a target are gathered into tiles. A tile runs
//   x_tile -> logits (linear_forward) -> nll and, in the same memory, dz -> dw +=, dx_tile (linear_backward) -> dx
#include "layers/loss.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "layers/core/math.h"
#include "layers/core/parallel.h"
#include "layers/linear.h"
#include "layers/loss_scratch.h"

namespace {

using detail::LossScratch;

constexpr int32_t kNoTarget = -100;
constexpr int64_t kGrainElements = 16384;
constexpr int64_t kBlock = 1024;  // columns between two looks at the running maximum: they stay in the L1 cache

/// The arguments of the two front doors; dx and dw are null in a forward.
struct Problem {
  Tensor nll;
  ConstTensor x, w, targets;
  LossRows rows;
  Tensor logits, dx, dw;
  double softcap, logit_scale, grad_scale;
  int64_t T, C, V;

  bool wants_gradient() const { return static_cast<bool>(dx); }
  const int32_t* row_order() const { return rows.rows.as<int32_t>(); }
};

/// to[i] = from[rows[i]], or with `kScatter` to[rows[i]] = from[i]; rows of C.
template <bool kScatter, class T>
void move_rows(T* to, const T* from, const int32_t* rows, int64_t count, int64_t C) {
  parallel_for(count, kGrainElements / std::max<int64_t>(C, 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t to_row = kScatter ? rows[i] : i, from_row = kScatter ? i : rows[i];
      std::memcpy(to + to_row * C, from + from_row * C, static_cast<size_t>(C) * sizeof(T));
    }
  });
}

template <class T>
struct RowStatistics {
  T max;
  double sum;  // of exp(z - max)
};

/// What is between x W^T and the logits.
template <class T>
struct LogitMap {
  T scale, cap;

  explicit LogitMap(const Problem& p) : scale(static_cast<T>(p.logit_scale)), cap(static_cast<T>(p.softcap)) {}
};

/// Scales and caps the logits of a row in place and finds their maximum and the sum of exponentials, in one pass over
/// memory: each block is read again from the L1 cache, and the sum so far is rescaled when the maximum grows.
template <class T>
RowStatistics<T> map_and_sum(T* z, int64_t V, const LogitMap<T>& map) {
  const auto [scale, cap] = map;
  RowStatistics<T> row{std::numeric_limits<T>::lowest(), 0.0};
  for (int64_t begin = 0; begin < V; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, V);
    if (scale != 1) {
#pragma omp simd
      for (int64_t v = begin; v < end; v++) z[v] *= scale;
    }
    if (cap > 0) {
      const T inverse = T(1) / cap;
#pragma omp simd
      for (int64_t v = begin; v < end; v++) z[v] = cap * fast_tanh(z[v] * inverse);
    }
    T max = row.max;
#pragma omp simd reduction(max : max)
    for (int64_t v = begin; v < end; v++) max = z[v] > max ? z[v] : max;
    if (max > row.max) {
      row.sum *= static_cast<double>(fast_exp(row.max - max));
      row.max = max;
    }
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t v = begin; v < end; v++) sum += fast_exp(z[v] - max);
    row.sum += static_cast<double>(sum);
  }
  return row;
}

/// z = the gradient of x W^T, in place: (exp(z - max) / sum - onehot) * grad_scale, times the scale of the logits and
/// d cap tanh(u / cap) / du = 1 - (z / cap)^2.
template <class T>
void logits_to_gradient(T* z, int64_t V, int64_t target, const RowStatistics<T>& row, T grad_scale,
                        const LogitMap<T>& map) {
  const T cap = map.cap, scale = grad_scale * map.scale;
  const T k = static_cast<T>(static_cast<double>(scale) / row.sum);
  const T inverse_cap = cap > 0 ? T(1) / cap : T(0);
  const auto slope = [&](T capped) { return T(1) - (capped * inverse_cap) * (capped * inverse_cap); };
  const T max = row.max, zt = z[target];
  const T dz_target = (fast_exp(zt - max) * k - scale) * slope(zt);
#pragma omp simd
  for (int64_t v = 0; v < V; v++) z[v] = fast_exp(z[v] - max) * k * slope(z[v]);
  z[target] = dz_target;
}

/// x W^T of the rows listed in p.rows at [begin, begin + count).
Tensor tile_logits(Device& device, const LossScratch& scratch, const Problem& p, int64_t begin, int64_t count) {
  dispatch_float(p.x.dtype, "loss", [&]<class T>(T) {
    move_rows<false>(scratch.x.as<T>(), p.x.as<T>(), p.row_order() + begin, count, p.C);
  });
  const Tensor z = scratch.logits.rows(0, count);
  linear_forward(device, z, scratch.x.rows(0, count), p.w, {});
  return z;
}

/// A tile of rows without a target: writes their logits, which nothing but the caller's `logits` needs.
template <class T>
void logits_tile(Device& device, const LossScratch& scratch, const Problem& p, int64_t begin, int64_t count) {
  T* z = tile_logits(device, scratch, p, begin, count).as<T>();
  T* logits = p.logits.as<T>();
  parallel_for(count, kGrainElements / p.V, [&](int64_t i_begin, int64_t i_end) {
    for (int64_t i = i_begin; i < i_end; i++) {
      map_and_sum(z + i * p.V, p.V, LogitMap<T>(p));
      std::copy_n(z + i * p.V, p.V, logits + p.row_order()[begin + i] * p.V);
    }
  });
}

/// A tile of rows with a target: their nll, and what is wanted of their logits and gradients.
template <class T>
void loss_tile(Device& device, const LossScratch& scratch, const Problem& p, int64_t begin, int64_t count) {
  const Tensor z_tensor = tile_logits(device, scratch, p, begin, count);
  T* z = z_tensor.as<T>();
  T* logits = p.logits ? p.logits.as<T>() : nullptr;
  const LogitMap<T> map(p);
  const T grad_scale = static_cast<T>(p.grad_scale);
  const int32_t* rows = p.row_order() + begin;
  double* nll = scratch.nll.as<double>() + begin;
  const int32_t* targets = p.targets.as<int32_t>();
  parallel_for(count, kGrainElements / p.V, [&](int64_t i_begin, int64_t i_end) {
    for (int64_t i = i_begin; i < i_end; i++) {
      T* zi = z + i * p.V;
      const int64_t target = targets[rows[i]];
      const RowStatistics<T> row = map_and_sum(zi, p.V, map);
      nll[i] = std::log(row.sum) + (static_cast<double>(row.max) - static_cast<double>(zi[target]));
      if (logits) std::copy_n(zi, p.V, logits + rows[i] * p.V);
      if (p.wants_gradient()) logits_to_gradient(zi, p.V, target, row, grad_scale, map);
    }
  });
  if (!p.wants_gradient()) return;
  linear_backward(device, scratch.dx.rows(0, count), p.dw, {}, z_tensor, scratch.x.rows(0, count), p.w);
  move_rows<true>(p.dx.as<T>(), scratch.dx.as<T>(), rows, count, p.C);
}

/// Calls `op(begin, count)` for [begin, end) in even pieces of at most `tile`.
template <class Op>
void for_each_tile(int64_t begin, int64_t end, int64_t tile, Op&& op) {
  if (begin == end) return;
  const int64_t n = end - begin, num_tiles = (n + tile - 1) / tile;
  for (int64_t i = 0; i < num_tiles; i++) {
    const int64_t from = i * n / num_tiles, to = (i + 1) * n / num_tiles;
    op(begin + from, to - from);
  }
}

// Rows without a target come first: their x is read before dx, which may be the same memory, is written.
template <class T>
void run(Device& device, const LossScratch& scratch, const Problem& p) {
  const int64_t num_targets = p.rows.num_targets;
  if (p.logits) {
    for_each_tile(num_targets, p.T, scratch.tile,
                  [&](int64_t begin, int64_t count) { logits_tile<T>(device, scratch, p, begin, count); });
  }
  for_each_tile(0, num_targets, scratch.tile,
                [&](int64_t begin, int64_t count) { loss_tile<T>(device, scratch, p, begin, count); });
  if (p.wants_gradient()) {
    for (int64_t i = num_targets; i < p.T; i++) std::fill_n(p.dx.as<T>() + p.row_order()[i] * p.C, p.C, T(0));
  }
  double sum = 0;
  for (int64_t i = 0; i < num_targets; i++) sum += scratch.nll.as<double>()[i];
  *p.nll.as<double>() += sum;
}

void check_and_run(const char* who, Device& device, const Problem& p, const LossShape& shape, const Tensor& workspace) {
  const auto check = [&](const ConstTensor& t, const char* name, Shape expected, DType dtype) {
    check_tensor(t, fmt::format("{}: {}", who, name).c_str(), expected, dtype);
  };
  check(p.nll, "nll", {1}, DType::F64);
  check(p.x, "x", {p.T, p.C}, p.x.dtype);
  check(p.w, "w", {p.V, p.C}, p.x.dtype);
  check(p.targets, "targets", {p.T}, DType::I32);
  check(p.rows.rows, "rows", {p.T}, DType::I32);
  CHECK(p.rows.num_targets >= 0 && p.rows.num_targets <= p.T, "{}: {} of {} rows have a target", who,
        p.rows.num_targets, p.T);
  if (p.logits) check(p.logits, "logits", {p.T, p.V}, accumulator_dtype(p.x.dtype));
  CHECK(p.V > 0, "{}: w ('{}') {} has an empty vocabulary", who, p.w.name, p.w.shape.str());
  CHECK(shape.tile_tokens > 0, "{}: tile_tokens {} must be positive", who, shape.tile_tokens);
  CHECK(shape.softcap >= 0, "{}: softcap {} is negative; 0 = none", who, shape.softcap);
  CHECK(std::isfinite(shape.logit_scale) && shape.logit_scale != 0, "{}: logit_scale is {}", who, shape.logit_scale);
  const LossScratch scratch(workspace.data, shape, p.x.dtype, p.T, p.C, p.V);
  CHECK((workspace.data && workspace.size_bytes() >= scratch.size_bytes) || scratch.size_bytes == 0,
        "{}: workspace ('{}') has {} bytes, {} tokens in tiles of {} need {} (loss_workspace_bytes)", who,
        workspace.name, workspace.data ? workspace.size_bytes() : 0, p.T, shape.tile_tokens, scratch.size_bytes);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) {
      return loss_cuda(device, p.nll, p.dx, p.dw, p.x, p.w, p.targets, p.rows, p.grad_scale, shape, workspace,
                       p.logits);
    }
  }
  dispatch_float(p.x.dtype, who, [&]<class T>(T) { run<T>(device, scratch, p); });
}

Problem make_problem(const char* who, Tensor nll, ConstTensor x, ConstTensor w, ConstTensor targets,
                     const LossRows& rows, const LossShape& shape, Tensor logits) {
  CHECK(x.shape.rank() == 2 && w.shape.rank() == 2, "{}: x ('{}') is {} and w ('{}') is {}, expected (T, C) and (V, C)",
        who, x.name, x.shape.str(), w.name, w.shape.str());
  return {nll, x,          w,          targets,   rows, logits, {}, {}, shape.softcap, shape.logit_scale,
          0.0, x.shape[0], x.shape[1], w.shape[0]};
}

}  // namespace

std::vector<int32_t> loss_rows(std::span<const int32_t> targets, int64_t V, int64_t& num_targets) {
  std::vector<int32_t> with, without;
  for (size_t t = 0; t < targets.size(); t++) {
    CHECK(targets[t] == kNoTarget || (targets[t] >= 0 && targets[t] < V),
          "loss: target {} at position {} is neither in the vocabulary [0, {}) nor {} (no loss)", targets[t], t, V,
          kNoTarget);
    (targets[t] == kNoTarget ? without : with).push_back(static_cast<int32_t>(t));
  }
  num_targets = static_cast<int64_t>(with.size());
  with.insert(with.end(), without.begin(), without.end());
  return with;
}

size_t loss_workspace_bytes(const LossShape& shape, DType dtype, int64_t T, int64_t C, int64_t V) {
  return LossScratch(nullptr, shape, dtype, T, C, V).size_bytes;
}

void loss_forward(Device& device, Tensor nll, ConstTensor x, ConstTensor w, ConstTensor targets, const LossRows& rows,
                  const LossShape& shape, Tensor workspace, Tensor logits) {
  const Problem problem = make_problem("loss_forward", nll, x, w, targets, rows, shape, logits);
  check_and_run("loss_forward", device, problem, shape, workspace);
}

void loss_forward_backward(Device& device, Tensor nll, Tensor dx, Tensor dw, ConstTensor x, ConstTensor w,
                           ConstTensor targets, const LossRows& rows, double grad_scale, const LossShape& shape,
                           Tensor workspace, Tensor logits) {
  Problem problem = make_problem("loss_forward_backward", nll, x, w, targets, rows, shape, logits);
  check_tensor(dx, "loss_forward_backward: dx", x.shape, x.dtype);
  check_tensor(dw, "loss_forward_backward: dw", w.shape, accumulator_dtype(x.dtype));
  problem.dx = dx, problem.dw = dw, problem.grad_scale = grad_scale;
  check_and_run("loss_forward_backward", device, problem, shape, workspace);
}
