// Communicator for tensors in the memory of GPUs, a GPU a rank, over NCCL. Collectives run on a stream of their own,
// between what was queued on the compute stream before they are started and what is queued there after wait(): neither
// call waits on the host. nccl_comm.cu; without NCCL: nccl_none.cpp.
#pragma once

#include "comm/communicator.h"
#include "layers/core/device.h"

/// Whether this program was built with NCCL.
bool has_nccl();

/// All ranks of `host` call it; both must outlive it.
std::unique_ptr<Communicator> make_nccl_comm(Communicator& host, Device& device);
