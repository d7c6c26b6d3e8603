// The world of a build with MPI.
#include <unistd.h>

#include <cstdlib>

#include "comm/mpi_comm.h"

namespace {

/// MPI_COMM_WORLD, MPI's beginning and its end.
class World : public MpiComm {
 public:
  explicit World(std::shared_ptr<MpiProgress> progress)
      : MpiComm(MPI_COMM_WORLD, "all ranks", progress), progress_(std::move(progress)) {}
  ~World() override {
    progress_->stop();
    MPI_Finalize();
  }

 private:
  std::shared_ptr<MpiProgress> progress_;
};

}  // namespace

std::unique_ptr<Communicator> make_world_communicator(int* argc, char*** argv) {
  int provided = 0;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  CHECK(provided >= MPI_THREAD_SERIALIZED, "this MPI has no MPI_THREAD_SERIALIZED, which moving collectives needs");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return std::make_unique<World>(std::make_shared<MpiProgress>());
}

void abort_world(int exit_code) {
  int initialized = 0, size = 1;
  MPI_Initialized(&initialized);
  if (initialized) MPI_Comm_size(MPI_COMM_WORLD, &size);
  alarm(30);                                           // where not even the launcher can be reached
  if (size > 1) MPI_Abort(MPI_COMM_WORLD, exit_code);  // one rank alone ends quietly
  std::_Exit(exit_code);
}
