// Communicator for tensors in the memory of a GPU, over one for host memory: what is sent is copied to the host, what
// comes is copied back. Right with any number of ranks a GPU; for speed there is NCCL, which wants a GPU a rank.
#pragma once

#include "comm/communicator.h"
#include "layers/core/device.h"

class StagedComm : public Communicator {
 public:
  /// Both must outlive it.
  StagedComm(Communicator& host, Device& device) : host_(host), device_(device) {}
  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::string host() const override { return host_.host(); }
  std::unique_ptr<Communicator> split_by_host() override;
  void moved() override { host_.moved(); }
  double waited_s() const override { return host_.waited_s(); }

 private:
  std::unique_ptr<Communicator> do_split(int color, const std::string& name) override;
  Request do_all_gather(void* all, int64_t size_bytes, const char* what) override;
  Request do_all_to_all(void* received, const void* sent, int64_t size_bytes, const char* what) override;

  Communicator& host_;
  Device& device_;
};
