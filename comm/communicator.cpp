// What is made of the two collectives. Contract: communicator.h.
#include "comm/communicator.h"

#include <algorithm>
#include <cstring>

std::unique_ptr<Communicator> Communicator::split(int color, const std::string& name) {
  auto part = do_split(color, name);
  part->is_checked_ = is_checked_;
  return part;
}

// The call as a text of one length on every rank, gathered with the plain collective.
void Communicator::check_call(const char* collective, const char* what, int64_t size_bytes) {
  constexpr size_t kLength = 160;
  num_calls_++;
  if (!is_checked_) return;
  std::string all(kLength * static_cast<size_t>(size()), '\0');
  const std::string mine = fmt::format("call {}: {} of {}, {} bytes a part", num_calls_, collective, what, size_bytes);
  mine.copy(&all[kLength * static_cast<size_t>(rank())], kLength - 1);
  do_all_gather(all.data(), kLength, "the check of a collective")->wait();
  std::string differing;
  for (size_t r = 0; r < static_cast<size_t>(size()); r++) {
    const std::string theirs = &all[kLength * r];
    if (theirs != all.c_str()) differing += fmt::format("\n  rank {}: {}", r, theirs);
  }
  CHECK(differing.empty(), "ranks call different collectives:\n  rank 0: {}{}", all.c_str(), differing);
}

Communicator::Request Communicator::start_all_gather(Tensor all) {
  CHECK(all.numel() % size() == 0, "all_gather: '{}' {} is not {} equal parts", all.name, all.shape.str(), size());
  check_call("all_gather", all.name, static_cast<int64_t>(all.size_bytes()) / size());
  return do_all_gather(all.data, static_cast<int64_t>(all.size_bytes()) / size(), all.name);
}

Communicator::Request Communicator::start_all_to_all(Tensor received, ConstTensor sent) {
  CHECK(received.numel() == sent.numel() && received.dtype == sent.dtype && sent.numel() % size() == 0,
        "all_to_all: '{}' {} {} and '{}' {} {} are not {} equal parts", received.name, name_of(received.dtype),
        received.shape.str(), sent.name, name_of(sent.dtype), sent.shape.str(), size());
  check_call("all_to_all", sent.name, static_cast<int64_t>(sent.size_bytes()) / size());
  return do_all_to_all(received.data, sent.data, static_cast<int64_t>(sent.size_bytes()) / size(), sent.name);
}

template <class T>
std::vector<T> Communicator::all_values(T value, DType dtype) {
  std::vector<T> values(static_cast<size_t>(size()));
  values[static_cast<size_t>(rank())] = value;
  all_gather({values.data(), dtype, {size()}, "a value of each rank"});
  return values;
}

void Communicator::barrier() {
  all_values<int64_t>(0, DType::I64);
}

std::vector<double> Communicator::sums(const std::vector<double>& values) {
  const size_t n = values.size(), P = static_cast<size_t>(size());
  std::vector<double> all(n * P), totals(n);
  std::copy(values.begin(), values.end(), all.begin() + static_cast<int64_t>(n) * rank());
  all_gather({all.data(), DType::F64, {size(), static_cast<int64_t>(n)}, "values of each rank"});
  for (size_t i = 0; i < n * P; i++) totals[i % n] += all[i];
  return totals;
}

double Communicator::sum(double value) {
  return sums({value}).front();
}

int64_t Communicator::sum(int64_t value) {
  int64_t total = 0;
  for (const int64_t v : all_values(value, DType::I64)) total += v;
  return total;
}

int64_t Communicator::max(int64_t value) {
  const auto values = all_values(value, DType::I64);
  return *std::max_element(values.begin(), values.end());
}

std::vector<std::string> Communicator::all_texts(const std::string& text) {
  const auto lengths = all_values(static_cast<int64_t>(text.size()), DType::I64);
  const int64_t longest = std::max<int64_t>(1, *std::max_element(lengths.begin(), lengths.end()));
  std::string all(static_cast<size_t>(longest * size()), '\0');
  std::memcpy(all.data() + longest * rank(), text.data(), text.size());
  all_gather({all.data(), DType::U8, {size(), longest}, "a text of each rank"});
  std::vector<std::string> texts;
  for (int r = 0; r < size(); r++) {
    texts.push_back(all.substr(static_cast<size_t>(longest * r), static_cast<size_t>(lengths[static_cast<size_t>(r)])));
  }
  return texts;
}

std::string Communicator::text_of_first(const std::string& text) {
  return all_texts(rank() == 0 ? text : std::string()).front();
}
