#include "layers/core/device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "layers/core/check.h"

namespace {

std::string error_of_cuda_device(int ordinal) {
  try {
    Device::cuda(ordinal);
    return "no error";
  } catch (const Error& e) {
    return e.what();
  }
}

/// What holds of memory on any device.
void expect_memory_works(Device& device) {
  constexpr size_t kBytes = 1000;
  void* data = device.allocate(kBytes);
  std::vector<char> host(kBytes, 'x');
  device.copy_to_host(host.data(), data, kBytes);
  EXPECT_EQ(host, std::vector<char>(kBytes, 0)) << "fresh memory is zero";
  std::fill(host.begin(), host.end(), 'y');
  device.copy_from_host(data, host.data(), kBytes);
  device.fill_zero(data, kBytes / 2);
  device.copy_to_host(host.data(), data, kBytes);
  device.synchronize();
  EXPECT_EQ(std::count(host.begin(), host.end(), 'y'), static_cast<long>(kBytes / 2));
  device.deallocate(data, kBytes);
  EXPECT_EQ(device.allocate(0), nullptr);
}

TEST(Device, cpu_memory_is_zero_and_copies_arrive) {
  Device device = Device::cpu();
  EXPECT_EQ(device.name(), "cpu");
  expect_memory_works(device);
}

TEST(Device, too_large_an_allocation_names_its_size) {
  Device device = Device::cpu();
  try {
    device.allocate(size_t{1} << 60);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("1099511627776 MiB"), std::string::npos) << e.what();
  }
}

TEST(Device, the_cpu_has_no_workspace) {
  Device device = Device::cpu();
  EXPECT_THROW(device.workspace(16), Error);
}

TEST(Device, without_a_gpu_one_line_says_so_and_offers_the_cpu) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  const std::string error = error_of_cuda_device(0);
  EXPECT_EQ(error.find("device cuda:0 was asked for, but "), 0u) << error;
  EXPECT_NE(error.find(kHasCuda ? "there is no CUDA GPU here" : "built without CUDA"), std::string::npos) << error;
  EXPECT_NE(error.find("use --train.device cpu"), std::string::npos) << error;
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 0) << error;
}

TEST(Device, gpu_memory_is_zero_and_copies_arrive) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  Device device = Device::cuda(0);
  EXPECT_EQ(device.name(), "cuda:0");
  expect_memory_works(device);
}

TEST(Device, a_gpu_that_is_not_there_is_refused) {
  const int count = cuda_device_count();
  if (count == 0) GTEST_SKIP() << "no GPU";
  EXPECT_NE(error_of_cuda_device(count).find("this host has"), std::string::npos);
}

TEST(Device, the_workspace_ends_where_its_allocation_ends) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  Device device = Device::cuda(0);
  char* all = static_cast<char*>(device.workspace(Device::kWorkspaceBytes));
  char* some = static_cast<char*>(device.workspace(1000));
  EXPECT_EQ(some + 1024, all + Device::kWorkspaceBytes);
  EXPECT_THROW(device.workspace(Device::kWorkspaceBytes + 1), Error);
}

}  // namespace
