// The communicator of a single process: every collective is the identity.
#pragma once

#include "comm/communicator.h"

class SelfComm : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string host() const override;
  void barrier() override {}
  void all_reduce_sum(Tensor) override {}
};
