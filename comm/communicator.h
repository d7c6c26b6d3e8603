// Communicator: the one virtual class. Two collectives, both asynchronous; everything else is made of them here, so
// that sums are taken in the order of ranks: the same bits on every rank, in every run. Counts come from the tensors;
// every reduction is a SUM. All ranks of a communicator call the same collectives in the same order.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layers/core/tensor.h"

class Communicator {
 public:
  /// A collective that is under way. The tensors must stay until wait() has returned; it may be called again.
  class Pending {
   public:
    virtual ~Pending() = default;
    virtual void wait() = 0;
  };
  using Request = std::unique_ptr<Pending>;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string host() const = 0;
  /// A communicator of the ranks that give the same `color`, in the order of their ranks here. `name` is for messages.
  std::unique_ptr<Communicator> split(int color, const std::string& name);
  /// The ranks of this host.
  virtual std::unique_ptr<Communicator> split_by_host() = 0;

  /// This rank is alive and at work: called from whatever takes long between collectives, so that those who wait for
  /// it do not give up. They do after `timeout_s` in which no rank has moved.
  virtual void moved() {}
  virtual void set_timeout(double /*timeout_s*/) {}
  /// Seconds that this rank has waited for collectives since the start.
  virtual double waited_s() const { return 0; }
  /// From now on, and in what is split off, every collective is compared between the ranks before it starts: one that
  /// differs in kind, size or name is an Error on all ranks that says what each of them calls, and not a hang.
  void check_collectives() { is_checked_ = true; }

  /// `all` is size() equal parts; part r of rank r reaches all others.
  Request start_all_gather(Tensor all);
  /// Both are size() equal parts, and do not overlap; part s of rank r becomes part r of rank s.
  Request start_all_to_all(Tensor received, ConstTensor sent);

  void all_gather(Tensor all) { start_all_gather(all)->wait(); }
  void all_to_all(Tensor received, ConstTensor sent) { start_all_to_all(received, sent)->wait(); }
  void barrier();

  /// For few values: loss, norms, counts (exact up to 2^53).
  double sum(double value);
  std::vector<double> sums(const std::vector<double>& values);
  int64_t sum(int64_t value);
  int64_t max(int64_t value);
  /// One text of each rank, of any length.
  std::vector<std::string> all_texts(const std::string& text);
  /// The text of rank 0, on every rank.
  std::string text_of_first(const std::string& text);

 private:
  /// size_bytes: of one part.
  virtual Request do_all_gather(void* all, int64_t size_bytes, const char* what) = 0;
  virtual Request do_all_to_all(void* received, const void* sent, int64_t size_bytes, const char* what) = 0;

  virtual std::unique_ptr<Communicator> do_split(int color, const std::string& name) = 0;

  template <class T>
  std::vector<T> all_values(T value, DType dtype);
  void check_call(const char* collective, const char* what, int64_t size_bytes);

  bool is_checked_ = false;
  int64_t num_calls_ = 0;
};

/// All ranks of this run: MPI_COMM_WORLD, or the one process when built with MPI=0. Call once; its end finalizes MPI.
/// `timeout_s`: see MpiProgress.
std::unique_ptr<Communicator> make_world_communicator(int* argc, char*** argv);

/// Ends every rank of the run, after an error.
[[noreturn]] void abort_world(int exit_code);
