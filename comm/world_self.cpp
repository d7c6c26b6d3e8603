// The world of a build without MPI (MPI=0).
#include <cstdlib>

#include "comm/self_comm.h"

std::unique_ptr<Communicator> make_world_communicator(int*, char***) {
  return std::make_unique<SelfComm>();
}

void abort_world(int exit_code) {
  std::exit(exit_code);
}
