// Collectives that are under way, and who moves them. Open MPI moves a non-blocking collective only inside calls to
// MPI: here a thread makes such calls every fifth of a millisecond while the others compute, so that gathers and
// reductions really overlap with computing. Every wait is a loop around MPI_Test, never a blocking call: it yields the
// core when ranks outnumber cores, and it ends with an Error that names the collective when nothing moves for too long.
#pragma once

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

class MpiProgress {
 public:
  struct Operation {
    MPI_Request request = MPI_REQUEST_NULL;
    std::string what;
    std::string error;  ///< of MPI; read it when is_done
    std::atomic<bool> is_done = false;
  };

  MpiProgress();
  ~MpiProgress();
  MpiProgress(const MpiProgress&) = delete;

  /// `call` starts a non-blocking collective.
  std::shared_ptr<Operation> start(std::string what, const std::function<int(MPI_Request*)>& call);
  void wait(Operation& operation);
  /// Of an operation that nobody will wait for, when the run ends with an error: its memory is about to go away.
  void abandon(const std::shared_ptr<Operation>& operation);
  /// Any other MPI call: one thread at a time (MPI_THREAD_SERIALIZED).
  void call(const char* what, const std::function<int()>& call);
  /// Before MPI_Finalize.
  void stop();

 private:
  void run();
  void poll();  ///< with the lock

  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<std::shared_ptr<Operation>> pending_;
  bool is_ending_ = false;
  std::atomic<bool> somebody_waits_ = false;
  std::thread thread_;
};

/// An Error with MPI's text unless code is MPI_SUCCESS.
void check_mpi(int code, const std::string& what);
