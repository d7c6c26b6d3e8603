#include "comm/mpi_comm.h"

#include <exception>
#include <limits>

namespace {

class MpiPending : public Communicator::Pending {
 public:
  MpiPending(std::shared_ptr<MpiProgress> progress, std::shared_ptr<MpiProgress::Operation> operation)
      : progress_(std::move(progress)), operation_(std::move(operation)) {}
  ~MpiPending() override {
    if (!operation_->is_done) progress_->abandon();
  }
  void wait() override { progress_->wait(*operation_); }

 private:
  std::shared_ptr<MpiProgress> progress_;
  std::shared_ptr<MpiProgress::Operation> operation_;
};

/// `size_bytes` as a count that fits in an int, of a type that is large enough.
class Count {
 public:
  explicit Count(int64_t size_bytes) {
    int64_t count = size_bytes;
    int bytes = 1;
    while (count > std::numeric_limits<int>::max()) {
      CHECK(count % 2 == 0 && bytes < 1 << 30, "a message of {} bytes has no divisor that MPI could count by",
            size_bytes);
      count /= 2, bytes *= 2;
    }
    number = static_cast<int>(count);
    if (bytes > 1) {
      check_mpi(MPI_Type_contiguous(bytes, MPI_BYTE, &type), "MPI_Type_contiguous");
      check_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
    }
  }
  Count(const Count&) = delete;
  ~Count() {
    if (type != MPI_BYTE) MPI_Type_free(&type);  // which a collective under way survives
  }

  int number = 0;
  MPI_Datatype type = MPI_BYTE;
};

}  // namespace

MpiComm::MpiComm(MPI_Comm comm, std::string name, std::shared_ptr<MpiProgress> progress)
    : comm_(comm), name_(std::move(name)), progress_(std::move(progress)) {
  progress_->call("MPI_Comm_size", [&] {
    const int code = MPI_Comm_rank(comm_, &rank_);
    return code == MPI_SUCCESS ? MPI_Comm_size(comm_, &size_) : code;
  });
}

MpiComm::~MpiComm() {
  // After an error the other ranks are elsewhere: MPI is left alone until it is aborted.
  if (comm_ == MPI_COMM_WORLD || std::uncaught_exceptions() > 0) return;
  progress_->call("MPI_Comm_free", [&] {
    MPI_Comm_free(&comm_);
    return MPI_SUCCESS;  // a destructor has nobody to tell
  });
}

std::string MpiComm::host() const {
  return progress_->host();
}

std::unique_ptr<Communicator> MpiComm::do_split(int color, const std::string& name) {
  barrier();  // which is watched, as the split is not
  MPI_Comm part = MPI_COMM_NULL;
  progress_->call("MPI_Comm_split", [&] { return MPI_Comm_split(comm_, color, rank_, &part); });
  return std::make_unique<MpiComm>(part, name, progress_);
}

std::unique_ptr<Communicator> MpiComm::split_by_host() {
  barrier();
  MPI_Comm part = MPI_COMM_NULL;
  progress_->call("MPI_Comm_split_type",
                  [&] { return MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &part); });
  return std::make_unique<MpiComm>(part, "the ranks of a host", progress_);
}

Communicator::Request MpiComm::start(const char* collective, const char* what,
                                     const std::function<int(MPI_Request*)>& call) {
  auto operation = progress_->start(fmt::format("{} of {} over {} ({} ranks)", collective, what, name_, size_), call);
  return std::make_unique<MpiPending>(progress_, std::move(operation));
}

Communicator::Request MpiComm::do_all_gather(void* all, int64_t size_bytes, const char* what) {
  return start("all_gather", what, [&](MPI_Request* request) {
    const Count n(size_bytes);
    return MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, n.number, n.type, comm_, request);
  });
}

Communicator::Request MpiComm::do_all_to_all(void* received, const void* sent, int64_t size_bytes, const char* what) {
  return start("all_to_all", what, [&](MPI_Request* request) {
    const Count n(size_bytes);
    return MPI_Ialltoall(sent, n.number, n.type, received, n.number, n.type, comm_, request);
  });
}
