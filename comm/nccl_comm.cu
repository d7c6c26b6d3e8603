// Contract: nccl_comm.h.
#include "comm/nccl_comm.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdlib>
#include <cstring>

#include "layers/core/cuda_util.cuh"

namespace {

void check_nccl(ncclResult_t result, const char* what, const char* tensor) {
  CHECK(result == ncclSuccess, "NCCL: {} of {}: {}; NCCL_DEBUG=INFO says more", what, tensor,
        ncclGetErrorString(result));
}

/// What comes after it on the compute stream comes after the collective.
class NcclPending : public Communicator::Pending {
 public:
  NcclPending(cudaStream_t compute, cudaStream_t stream) : compute_(compute) {
    cuda_check(cudaEventCreateWithFlags(&is_done_, cudaEventDisableTiming));
    cuda_check(cudaEventRecord(is_done_, stream));
  }
  ~NcclPending() override { cudaEventDestroy(is_done_); }
  void wait() override { cuda_check(cudaStreamWaitEvent(compute_, is_done_, 0)); }

 private:
  cudaStream_t compute_;
  cudaEvent_t is_done_ = nullptr;
};

class NcclComm : public Communicator {
 public:
  NcclComm(Communicator& host, Device& device) : host_(host), compute_(static_cast<cudaStream_t>(device.stream())) {
    // Several communicators of a rank run at once: their kernels are to start in the order of the calls on every rank.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
    ncclUniqueId id = {};
    if (host.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", "a communicator");
    const std::string agreed = host.text_of_first(std::string(id.internal, sizeof(id.internal)));
    std::memcpy(id.internal, agreed.data(), sizeof(id.internal));
    check_nccl(ncclCommInitRank(&comm_, host.size(), id, host.rank()), "ncclCommInitRank", "a communicator");
    // Ahead of the compute stream when both have work: what it brings is waited for.
    int least = 0, greatest = 0;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cuda_check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    cuda_check(cudaEventCreateWithFlags(&is_ready_, cudaEventDisableTiming));
  }
  NcclComm(const NcclComm&) = delete;
  ~NcclComm() override {
    cudaEventDestroy(is_ready_);
    cudaStreamDestroy(stream_);
    ncclCommDestroy(comm_);
  }

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::string host() const override { return host_.host(); }
  void moved() override { host_.moved(); }
  double waited_s() const override { return host_.waited_s(); }
  std::unique_ptr<Communicator> split_by_host() override {
    fail("a communicator of tensors is not split: split that of the host");
  }

 private:
  std::unique_ptr<Communicator> do_split(int, const std::string&) override { return split_by_host(); }

  void begin() {
    cuda_check(cudaEventRecord(is_ready_, compute_));
    cuda_check(cudaStreamWaitEvent(stream_, is_ready_, 0));
  }

  Request do_all_gather(void* all, int64_t size_bytes, const char* what) override {
    begin();
    const size_t n = static_cast<size_t>(size_bytes);
    const char* mine = static_cast<const char*>(all) + n * static_cast<size_t>(rank());
    check_nccl(ncclAllGather(mine, all, n, ncclUint8, comm_, stream_), "all_gather", what);
    return std::make_unique<NcclPending>(compute_, stream_);
  }

  Request do_all_to_all(void* received, const void* sent, int64_t size_bytes, const char* what) override {
    begin();
    const size_t n = static_cast<size_t>(size_bytes);
    check_nccl(ncclGroupStart(), "all_to_all", what);
    for (int r = 0; r < size(); r++) {
      const size_t at = n * static_cast<size_t>(r);
      check_nccl(ncclSend(static_cast<const char*>(sent) + at, n, ncclUint8, r, comm_, stream_), "all_to_all", what);
      check_nccl(ncclRecv(static_cast<char*>(received) + at, n, ncclUint8, r, comm_, stream_), "all_to_all", what);
    }
    check_nccl(ncclGroupEnd(), "all_to_all", what);
    return std::make_unique<NcclPending>(compute_, stream_);
  }

  Communicator& host_;
  cudaStream_t compute_, stream_ = nullptr;
  cudaEvent_t is_ready_ = nullptr;
  ncclComm_t comm_ = nullptr;
};

}  // namespace

bool has_nccl() {
  return true;
}

std::unique_ptr<Communicator> make_nccl_comm(Communicator& host, Device& device) {
  return std::make_unique<NcclComm>(host, device);
}
