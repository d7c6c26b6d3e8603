// The ranks of this host, which share its cores, memory and disks.
#pragma once

#include "comm/communicator.h"

class HostRanks {
 public:
  /// All ranks of the world call it.
  explicit HostRanks(Communicator& world);

  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  void barrier() { comm_->barrier(); }

  /// Sets the number of OpenMP threads of this rank, unless OMP_NUM_THREADS says it: the cores that it may run on,
  /// divided by the ranks that may run on them too. Returns lines for the log, where there is something to know.
  std::vector<std::string> choose_threads();

 private:
  std::unique_ptr<Communicator> comm_;
};

/// An Error that names the ranks whose `text` is not that of rank 0.
void check_same(Communicator& world, const char* what, const std::string& text);

/// An Error that names the ranks that do not see the same directory as rank 0.
void check_shared(Communicator& world, const std::string& directory);
