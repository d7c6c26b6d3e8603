// Communicator over MPI_COMM_WORLD. mpi.h stays in mpi_comm.cpp.
#pragma once

#include "comm/communicator.h"

class MpiComm : public Communicator {
 public:
  MpiComm(int* argc, char*** argv);  ///< MPI_Init
  ~MpiComm() override;               ///< MPI_Finalize
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string host() const override;
  void barrier() override;
  void all_reduce_sum(Tensor values) override;

 private:
  int rank_ = 0;
  int size_ = 1;
};
