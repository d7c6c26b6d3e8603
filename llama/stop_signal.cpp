#include "llama/stop_signal.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <ctime>

#include "layers/core/check.h"

namespace {

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGUSR1);
  return set;
}

}  // namespace

StopSignal::StopSignal() {
  const sigset_t set = stop_signals();
  CHECK(pthread_sigmask(SIG_BLOCK, &set, nullptr) == 0, "cannot block SIGTERM and SIGUSR1");
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

int StopSignal::received() {
  arrived();
  return signal_;
}

int StopSignal::arrived() {
  const sigset_t set = stop_signals();
  const timespec now = {0, 0};
  const int signal = sigtimedwait(&set, nullptr, &now);
  if (signal > 0) signal_ = signal;
  return std::max(signal, 0);
}
