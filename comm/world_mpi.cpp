// The world of a build with MPI.
#include <mpi.h>

#include <cstdlib>

#include "comm/mpi_comm.h"

std::unique_ptr<Communicator> make_world_communicator(int* argc, char*** argv) {
  return std::make_unique<MpiComm>(argc, argv);
}

void abort_world(int exit_code) {
  int initialized = 0, size = 1;
  MPI_Initialized(&initialized);
  if (initialized) MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size > 1) MPI_Abort(MPI_COMM_WORLD, exit_code);  // one rank alone ends quietly
  std::_Exit(exit_code);
}
