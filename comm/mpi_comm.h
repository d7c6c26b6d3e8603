// Communicator over MPI. mpi.h stays in mpi_comm.cpp and mpi_progress.
#pragma once

#include "comm/communicator.h"
#include "comm/mpi_progress.h"

class MpiComm : public Communicator {
 public:
  MpiComm(MPI_Comm comm, std::string name, std::shared_ptr<MpiProgress> progress);
  ~MpiComm() override;
  MpiComm(const MpiComm&) = delete;
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host() const override;
  std::unique_ptr<Communicator> split(int color, const std::string& name) override;
  std::unique_ptr<Communicator> split_by_host() override;
  void moved() override { progress_->moved(); }
  void set_timeout(double timeout_s) override { progress_->set_timeout(timeout_s); }

 private:
  Request do_all_gather(void* all, int64_t size_bytes, const char* what) override;
  Request do_all_to_all(void* received, const void* sent, int64_t size_bytes, const char* what) override;
  Request start(const char* collective, const char* what, const std::function<int(MPI_Request*)>& call);

  MPI_Comm comm_;
  std::string name_;
  std::shared_ptr<MpiProgress> progress_;
  int rank_ = 0;
  int size_ = 1;
};
