// Preemption: SIGTERM and SIGUSR1 ask for a checkpoint and an end at the next step boundary. They are blocked for all
// threads and asked for by poll, so that no handler and no global flag is needed. Ctrl-C (SIGINT) ends at once, as
// always: checkpoints are atomic, so that nothing but the steps since the last one is lost. A console that goes away
// (SIGPIPE) or a file size limit (SIGXFSZ) is an error code of a write, not a death.
#pragma once

class StopSignal {
 public:
  /// Blocks the signals in this thread and those it starts later: construct it before anything starts threads.
  StopSignal();

  /// The number of a signal that has arrived, now or earlier; 0 = none.
  int received();
  /// The same of one that has arrived since the last call of either.
  int arrived();

 private:
  int signal_ = 0;
};
