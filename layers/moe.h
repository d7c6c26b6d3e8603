// Mixture of experts: which experts a token goes to, and the way there and back. Each token has k experts; its k copies
// are R = T k rows, sorted by expert and then by token, so that each expert's rows are neighbours and one grouped
// product (grouped_linear.h) serves all. No row is dropped, no expert has a capacity.
//
//   logits = x W^T + b                              in fp32 (fp64 for F64), see linear.h
//   SoftmaxSelected (Mixtral, Qwen3-MoE, gpt-oss):  top-k of logits;               w = softmax over the k
//   SoftmaxAll (Qwen-MoE, not renormalised):        top-k of p = softmax(logits);  w = p
//   Sigmoid (DeepSeek-V3, GLM-4-MoE):               s = sigmoid(logits);  top-k of s + bias within the best groups;
//                                                   w = scale s, divided by the sum of the k where renormalised;
//                                                   a group's score is the sum of its two best s + bias
//   y_t = sum over the k of w expert(x_t)           w is applied inside the expert, see gated_act.h
//
// Equal scores: the expert with the lower number. The selection has no derivative. CUDA: moe.cu, moe_rows.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

enum class RouterScore { SoftmaxSelected, SoftmaxAll, Sigmoid };

struct RouterShape {
  int64_t num_experts = 0, top_k = 0;  // E, k
  RouterScore score = RouterScore::SoftmaxSelected;
  bool renormalize = true;                 ///< Sigmoid
  int64_t num_groups = 1, top_groups = 1;  ///< Sigmoid: the experts of the best groups alone are chosen from
  double scale = 1;                        ///< Sigmoid

  static constexpr int64_t kMaxTopK = 32;  ///< of experts, and of groups
};

/// Where the tokens of a batch go.
struct Routing {
  Tensor experts;      ///< (T, k) I32: best first
  Tensor rows;         ///< (T, k) I32: where a copy lies among the sorted rows
  Tensor slots;        ///< (R) I32: t k + i of each row
  Tensor row_weights;  ///< (R): w of each row; F32 (F64 for F64)
  Tensor offsets;      ///< (E + 1) I32: the rows of expert e are [offsets[e], offsets[e + 1])
};

/// logits (T, E) F32 (F64 for F64); select_bias (E) in its dtype, or null: Sigmoid only.
void route_forward(Device& device, const Routing& routing, ConstTensor logits, ConstTensor select_bias,
                   const RouterShape& shape);

/// d_logits (T, E), any of F32, BF16 and F64 <- d_row_weights (R) in logits' dtype. With a load-balancing loss,
/// balance_slope (E) in logits' dtype is its derivative by softmax(logits) of every token that is one: is_token (T)
/// I32. Both null: none.
void route_backward(Device& device, Tensor d_logits, ConstTensor d_row_weights, ConstTensor logits,
                    const Routing& routing, const RouterShape& shape, ConstTensor balance_slope, ConstTensor is_token);

/// counts (E) F64 += rows of each expert; probabilities (E) F64 += sum of softmax(logits) over tokens, unless null. Of
/// the tokens that are one: is_token (T) I32.
void route_statistics(Device& device, Tensor counts, Tensor probabilities, ConstTensor logits, const Routing& routing,
                      ConstTensor is_token);

/// to (R, C) = from (T, C): row r is that of token slots[r] / k.
void route_gather(Device& device, Tensor to, ConstTensor from, const Routing& routing);

/// What else is added to a token when its rows come back.
struct CombineTerms {
  ConstTensor bias = {};         ///< (E, C): w times the bias of each of its experts
  ConstTensor shared = {};       ///< (T, C): of the expert that all tokens have
  ConstTensor shared_gate = {};  ///< (T, 1) in from's dtype: shared counts sigmoid of it; null: 1
  ConstTensor addend = {};       ///< (T, C); may be `to` itself
};

/// to (T, C) = sum over the k of from (R, C) + terms, added in fp32 (fp64) in that order, rounded once.
void route_combine(Device& device, Tensor to, ConstTensor from, const Routing& routing, const CombineTerms& terms);

/// d_bias (E, C) += in row_weights' dtype; d_row_weights (R) +=: the part of the bias. d_to (T, C).
void route_bias_backward(Device& device, Tensor d_bias, Tensor d_row_weights, ConstTensor d_to, ConstTensor bias,
                         const Routing& routing);

/// d_shared (T, C) = sigmoid(gate) d_to; d_gate (T, 1) in d_to's dtype. `shared`, `gate` as in CombineTerms.
void shared_gate_backward(Device& device, Tensor d_shared, Tensor d_gate, ConstTensor d_to, ConstTensor shared,
                          ConstTensor gate);

/// With counts (layers, E) F64 of all layers, probabilities (E) F64 their sum, over num_rows rows of logits in all:
/// slope (E) F32 (F64) = weight E (sum of counts_e) / num_rows^2, and loss (1) F64 += sum_e slope_e probabilities_e.
void route_balance(Device& device, Tensor slope, Tensor loss, ConstTensor counts, ConstTensor probabilities,
                   double weight, int64_t num_rows);

// CUDA kernels (moe.cu and moe_rows.cu); called by the front doors above after the contract is checked.
void route_forward_cuda(Device& device, const Routing& routing, ConstTensor logits, ConstTensor select_bias,
                        const RouterShape& shape);
void route_backward_cuda(Device& device, Tensor d_logits, ConstTensor d_row_weights, ConstTensor logits,
                         const Routing& routing, const RouterShape& shape, ConstTensor balance_slope,
                         ConstTensor is_token);
void route_statistics_cuda(Device& device, Tensor counts, Tensor probabilities, ConstTensor logits,
                           const Routing& routing, ConstTensor is_token);
void route_gather_cuda(Device& device, Tensor to, ConstTensor from, const Routing& routing);
void route_combine_cuda(Device& device, Tensor to, ConstTensor from, const Routing& routing, const CombineTerms& terms);
void route_bias_backward_cuda(Device& device, Tensor d_bias, Tensor d_row_weights, ConstTensor d_to, ConstTensor bias,
                              const Routing& routing);
void shared_gate_backward_cuda(Device& device, Tensor d_shared, Tensor d_gate, ConstTensor d_to, ConstTensor shared,
                               ConstTensor gate);
void route_balance_cuda(Device& device, Tensor slope, Tensor loss, ConstTensor counts, ConstTensor probabilities,
                        double factor);
