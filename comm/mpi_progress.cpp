// Contract: mpi_progress.h.
#include "comm/mpi_progress.h"

#include <sched.h>

#include <chrono>

#include "layers/core/check.h"

namespace {

constexpr auto kPollPeriod = std::chrono::microseconds(200);

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return std::string(text, static_cast<size_t>(length));
}

}  // namespace

void check_mpi(int code, const std::string& what) {
  CHECK(code == MPI_SUCCESS, "{}: {}", what, mpi_error_text(code));
}

MpiProgress::MpiProgress() : thread_([this] { run(); }) {}

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
  somebody_waits_ = true;
  while (!operation.is_done) {
    {
      const std::lock_guard lock(mutex_);
      poll();
    }
    if (!operation.is_done) sched_yield();
  }
  somebody_waits_ = false;
  CHECK(operation.error.empty(), "{}: {}", operation.what, operation.error);
}

void MpiProgress::abandon(const std::shared_ptr<Operation>& operation) {
  const std::lock_guard lock(mutex_);
  pending_.remove(operation);
}

void MpiProgress::run() {
  std::unique_lock lock(mutex_);
  while (!is_ending_) {
    if (pending_.empty()) {
      wake_.wait(lock);
    } else {
      if (!somebody_waits_) poll();
      wake_.wait_for(lock, kPollPeriod);
    }
  }
}
