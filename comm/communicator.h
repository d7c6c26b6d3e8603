// Communicator: the one virtual class. Counts come from the tensors; every reduction is a SUM.
#pragma once

#include <memory>
#include <string>

#include "layers/core/tensor.h"

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string host() const = 0;
  virtual void barrier() = 0;
  /// In place, over all ranks; F64 and I64 tensors (loss, norms, counts).
  virtual void all_reduce_sum(Tensor values) = 0;

  double sum(double value);
  int64_t sum(int64_t value);
};

/// All ranks of this run: MPI_COMM_WORLD, or the one process when built with MPI=0. Call once; its end finalizes MPI.
std::unique_ptr<Communicator> make_world_communicator(int* argc, char*** argv);

/// Ends every rank of the run, after an error.
[[noreturn]] void abort_world(int exit_code);
