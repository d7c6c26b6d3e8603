#include "comm/mesh.h"

#include <fmt/ranges.h>

#include <set>

#include "comm/nccl_comm.h"
#include "comm/staged_comm.h"

namespace {

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= n; d++) {
    if (n % d == 0) found.push_back(d);
  }
  return found;
}

}  // namespace

MeshShape mesh_shape(int64_t world, int64_t dp_replicate, int64_t cp, int64_t sp) {
  CHECK(cp == 1, "parallel.cp_size = {}: ring attention is not part of this version; use parallel.sp_size (Ulysses)",
        cp);
  CHECK(world >= 1 && world <= 1 << 20, "{} ranks, expected 1 to 2^20", world);
  CHECK(world % sp == 0, "parallel.sp_size = {} does not divide the {} ranks of this run: use {}", sp, world,
        fmt::join(divisors(world), ", "));
  CHECK(world / sp % dp_replicate == 0,
        "parallel.dp_replicate_size = {} does not divide {} ranks / sp_size {} = {}: use {}", dp_replicate, world, sp,
        world / sp, fmt::join(divisors(world / sp), ", "));
  const auto n = [](int64_t x) { return static_cast<int>(x); };
  return {n(world), n(dp_replicate), n(world / sp / cp / dp_replicate), n(cp), n(sp)};
}

Mesh::Mesh(Communicator& world, const MeshShape& shape, Device& device) : shape_(shape), world_(world) {
  CHECK(shape.world == world.size(), "a mesh of {} ranks for a world of {}", shape.world, world.size());
  const int rank = world.rank();
  shard_ = world.split(rank / shape.shards(), "the ranks of a replica");
  replicate_ = world.split(rank % shape.shards(), "the replicas of a shard");
  sp_ = world.split(rank / shape.sp, "a sequence group");
  if (!device.is_cuda()) return;
  const auto gpus = world.all_texts(world.host() + " " + device.id());
  is_gpu_each_ = std::set<std::string>(gpus.begin(), gpus.end()).size() == gpus.size();
  const auto on_device = [&](Communicator& host) -> std::unique_ptr<Communicator> {
    if (has_nccl() && is_gpu_each_ && host.size() > 1) return make_nccl_comm(host, device);
    return std::make_unique<StagedComm>(host, device);
  };
  shard_on_device_ = on_device(*shard_);
  replicate_on_device_ = on_device(*replicate_);
  sp_on_device_ = on_device(*sp_);
}

const char* Mesh::transport() const {
  if (!shard_on_device_) return "MPI";
  return has_nccl() && is_gpu_each_ ? "NCCL"
                                    : "MPI through the memory of the host (slow: ranks share a GPU, or no NCCL)";
}
