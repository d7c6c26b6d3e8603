// ParamStore: the weights and gradients of all units, sharded over the ranks (ZeRO-3), behind one protocol:
//
//   gather(u)            starts to bring unit u together; returns at once
//   use(u)   -> views    waits for it; the full weights, valid until release(u)
//   release(u)
//   grads(u) -> views    full gradients of u, to be accumulated into (+=)
//   reduce(u)            sums them over the ranks into this rank's shard
//
// Knows units and flat ranges, not what the tensors mean. On one rank a shard is the whole unit, and gather, release
// and reduce have nothing to do.
#pragma once

#include <string>
#include <vector>

#include "comm/flat_layout.h"
#include "layers/core/arena.h"

struct UnitSpec {
  std::string name;
  std::vector<TensorSpec> tensors;
};

class ParamStore {
 public:
  ParamStore(Arena& arena, std::vector<UnitSpec> units, DType dtype, Device& device);

  size_t num_units() const { return units_.size(); }
  DType dtype() const { return dtype_; }
  const UnitSpec& spec(size_t u) const { return units_.at(u).spec; }
  const FlatLayout& layout(size_t u) const { return units_.at(u).layout; }

  void gather(size_t u);
  const std::vector<Tensor>& use(size_t u);
  void release(size_t u);
  const std::vector<Tensor>& grads(size_t u);
  void reduce(size_t u);

  /// This rank's part of the flat buffer of unit u: elements [shard_begin, shard_begin + numel).
  Tensor param_shard(size_t u) { return units_.at(u).param_flat; }
  Tensor grad_shard(size_t u) { return units_.at(u).grad_flat; }
  int64_t shard_begin(size_t u) const { return units_.at(u).layout.shard_begin(0); }

  void zero_grads();
  /// L2 norm of all gradients, over all ranks; in fp64.
  double grad_norm();

 private:
  struct Unit {
    UnitSpec spec;
    FlatLayout layout;
    Tensor param_flat, grad_flat;
    std::vector<Tensor> params, grads;
    int users = 0;
  };

  DType dtype_;
  Device& device_;
  std::vector<Unit> units_;
};
