// The ranks of a test program.
#pragma once

#include "comm/communicator.h"

/// All ranks that mpirun started: 8.
Communicator& test_world();

/// The first `size` ranks; null on the others, which have nothing to do.
inline std::unique_ptr<Communicator> first_ranks(int size) {
  const bool takes_part = test_world().rank() < size;
  auto part = test_world().split(takes_part ? 0 : 1, "the first ranks");
  return takes_part ? std::move(part) : nullptr;
}
