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
  /// divided by the ranks that may run on them too. Returns lines for the log, where there is something to know of this
  /// host.
  std::vector<std::string> choose_threads();

 private:
  std::unique_ptr<Communicator> comm_;
};

/// An Error that names the ranks whose `text` is not that of rank 0.
void check_same(Communicator& world, const std::string& what, const std::string& text);

/// The lines of the first rank of each host; with its name where there are several.
std::vector<std::string> lines_of_hosts(Communicator& world, HostRanks& host, const std::vector<std::string>& lines);

/// An Error that names the ranks that do not see the directory (an absolute path) of rank 0. `option` is for the
/// message.
void check_shared(Communicator& world, const std::string& option, const std::string& directory);
