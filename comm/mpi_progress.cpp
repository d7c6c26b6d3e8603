// Contract: mpi_progress.h.
#include "comm/mpi_progress.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "layers/core/check.h"

namespace {

constexpr auto kPollPeriod = std::chrono::microseconds(200);
constexpr double kBeatsATimeout = 8, kBeatPeriodS = 2;
constexpr double kSilentS = 20;

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return std::string(text, static_cast<size_t>(length));
}

template <class Duration>
double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

/// SIGTERM has come, and was not yet looked at: those who save because of it block it, and ask at step boundaries.
bool sigterm_is_pending() {
  sigset_t pending;
  return sigpending(&pending) == 0 && sigismember(&pending, SIGTERM) == 1;
}

}  // namespace

void check_mpi(int code, const std::string& what) {
  CHECK(code == MPI_SUCCESS, "{}: {}", what, mpi_error_text(code));
}

MpiProgress::MpiProgress() : last_beat_(Clock::now()) {
  int size = 1;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &beats_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(beats_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Comm_rank(beats_, &rank_);
  MPI_Comm_size(beats_, &size);
  peers_.resize(static_cast<size_t>(size));
  for (Peer& peer : peers_) peer.moved = peer.heard = last_beat_;
  std::vector<char> hosts(static_cast<size_t>(size) * 64);
  gethostname(&hosts[static_cast<size_t>(rank_) * 64], 63);
  check_mpi(MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, hosts.data(), 64, MPI_BYTE, beats_), "MPI_Allgather");
  for (size_t r = 0; r < peers_.size(); r++) peers_[r].host = &hosts[r * 64];
  thread_ = std::thread([this] { run(); });
}

MpiProgress::~MpiProgress() {
  stop();
}

void MpiProgress::stop() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
  if (receive_ == MPI_REQUEST_NULL) return;
  MPI_Cancel(&receive_);
  MPI_Wait(&receive_, MPI_STATUS_IGNORE);
  for (Peer& peer : peers_) {
    if (peer.send != MPI_REQUEST_NULL) MPI_Request_free(&peer.send);
  }
}

void MpiProgress::set_timeout(double timeout_s) {
  const std::lock_guard lock(mutex_);
  timeout_s_ = timeout_s;
}

std::shared_ptr<MpiProgress::Operation> MpiProgress::start(std::string what,
                                                           const std::function<int(MPI_Request*)>& call) {
  auto operation = std::make_shared<Operation>();
  operation->what = std::move(what);
  const std::lock_guard lock(mutex_);
  check_mpi(call(&operation->request), operation->what);
  pending_.push_back(operation);
  if (pending_.size() == 1) wake_.notify_one();
  return operation;
}

void MpiProgress::call(const char* what, const std::function<int()>& call) {
  const std::lock_guard lock(mutex_);
  check_mpi(call(), what);
}

void MpiProgress::poll() {
  for (auto it = pending_.begin(); it != pending_.end();) {
    int is_done = 0;
    const int code = MPI_Test(&(*it)->request, &is_done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) (*it)->error = mpi_error_text(code);
    if (is_done || code != MPI_SUCCESS) {
      (*it)->is_done = true;
      it = pending_.erase(it);
    } else {
      ++it;
    }
  }
}

void MpiProgress::wait(Operation& operation) {
  if (!operation.is_done) {
    const auto start = Clock::now();
    somebody_waits_ = true;
    set_where("waits for " + operation.what);
    while (!operation.is_done) {
      {
        const std::lock_guard lock(mutex_);
        poll();
        beat();
        if (!operation.is_done) check_timeout(operation, start);
        if (!operation.is_done) report_sigterm(operation, start);
      }
      if (!operation.is_done) sched_yield();
    }
    set_where("works, after " + operation.what);
    somebody_waits_ = false;
    waited_s_ += seconds(Clock::now() - start);
  }
  num_moves_++;
  CHECK(operation.error.empty(), "{}: {}", operation.what, operation.error);
}

void MpiProgress::abandon() {
  const std::lock_guard lock(mutex_);
  is_abandoned_ = true;
}

void MpiProgress::run() {
  std::unique_lock lock(mutex_);
  while (!is_ending_) {
    if (!somebody_waits_ && !is_abandoned_) {
      poll();
      beat();
    }
    if (pending_.empty()) {
      wake_.wait_for(lock, std::chrono::milliseconds(50));
    } else {
      wake_.wait_for(lock, kPollPeriod);
    }
  }
}

// ---- Beats

void MpiProgress::set_where(std::string where) {
  const std::lock_guard lock(mutex_);
  where_ = std::move(where);
}

void MpiProgress::beat() {
  if (peers_.size() == 1) return;
  receive_beats();
  if (seconds(Clock::now() - last_beat_) >= beat_period_s()) send_beats();
}

double MpiProgress::beat_period_s() const {
  return std::min(kBeatPeriodS, timeout_s_ / kBeatsATimeout);
}

void MpiProgress::send_beats() {
  const auto now = last_beat_ = Clock::now();
  Beat mine;
  mine.num_moves = num_moves_;
  mine.has_spoken = has_spoken_;
  std::strncpy(mine.where, where_.c_str(), sizeof(mine.where) - 1);
  for (size_t r = 0; r < peers_.size(); r++) {
    Peer& peer = peers_[r];
    if (static_cast<int>(r) == rank_) {
      if (mine.num_moves != peer.beat.num_moves) peer.moved = now;
      peer.beat = mine, peer.heard = now;
      continue;
    }
    int is_sent = 1;  // a beat that has not even left is not followed by another
    if (peer.send != MPI_REQUEST_NULL) MPI_Test(&peer.send, &is_sent, MPI_STATUS_IGNORE);
    if (!is_sent) continue;
    peer.sending = mine;
    MPI_Isend(&peer.sending, sizeof(Beat), MPI_BYTE, static_cast<int>(r), 0, beats_, &peer.send);
  }
}

void MpiProgress::receive_beats() {
  while (true) {
    if (receive_ == MPI_REQUEST_NULL) {
      if (MPI_Irecv(&receiving_, sizeof(Beat), MPI_BYTE, MPI_ANY_SOURCE, 0, beats_, &receive_) != MPI_SUCCESS) return;
    }
    int is_here = 0;
    MPI_Status status;
    if (MPI_Test(&receive_, &is_here, &status) != MPI_SUCCESS || !is_here) return;
    Peer& peer = peers_[static_cast<size_t>(status.MPI_SOURCE)];
    peer.heard = Clock::now();
    if (receiving_.num_moves != peer.beat.num_moves) peer.moved = peer.heard;
    has_spoken_ |= receiving_.has_spoken;
    peer.beat = receiving_;
  }
}

void MpiProgress::check_timeout(const Operation& operation, Clock::time_point start) {
  const auto now = Clock::now();
  auto last = start;
  for (const Peer& peer : peers_) last = std::max(last, peer.moved);
  if (seconds(now - last) < timeout_s_) return;
  fail("nothing has moved for {:.0f} s (parallel.timeout_s) while this rank waits for {}. {}", seconds(now - last),
       operation.what, who_is_where());
}

// One rank speaks: the lowest that waits, unless a beat tells it in time that another has spoken. All of it happens in
// the second between SIGTERM and SIGKILL.
void MpiProgress::report_sigterm(const Operation& operation, Clock::time_point start) {
  const auto now = Clock::now();
  if (has_spoken_ || peers_.size() == 1 || seconds(now - last_look_) < 0.02) return;
  last_look_ = now;
  if (!sigterm_is_pending()) {
    sigterm_.reset();
    return;
  }
  if (!sigterm_) sigterm_ = now;
  const double patience_s = 0.2 + 0.06 * std::min(rank_, 8);
  if (seconds(now - std::max(*sigterm_, start)) < patience_s) return;
  has_spoken_ = true;
  send_beats();
  std::fprintf(stderr, "[rank %d/%zu %s] SIGTERM came while this rank waits for %s. %s\n", rank_, peers_.size(),
               host().c_str(), operation.what.c_str(), who_is_where().c_str());
}

std::string MpiProgress::who_is_where() const {
  const auto now = Clock::now();
  std::string text;
  for (size_t r = 0; r < peers_.size(); r++) {
    const Peer& peer = peers_[r];
    const double silent_s = seconds(now - peer.heard);
    std::string where = peer.beat.where;
    if (silent_s > std::min(kSilentS, 3 * timeout_s_ / kBeatsATimeout)) {
      where = fmt::format("silent for {:.0f} s: stopped, dead or cut off", silent_s);
    } else if (silent_s > 2 * beat_period_s()) {
      where += fmt::format(" (heard {:.0f} s ago)", silent_s);
    }
    text += fmt::format("\n  rank {} ({}): {}", r, peer.host, where);
  }
  return "Where the ranks are:" + text;
}
