#include "comm/staged_comm.h"

namespace {

/// A collective between buffers of the host, which comes to `to` when it is done.
struct StagedPending : Communicator::Pending {
  StagedPending(Device& on, void* to_device, size_t size_bytes) : device(on), to(to_device), received(size_bytes) {}
  void wait() override {
    if (!request) return;
    request->wait();
    request.reset();
    device.upload(to, received.data(), received.size());
  }

  Device& device;
  void* to;
  std::vector<char> sent, received;
  Communicator::Request request;  // ends before its buffers
};

Tensor bytes(std::vector<char>& buffer, const char* name) {
  return {buffer.data(), DType::U8, {static_cast<int64_t>(buffer.size())}, name};
}

}  // namespace

std::unique_ptr<Communicator> StagedComm::split_by_host() {
  fail("a communicator of tensors is not split: split that of the host");
}

std::unique_ptr<Communicator> StagedComm::do_split(int, const std::string&) {
  return split_by_host();
}

Communicator::Request StagedComm::do_all_gather(void* all, int64_t size_bytes, const char* what) {
  const size_t part = static_cast<size_t>(size_bytes), begin = part * static_cast<size_t>(rank());
  auto pending = std::make_unique<StagedPending>(device_, all, part * static_cast<size_t>(size()));
  device_.copy_to_host(pending->received.data() + begin, static_cast<const char*>(all) + begin, part);
  pending->request = host_.start_all_gather(bytes(pending->received, what));
  return pending;
}

Communicator::Request StagedComm::do_all_to_all(void* received, const void* sent, int64_t size_bytes,
                                                const char* what) {
  const size_t all = static_cast<size_t>(size_bytes * size());
  auto pending = std::make_unique<StagedPending>(device_, received, all);
  pending->sent.resize(all);
  device_.copy_to_host(pending->sent.data(), sent, all);
  pending->request = host_.start_all_to_all(bytes(pending->received, what), bytes(pending->sent, what));
  return pending;
}
