// The world of a build with MPI.
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

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

/// A descriptor of mpirun, or of its daemon on another host; -1 when a batch system or a script has started this
/// process.
int open_launcher() {
  std::string name;
  std::ifstream file("/proc/" + std::to_string(getppid()) + "/comm");
  std::getline(file, name);
  if (name != "mpirun" && name != "orterun" && name != "orted") return -1;
  return static_cast<int>(syscall(SYS_pidfd_open, getppid(), 0));
}

/// mpirun that aborts a run waits for the daemons of all hosts, also for one that is cut off, for a quarter of an hour
/// and more. A process that outlives the ranks ends such a launcher.
void end_launcher_after(unsigned seconds) {
  const int launcher = open_launcher();
  if (launcher < 0 || fork() != 0) return;
  setsid();  // ranks are killed by process group
  for (int descriptor = 0; descriptor < 1024; descriptor++) {
    if (descriptor != launcher) close(descriptor);  // the launcher waits for the end of its pipes
  }
  sleep(seconds);
  syscall(SYS_pidfd_send_signal, launcher, SIGKILL, nullptr, 0);  // no harm to one that has ended
  _exit(0);
}

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
  if (size > 1) {  // one rank alone ends quietly
    end_launcher_after(10);
    alarm(30);  // where not even the launcher can be reached
    MPI_Abort(MPI_COMM_WORLD, exit_code);
  }
  std::_Exit(exit_code);
}
