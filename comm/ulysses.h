// Ulysses: moves attention between (my tokens, all heads) and (all tokens, my heads) of a sequence group, one
// all-to-all each way. The layouts are those of layers/ulysses.h. Of a group of one it is never asked.
#pragma once

#include "comm/communicator.h"
#include "comm/traffic.h"
#include "layers/core/arena.h"
#include "layers/ulysses.h"

class Ulysses {
 public:
  /// Buffers for `tokens` tokens a rank. `sp` null: measures only.
  Ulysses(Arena& arena, DType dtype, const UlyssesShape& shape, int64_t tokens, Communicator* sp);

  const UlyssesShape& shape() const { return shape_; }
  /// Which part of the heads is this rank's.
  int part() const { return sp_->rank(); }

  /// all (P Ts, part_qkv_heads, HD) <- mine (Ts, NH + 2 NKV, HD)
  void scatter_heads(Device& device, Tensor all, ConstTensor mine);
  /// mine (Ts, NH, HD) <- all (P Ts, NH / P, HD)
  void gather_heads(Device& device, Tensor mine, ConstTensor all);
  /// The gradient of gather_heads.
  void gather_heads_backward(Device& device, Tensor d_all, ConstTensor d_mine);
  /// The gradient of scatter_heads.
  void scatter_heads_backward(Device& device, Tensor d_mine, ConstTensor d_all);

  const Traffic::Kind& traffic() const { return traffic_; }

 private:
  void exchange(Tensor received, ConstTensor sent);
  Tensor parts_of(int64_t Ts, int64_t heads);

  UlyssesShape shape_;
  Communicator* sp_;
  Tensor staging_;
  Traffic::Kind traffic_;
};
