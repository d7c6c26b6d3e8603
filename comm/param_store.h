// ParamStore: the weights and gradients of all units, sharded over the ranks of a replica (ZeRO-3), behind one
// protocol:
//
//   gather(u)            starts to bring unit u together; returns at once
//   use(u)   -> views    waits for it; the full weights, valid until release(u)
//   release(u)
//   grads(u) -> views    full gradients of u, zero at first, to be accumulated into (+=)
//   reduce(u)            starts to sum them over the ranks into this rank's shard; ends the views
//   finish_grads()       after the last reduce of a step: waits for all, and sums over the replicas
//
// Units are used in their order or against it, so that neighbours may be gathered at once: between the first and the
// last unit, which have full buffers of their own, units share two, by turns. What is still in a buffer is not
// gathered again until the weights change. Knows units and flat ranges, not what the tensors mean.
//
// Every sum is taken in the order of ranks. With one shard a full unit is the shard: nothing is copied. BF16 weights
// are rounded from fp32 master weights, of which each rank has its shard.
//
// Full gradients are fp32 (fp64 for F64 weights). Shards of gradients are, too, or BF16 (grad_dtype): then what is sent
// is BF16, sums over ranks are taken in fp32, and each shard's sum over micro-batches is rounded once a micro-batch. A
// full unit is then no shard: its gradients have buffers by turns on one rank, too.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/flat_layout.h"
#include "comm/mesh.h"
#include "comm/traffic.h"
#include "layers/core/arena.h"

struct UnitSpec {
  std::string name;
  std::vector<TensorSpec> tensors;
};

class ParamStore {
 public:
  /// `mesh` null: plans for `shape` on an arena that only measures. `grad_dtype`: of the shards of gradients, BF16 or
  /// what gradients are without it.
  ParamStore(Arena& arena, std::vector<UnitSpec> units, DType dtype, const MeshShape& shape, Mesh* mesh, Device& device,
             std::optional<DType> grad_dtype = std::nullopt);
  /// Waits for what is under way, unless an error ends the run.
  ~ParamStore();
  ParamStore(const ParamStore&) = delete;

  size_t num_units() const { return units_.size(); }
  DType dtype() const { return dtype_; }
  Device& device() const { return device_; }
  const UnitSpec& spec(size_t u) const { return units_.at(u).spec; }
  const FlatLayout& layout(size_t u) const { return units_.at(u).layout; }

  void gather(size_t u);
  const std::vector<Tensor>& use(size_t u);
  void release(size_t u);
  const std::vector<Tensor>& grads(size_t u);
  void reduce(size_t u);

  /// This rank's part of the flat buffer of unit u: elements [shard_begin, shard_begin + numel). master_shard is
  /// param_shard itself unless weights are BF16. Who writes master weights rounds them (round_weights, or by itself),
  /// and calls weights_changed() afterwards.
  Tensor param_shard(size_t u) { return units_.at(u).param_shard; }
  Tensor master_shard(size_t u) { return has_master() ? units_.at(u).master_shard : param_shard(u); }
  bool has_master() const { return dtype_ == DType::BF16; }
  Tensor grad_shard(size_t u) { return units_.at(u).grad_shard; }
  int64_t shard_begin(size_t u) const { return units_.at(u).layout.shard_begin(shard_rank_); }
  void round_weights();
  void weights_changed();

  void zero_grads();
  void finish_grads();
  /// L2 norm of all gradients, over all ranks; in fp64. After finish_grads().
  double grad_norm();

  /// Since the start; without exchanges.
  const Traffic& traffic() const { return traffic_; }
  /// Elements of a shard of n that each of so many replicas sums.
  static int64_t replica_part(int64_t n, int replicas);

 private:
  struct Unit {
    UnitSpec spec;
    FlatLayout layout;
    Tensor param_shard, master_shard, grad_shard;
    size_t weight_slot = 0, grad_slot = 0;
    int users = 0;
  };
  /// Memory for the weights of one full unit.
  struct WeightSlot {
    int64_t numel = 0;
    Tensor weights;
    std::optional<size_t> unit;       // whose weights are here
    Communicator::Request gathering;  // until they are
    std::vector<Tensor> views;
  };
  /// Memory for the gradients of one full unit.
  struct GradSlot {
    int64_t numel = 0;
    Tensor grads;
    std::optional<size_t> unit;  // whose gradients are accumulated here
    std::vector<Tensor> views;
  };

  bool is_sharded() const { return shape_.shards() > 1; }
  /// Full gradients are not the shards themselves.
  bool has_full_grads() const { return is_sharded() || grad_dtype_ != full_grad_dtype_; }
  WeightSlot& weight_slot(size_t u) { return weight_slots_.at(units_.at(u).weight_slot); }
  GradSlot& grad_slot(size_t u) { return grad_slots_.at(units_.at(u).grad_slot); }
  void finish_reduce();
  void sum_replicas(Tensor grads);

  DType dtype_, full_grad_dtype_, grad_dtype_;
  MeshShape shape_;
  Mesh* mesh_;
  Device& device_;
  int shard_rank_ = 0;
  std::vector<Unit> units_;
  std::vector<WeightSlot> weight_slots_;
  std::vector<GradSlot> grad_slots_;
  Tensor sent_, received_;  // a gradient as it is sent, where that is not what it is; parts of one from every rank
  Tensor replica_scratch_;  // a shard's gradient, and what comes from the other replicas
  Tensor squares_;          // (1) F64: the sum of squares of this rank's gradients
  struct Reducing {
    size_t unit;
    Communicator::Request request;
  };
  std::optional<Reducing> reducing_;
  Traffic traffic_;
};
