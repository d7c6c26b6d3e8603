// Streams and events of the emulated GPU: what is ordered happens in order, what is not shows.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "test/simt/simt.h"

namespace {

/// first -> middle on one stream, middle -> last on another; what arrives.
int copied_over_two_streams(uint64_t order, bool with_event) {
  simt_options().streams = order;
  cudaStream_t a, b;
  cudaEvent_t is_ready;
  cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking), cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&is_ready, cudaEventDisableTiming);
  int first = 7, middle = 0, last = 0;
  cudaMemcpyAsync(&middle, &first, sizeof(int), cudaMemcpyDefault, a);
  if (with_event) {
    cudaEventRecord(is_ready, a);
    cudaStreamWaitEvent(b, is_ready, 0);
  }
  cudaMemcpyAsync(&last, &middle, sizeof(int), cudaMemcpyDefault, b);
  cudaStreamSynchronize(b);
  const int result = last;
  cudaStreamDestroy(a), cudaStreamDestroy(b), cudaEventDestroy(is_ready);
  simt_options().streams = 0;
  return result;
}

TEST(Streams, an_event_orders_two_streams_and_without_it_the_result_is_wrong_in_some_order) {
  int num_wrong = 0;
  for (uint64_t order = 0; order < 10; order++) {
    EXPECT_EQ(copied_over_two_streams(order, true), 7) << order;
    num_wrong += copied_over_two_streams(order, false) != 7;
  }
  EXPECT_GT(num_wrong, 0);
}

TEST(Streams, memory_that_a_copy_still_reads_must_not_change) {
  simt_options().streams = 3;
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  int pinned = 1, copy = 0;
  cudaMemcpyAsync(&copy, &pinned, sizeof(int), cudaMemcpyDefault, stream);
  pinned = 2;
  cudaStreamSynchronize(stream);
  EXPECT_EQ(copy, 2);
  cudaStreamDestroy(stream);
  simt_options().streams = 0;
}

}  // namespace
