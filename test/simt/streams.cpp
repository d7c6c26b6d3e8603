// Streams and events. By default whatever is queued is done before the call returns. With SimtOptions::streams, work
// waits in its stream until the host asks for a result, and then runs in a random order that streams and events allow:
// whoever forgets an event gets wrong numbers. A stream goes on as long as it can, or for kRun pieces of work on
// average, while the others starve: turns that are fair would hide what has a long time to be late.
#include <cuda_runtime_api.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "test/simt/machine.h"

struct CUstream_st {
  std::deque<std::function<bool()>> work;
};
struct CUevent_st {
  /// How often it was recorded, and how many of these are done. Shared with the work that refers to it.
  uint64_t num_recorded = 0;
  std::shared_ptr<uint64_t> num_done = std::make_shared<uint64_t>(0);
};

namespace {

std::vector<cudaStream_t> streams;
std::mt19937_64 order;
bool is_running = false;
cudaStream_t running = nullptr;  // whose turn it is
constexpr uint64_t kRun = 64;

bool is_eager() {
  static const char* const variable = std::getenv("TRAIN_GPT_SIMT_STREAMS");
  static const uint64_t from_variable = variable ? std::strtoull(variable, nullptr, 10) : 0;
  static uint64_t seed = 0;
  const uint64_t wanted = machine.options.streams ? machine.options.streams : from_variable;
  if (wanted != seed) order.seed(seed = wanted);
  return seed == 0;
}

/// Runs queued work until `is_reached`.
template <class Condition>
void run_until(Condition&& is_reached) {
  CHECK(!is_running, "a stream is waited for by work of a stream");
  while (!is_reached()) {
    std::vector<cudaStream_t> busy;
    for (cudaStream_t stream : streams) {
      if (!stream->work.empty()) busy.push_back(stream);
    }
    CHECK(!busy.empty(), "a stream or an event is waited for that nothing will end");
    const bool goes_on = std::find(busy.begin(), busy.end(), running) != busy.end() && order() % kRun != 0;
    cudaStream_t stream = running = goes_on ? running : busy[order() % busy.size()];
    is_running = true;
    std::function<bool()>& work = stream->work.front();  // which may keep a state between calls
    bool is_done = true;
    try {
      is_done = work();
    } catch (...) {
      is_running = false;
      stream->work.pop_front();
      throw;
    }
    is_running = false;
    if (is_done) {
      stream->work.pop_front();
    } else {
      running = nullptr;
      sched_yield();  // it may wait for another process
    }
  }
}

}  // namespace

void enqueue(void* stream, std::function<bool()> work) {
  if (is_eager()) {
    while (!work()) sched_yield();
    return;
  }
  CHECK(stream, "work for the default stream");
  static_cast<cudaStream_t>(stream)->work.push_back(std::move(work));
}

void finish_all_streams() {
  for (cudaStream_t stream : streams) cudaStreamSynchronize(stream);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  cudaStreamSynchronize(stream);
  std::erase(streams, stream);
  if (running == stream) running = nullptr;
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  run_until([&] { return stream->work.empty(); });
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  enqueue(stream, [done = event->num_done, wanted = event->num_recorded] { return *done >= wanted; });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->num_recorded++;
  enqueue(stream, [done = event->num_done] {
    ++*done;
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  run_until([&] { return *event->num_done >= event->num_recorded; });
  return cudaSuccess;
}
