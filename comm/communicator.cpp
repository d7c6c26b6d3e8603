#include "comm/communicator.h"

double Communicator::sum(double value) {
  all_reduce_sum({&value, DType::F64, {1}, "sum"});
  return value;
}

int64_t Communicator::sum(int64_t value) {
  all_reduce_sum({&value, DType::I64, {1}, "sum"});
  return value;
}
