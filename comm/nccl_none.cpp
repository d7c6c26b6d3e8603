// The build without NCCL.
#include "comm/nccl_comm.h"

bool has_nccl() {
  return false;
}

std::unique_ptr<Communicator> make_nccl_comm(Communicator&, Device&) {
  fail("this program was built without NCCL");
}
