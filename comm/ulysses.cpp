#include "comm/ulysses.h"

Ulysses::Ulysses(Arena& arena, DType dtype, const UlyssesShape& shape, int64_t tokens, Communicator* sp)
    : shape_(shape), sp_(sp) {
  staging_ = arena.place(dtype, {shape.parts * tokens * shape.part_qkv_heads() * shape.head_dim}, "all-to-all");
}

Tensor Ulysses::parts_of(int64_t Ts, int64_t heads) {
  const Shape shape = {shape_.parts, Ts, heads, shape_.head_dim};
  return staging_.rows(0, shape.numel()).reshaped(shape);
}

void Ulysses::exchange(Tensor received, ConstTensor sent) {
  sp_->all_to_all(received.reshaped({received.numel()}), sent.reshaped({sent.numel()}));
  traffic_.add(static_cast<int64_t>(sent.size_bytes()) / shape_.parts * (shape_.parts - 1));
}

void Ulysses::scatter_heads(Device& device, Tensor all, ConstTensor mine) {
  Tensor sent = parts_of(mine.shape[0], shape_.part_qkv_heads());
  sent.name = "q, k, v";
  ulysses_pack_qkv(device, sent, mine, shape_);
  exchange(all, sent);
}

void Ulysses::gather_heads(Device& device, Tensor mine, ConstTensor all) {
  const Tensor received = parts_of(mine.shape[0], shape_.part_heads());
  all.name = "attention";
  exchange(received, all);
  ulysses_unpack_heads(device, mine, received, shape_);
}

void Ulysses::gather_heads_backward(Device& device, Tensor d_all, ConstTensor d_mine) {
  Tensor sent = parts_of(d_mine.shape[0], shape_.part_heads());
  sent.name = "gradient of attention";
  ulysses_pack_heads(device, sent, d_mine, shape_);
  exchange(d_all, sent);
}

void Ulysses::scatter_heads_backward(Device& device, Tensor d_mine, ConstTensor d_all) {
  const Tensor received = parts_of(d_mine.shape[0], shape_.part_qkv_heads());
  d_all.name = "gradient of q, k, v";
  exchange(received, d_all);
  ulysses_unpack_dqkv(device, d_mine, received, shape_);
}
