// Mesh: which rank does what. rank = [dp_replicate][dp_shard][cp][sp], sp fastest.
//
//   sp            ranks that share the tokens of a row (Ulysses): neighbours: of one host when mpirun fills host after
//   host shard         dp_shard x cp x sp: the ranks that parameters, gradients and moments are sharded over (ZeRO-3)
//   replicate     ranks that hold the same shard, in different replicas (HSDP)
//   data parallel dp_replicate x dp_shard: groups that read different rows
#pragma once

#include "comm/communicator.h"
#include "layers/core/device.h"

/// Sizes; dp_shard follows from the others.
struct MeshShape {
  int world = 1, dp_replicate = 1, dp_shard = 1, cp = 1, sp = 1;

  int shards() const { return dp_shard * cp * sp; }
  int data_parallel() const { return dp_replicate * dp_shard; }
};

/// An Error lists what is legal for this number of ranks.
MeshShape mesh_shape(int64_t world, int64_t dp_replicate, int64_t cp, int64_t sp);

class Mesh {
 public:
  /// All ranks call it. Tensors that the groups exchange are in the memory of `device`, which must outlive the mesh.
  Mesh(Communicator& world, const MeshShape& shape, Device& device);

  const MeshShape& shape() const { return shape_; }
  Communicator& world() { return world_; }
  // For values of the host.
  Communicator& shard() { return *shard_; }
  Communicator& replicate() { return *replicate_; }
  Communicator& sp() { return *sp_; }
  // The same ranks, for tensors of the device.
  Communicator& shard_tensors() { return shard_on_device_ ? *shard_on_device_ : *shard_; }
  Communicator& replicate_tensors() { return replicate_on_device_ ? *replicate_on_device_ : *replicate_; }
  Communicator& sp_tensors() { return sp_on_device_ ? *sp_on_device_ : *sp_; }
  /// How tensors travel, for the log: MPI, NCCL, or MPI through the memory of the host.
  const char* transport() const;
  int data_parallel_rank() const { return world_.rank() / (shape_.cp * shape_.sp); }
  int replica() const { return world_.rank() / shape_.shards(); }

 private:
  MeshShape shape_;
  bool is_gpu_each_ = false;
  Communicator& world_;
  std::unique_ptr<Communicator> shard_, replicate_, sp_;
  std::unique_ptr<Communicator> shard_on_device_, replicate_on_device_, sp_on_device_;  // null on the CPU
};
