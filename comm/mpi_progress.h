// Collectives that are under way, and who moves them. Open MPI moves a non-blocking collective only inside calls to
// MPI: here a thread makes such calls every fifth of a millisecond while the others compute, so that gathers and
// reductions really overlap with computing. Every wait for one is a loop around MPI_Test, never a blocking call: it
// yields the core when ranks outnumber cores, and it ends with an Error when nothing moves any more.
//
// Whether anything moves is known from beats: every two seconds, or a few times per timeout, each rank tells all others
// how often it has moved (a collective that ended, a call of moved()) and where it is. When no rank has moved for
// `timeout_s`, those that wait end with an Error that says where every rank is and which ones are silent. A launcher
// that ends a run since it lost a rank sends SIGTERM, and SIGKILL a second later: the first rank that waits in vain
// when SIGTERM comes says the same in that second.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

class MpiProgress {
 public:
  struct Operation {
    MPI_Request request = MPI_REQUEST_NULL;
    std::string what;
    std::string error;  ///< of MPI; read it when is_done
    std::atomic<bool> is_done = false;
  };

  /// Between MPI_Init_thread and MPI_Finalize; all ranks.
  MpiProgress();
  ~MpiProgress();
  MpiProgress(const MpiProgress&) = delete;

  void set_timeout(double timeout_s);
  /// This rank is alive and at work: called from whatever takes long between collectives.
  void moved() { num_moves_++; }
  double waited_s() const { return waited_s_; }

  /// `call` starts a non-blocking collective.
  std::shared_ptr<Operation> start(std::string what, const std::function<int(MPI_Request*)>& call);
  void wait(Operation& operation);
  /// An operation is left that nobody will wait for, since the run ends with an error: its memory is about to go away,
  /// so that MPI is not called any more.
  void abandon();
  /// Any other MPI call: one thread at a time (MPI_THREAD_SERIALIZED).
  void call(const char* what, const std::function<int()>& call);
  /// Before MPI_Finalize.
  void stop();
  const std::string& host() const { return peers_[static_cast<size_t>(rank_)].host; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Beat {
    int64_t num_moves = 0;
    bool has_spoken = false;  ///< of SIGTERM
    char where[160] = "";
  };
  /// What is known of a rank.
  struct Peer {
    Beat beat;
    std::string host;
    Clock::time_point moved, heard;
    Beat sending;
    MPI_Request send = MPI_REQUEST_NULL;
  };

  void run();
  void set_where(std::string where);
  // With the lock:
  void poll();
  void beat();
  double beat_period_s() const;
  void send_beats();
  void receive_beats();
  void report_sigterm(const Operation& operation, Clock::time_point start);
  void check_timeout(const Operation& operation, Clock::time_point start);
  std::string who_is_where() const;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<std::shared_ptr<Operation>> pending_;
  bool is_ending_ = false, is_abandoned_ = false;
  std::atomic<bool> somebody_waits_ = false;

  MPI_Comm beats_ = MPI_COMM_NULL;
  int rank_ = 0;
  std::atomic<int64_t> num_moves_ = 0;
  std::string where_ = "starting";
  std::vector<Peer> peers_;
  Beat receiving_;
  MPI_Request receive_ = MPI_REQUEST_NULL;
  double timeout_s_ = 600;
  Clock::time_point last_beat_, last_look_;
  std::optional<Clock::time_point> sigterm_;  // when it was first seen
  bool has_spoken_ = false;                   // some rank has, of SIGTERM
  double waited_s_ = 0;                       // of the one thread that waits

  std::thread thread_;
};

/// An Error with MPI's text unless code is MPI_SUCCESS.
void check_mpi(int code, const std::string& what);
