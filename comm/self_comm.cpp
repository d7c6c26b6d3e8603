#include "comm/self_comm.h"

#include <unistd.h>

#include <cstring>

namespace {

struct Done : Communicator::Pending {
  void wait() override {}
};

}  // namespace

std::string SelfComm::host() const {
  char name[256] = "localhost";
  gethostname(name, sizeof(name) - 1);
  return name;
}

Communicator::Request SelfComm::do_all_gather(void*, int64_t, const char*) {
  return std::make_unique<Done>();
}

Communicator::Request SelfComm::do_all_to_all(void* received, const void* sent, int64_t size_bytes, const char*) {
  std::memcpy(received, sent, static_cast<size_t>(size_bytes));
  return std::make_unique<Done>();
}
