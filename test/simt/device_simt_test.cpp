// The tests of Device, with the emulated GPU in the place of a real one: they run device.cu and host_buffer.cu.
#include "test/unit/device_test.cpp"

#include "layers/core/host_buffer.h"
#include "test/simt/simt.h"

namespace {

constexpr uint64_t kStreamOrders[] = {1, 2, 3, 4};  // late, each in another order

class DeviceStreams : public testing::TestWithParam<uint64_t> {
 protected:
  DeviceStreams() {
    simt_options() = {};
    simt_options().streams = GetParam();
  }
  ~DeviceStreams() override { simt_options() = {}; }

  std::vector<char> to_host(const void* from, size_t size_bytes) {
    std::vector<char> host(size_bytes);
    cuda.copy_to_host(host.data(), from, size_bytes);
    return host;
  }

  Device cuda = Device::cuda(0);
};

// More than both halves of the pinned memory hold, so that each is used again.
TEST_P(DeviceStreams, uploads_arrive_though_their_source_changes_at_once) {
  constexpr size_t kPart = Device::kUploadBytes / 4 + 1000;
  constexpr int kParts = 6;
  char* data = static_cast<char*>(cuda.allocate(kParts * kPart));
  std::vector<char> source(kPart);
  const auto fill = [&](int part) {
    for (size_t i = 0; i < kPart; i++) source[i] = static_cast<char>(31 * part + static_cast<int>(i / 1000));
  };
  for (int i = 0; i < kParts; i++) {
    fill(i);
    cuda.upload(data + static_cast<size_t>(i) * kPart, source.data(), kPart);
  }
  for (int i = 0; i < kParts; i++) {
    fill(i);
    EXPECT_TRUE(to_host(data + static_cast<size_t>(i) * kPart, kPart) == source) << i;
  }
  cuda.deallocate(data, kParts * kPart);
}

TEST_P(DeviceStreams, what_the_compute_stream_is_given_happens_in_order) {
  constexpr size_t kBytes = 100;
  void *a = cuda.allocate(kBytes), *b = cuda.allocate(kBytes);
  const std::vector<char> source(kBytes, 'x');
  cuda.upload(a, source.data(), kBytes);
  cuda.copy(b, a, kBytes);
  cuda.fill_zero(a, kBytes);
  EXPECT_EQ(to_host(b, kBytes), source);
  EXPECT_EQ(to_host(a, kBytes), std::vector<char>(kBytes, 0));
  cuda.deallocate(a, kBytes), cuda.deallocate(b, kBytes);
}

// There and back beside the computation, which overwrites the device's memory as soon as it may.
TEST_P(DeviceStreams, copies_of_a_host_buffer_are_ordered_with_the_computation) {
  constexpr size_t kBytes = 64;
  constexpr int kSlots = 3;
  char* device = static_cast<char*>(cuda.allocate(kSlots * kBytes));
  HostBuffer buffer(cuda, kSlots * kBytes, kSlots);
  for (int slot = 0; slot < kSlots; slot++) {
    const size_t at = static_cast<size_t>(slot) * kBytes;
    const std::vector<char> source(kBytes, static_cast<char>('a' + slot));
    cuda.upload(device + at, source.data(), kBytes);
    buffer.start_copy(slot, buffer.data() + at, device + at, kBytes);
  }
  for (int slot = 0; slot < kSlots; slot++) {
    buffer.wait(slot);
    cuda.fill_zero(device + static_cast<size_t>(slot) * kBytes, kBytes);
  }
  for (int slot = 0; slot < kSlots; slot++) {
    const size_t at = static_cast<size_t>(slot) * kBytes;
    buffer.start_copy(slot, device + at, buffer.data() + at, kBytes);
    buffer.wait(slot);
    EXPECT_EQ(to_host(device + at, kBytes), std::vector<char>(kBytes, static_cast<char>('a' + slot)));
  }
  cuda.deallocate(device, kSlots * kBytes);
}

INSTANTIATE_TEST_SUITE_P(InRandomOrders, DeviceStreams, testing::ValuesIn(kStreamOrders));

}  // namespace
