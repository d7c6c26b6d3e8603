#include "comm/mpi_comm.h"

#include <mpi.h>

#include <limits>

namespace {

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail("{}: {}", what, std::string(text, static_cast<size_t>(length)));
}

}  // namespace

MpiComm::MpiComm(int* argc, char*** argv) {
  int provided = 0;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  CHECK(provided >= MPI_THREAD_FUNNELED, "this MPI has no MPI_THREAD_FUNNELED, which OpenMP threads beside it need");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "MPI_Comm_size");
}

MpiComm::~MpiComm() {
  MPI_Finalize();
}

std::string MpiComm::host() const {
  char name[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  MPI_Get_processor_name(name, &length);
  return std::string(name, static_cast<size_t>(length));
}

void MpiComm::barrier() {
  check_mpi(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");
}

void MpiComm::all_reduce_sum(Tensor values) {
  CHECK(values.dtype == DType::F64 || values.dtype == DType::I64, "all_reduce_sum: '{}' is {}, expected F64 or I64",
        values.name, name_of(values.dtype));
  CHECK(values.numel() <= std::numeric_limits<int>::max(), "all_reduce_sum: '{}' has {} elements", values.name,
        values.numel());
  const MPI_Datatype type = values.dtype == DType::F64 ? MPI_DOUBLE : MPI_INT64_T;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, values.data, static_cast<int>(values.numel()), type, MPI_SUM, MPI_COMM_WORLD),
            "MPI_Allreduce");
}
