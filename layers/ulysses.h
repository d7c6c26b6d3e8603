// The two layouts of attention under sequence parallelism (Ulysses; Jacobs et al. 2023, arXiv:2309.14509), and what an
// all-to-all sends between them: from (my tokens, all heads) to (all tokens, my heads) and back.
//
//   P parts, Ts tokens each. Part p has query heads [p NH/P, (p+1) NH/P), and the kv heads that they read:
//   NKV/P of them, or, when there are fewer kv heads than parts, head floor(p NKV/P), which P/NKV parts then share.
//
// Tokens are the outer dimension and parts follow each other, so that what arrives of q, k, v is the (P Ts, heads, HD)
// that attention reads, and its output is what is sent back: only one side of each exchange is copied.
// CUDA: ulysses.cu.
#pragma once

#include "layers/core/device.h"
#include "layers/core/tensor.h"

struct UlyssesShape {
  int64_t num_heads = 0, num_kv_heads = 0, head_dim = 0;
  int64_t parts = 1;

  /// P divides NH; and NKV, or NKV divides P.
  bool is_legal() const { return num_heads % parts == 0 && (num_kv_heads % parts == 0 || parts % num_kv_heads == 0); }
  constexpr int64_t part_heads() const { return num_heads / parts; }
  constexpr int64_t part_kv_heads() const { return num_kv_heads > parts ? num_kv_heads / parts : 1; }
  /// q, k and v heads of a part.
  constexpr int64_t part_qkv_heads() const { return part_heads() + 2 * part_kv_heads(); }
  constexpr int64_t first_kv_head(int64_t part) const { return part * num_kv_heads / parts; }
  /// Neighbouring parts that have the same kv heads.
  constexpr int64_t sharers() const { return parts > num_kv_heads ? parts / num_kv_heads : 1; }

  /// A run of heads that a part and the whole have in common: [part_head, +count) is [head, +count) of qkv.
  struct HeadRun {
    int64_t part_head, head, count;
  };
  struct HeadRuns {
    HeadRun q, k, v;
  };
  constexpr HeadRuns runs(int64_t part) const {
    const int64_t q = part_heads(), kv = part_kv_heads(), first_kv = first_kv_head(part);
    return {{0, part * q, q}, {q, num_heads + first_kv, kv}, {q + kv, num_heads + num_kv_heads + first_kv, kv}};
  }
};

/// sent (P, Ts, part_qkv_heads, HD) <- qkv (Ts, NH + 2 NKV, HD). Arrives as (P Ts, part_qkv_heads, HD).
void ulysses_pack_qkv(Device& device, Tensor sent, ConstTensor qkv, const UlyssesShape& shape);
/// The way back of its gradient: dqkv (Ts, NH + 2 NKV, HD) <- received (P, Ts, part_qkv_heads, HD). The parts that
/// share a kv head are added up in their order.
void ulysses_unpack_dqkv(Device& device, Tensor dqkv, ConstTensor received, const UlyssesShape& shape);

/// o (Ts, NH, HD) <- received (P, Ts, NH / P, HD).
void ulysses_unpack_heads(Device& device, Tensor o, ConstTensor received, const UlyssesShape& shape);
/// The way back of its gradient: sent (P, Ts, NH / P, HD) <- d_o (Ts, NH, HD).
void ulysses_pack_heads(Device& device, Tensor sent, ConstTensor d_o, const UlyssesShape& shape);

// CUDA kernels (ulysses.cu); called by the front doors above after the contract is checked.
void ulysses_pack_qkv_cuda(Device& device, Tensor sent, ConstTensor qkv, const UlyssesShape& shape);
void ulysses_unpack_dqkv_cuda(Device& device, Tensor dqkv, ConstTensor received, const UlyssesShape& shape);
void ulysses_unpack_heads_cuda(Device& device, Tensor o, ConstTensor received, const UlyssesShape& shape);
void ulysses_pack_heads_cuda(Device& device, Tensor sent, ConstTensor d_o, const UlyssesShape& shape);
