// NCCL between processes of one host, so that the trainer's use of it runs without a GPU: each communicator is a shared
// memory object with a mailbox for every pair of ranks. A call is done when it returns (streams run eagerly), and a
// rank that waits for others yields.
#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "test/simt/machine.h"

namespace {

constexpr size_t kBoxBytes = size_t{64} << 10;

/// A part of a message on its way from one rank to another: full while `num_sent` is ahead of `num_received`.
struct Mailbox {
  std::atomic<uint64_t> num_sent, num_received;
  size_t size_bytes;
  char data[kBoxBytes];
};

struct Operation {
  ncclComm_t comm;
  int peer;
  const char* from;  // of a send
  char* to;          // of a receive
  size_t left;
};

std::vector<Operation> group;
cudaStream_t group_stream = nullptr;
int group_depth = 0;

}  // namespace

struct ncclComm {
  int num_ranks, rank;
  std::string name;
  Mailbox* boxes;

  size_t size_bytes() const {
    return sizeof(Mailbox) * static_cast<size_t>(num_ranks) * static_cast<size_t>(num_ranks);
  }
  Mailbox& box(int from, int to) { return boxes[from * num_ranks + to]; }
};

namespace {

/// Moves what can be moved now.
bool advance(Operation& op) {
  Mailbox& box = op.from ? op.comm->box(op.comm->rank, op.peer) : op.comm->box(op.peer, op.comm->rank);
  const bool is_full = box.num_sent.load(std::memory_order_acquire) != box.num_received.load(std::memory_order_acquire);
  if (op.from && !is_full) {
    box.size_bytes = std::min(op.left, kBoxBytes);
    std::memcpy(box.data, op.from, box.size_bytes);
    op.from += box.size_bytes, op.left -= box.size_bytes;
    box.num_sent.fetch_add(1, std::memory_order_release);
    return true;
  }
  if (op.to && is_full) {
    if (box.size_bytes > op.left) {
      std::fprintf(stderr, "nccl: rank %d receives less from rank %d than that sends\n", op.comm->rank, op.peer);
      std::abort();
    }
    std::memcpy(op.to, box.data, box.size_bytes);
    op.to += box.size_bytes, op.left -= box.size_bytes;
    box.num_received.fetch_add(1, std::memory_order_release);
    return true;
  }
  return false;
}

/// Those of one stream; a group here never has more.
ncclResult_t run_group() {
  enqueue(group_stream, [operations = std::exchange(group, {})]() mutable {
    for (Operation& op : operations) {
      while (op.left > 0 && advance(op)) {
      }
    }
    std::erase_if(operations, [](const Operation& op) { return op.left == 0; });
    return operations.empty();
  });
  return ncclSuccess;
}

ncclResult_t add(Operation op, cudaStream_t stream) {
  group.push_back(op);
  group_stream = stream;
  return group_depth > 0 ? ncclSuccess : run_group();
}

}  // namespace

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclSystemError ? "system error" : "invalid argument";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  std::snprintf(id->internal, sizeof(id->internal), "/train_gpt_nccl_%d_%08x%08x", getpid(), random(), random());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  if (rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
  auto* c = new ncclComm{num_ranks, rank, id.internal, nullptr};
  // A mailbox of zeros is empty. Whoever comes first makes the memory; the last to come takes its name away.
  const int file = shm_open(c->name.c_str(), O_RDWR | O_CREAT, 0600);
  const size_t size = c->size_bytes() + sizeof(std::atomic<int>);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size)) != 0) return ncclSystemError;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  c->boxes = static_cast<Mailbox*>(memory);
  auto* num_here = reinterpret_cast<std::atomic<int>*>(static_cast<char*>(memory) + c->size_bytes());
  if (num_here->fetch_add(1) + 1 == num_ranks) shm_unlink(c->name.c_str());
  while (num_here->load() < num_ranks) sched_yield();
  *comm = c;
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  munmap(comm->boxes, comm->size_bytes() + sizeof(std::atomic<int>));
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclSend(const void* sent, size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t stream) {
  return count == 0 ? ncclSuccess : add({comm, peer, static_cast<const char*>(sent), nullptr, count}, stream);
}

ncclResult_t ncclRecv(void* received, size_t count, ncclDataType_t, int peer, ncclComm_t comm, cudaStream_t stream) {
  return count == 0 ? ncclSuccess : add({comm, peer, nullptr, static_cast<char*>(received), count}, stream);
}

ncclResult_t ncclAllGather(const void* sent, void* received, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  ncclGroupStart();
  for (int r = 0; r < comm->num_ranks; r++) {
    char* to = static_cast<char*>(received) + count * static_cast<size_t>(r);
    ncclSend(sent, count, type, r, comm, stream);
    ncclRecv(to, count, type, r, comm, stream);
  }
  return ncclGroupEnd();
}

ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  return --group_depth > 0 || group.empty() ? ncclSuccess : run_group();
}
