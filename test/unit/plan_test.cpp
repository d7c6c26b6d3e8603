// What fits into memory, and what would.
#include "llama/plan.h"

#include <functional>

#include "llama/host_memory.h"
#include "test/testing.h"

namespace {

constexpr int64_t kPlenty = int64_t{1} << 50;

RunConfig small_run() {
  RunConfig run;
  run.model.path = "test/fixtures/stories260k", run.model.init = "random";
  run.data.seq_len = 4096;
  run.batch.micro_batch_size = 4;
  run.train.steps = 1, run.train.device = "cuda", run.train.dtype = "bf16";
  return run;
}

class CheckMemory : public testing::Test {
 protected:
  int64_t gpu_bytes(const std::function<void(RunConfig&)>& change = {}) {
    RunConfig run = run_;
    if (change) change(run);
    return static_cast<int64_t>(plan_memory(run, model_, one_).arena_bytes);
  }
  std::string check(int64_t gpu, int64_t host = kPlenty) { return check(one_, gpu, host); }
  std::string check(const MeshShape& shape, int64_t gpu, int64_t host) {
    try {
      check_memory(run_, model_, shape, {gpu, host});
    } catch (const Error& e) {
      return e.what();
    }
    return "fits";
  }

  RunConfig run_ = small_run();
  ModelConfig model_ = load_model_config(run_.model.path);
  MeshShape one_ = mesh_shape(1, 1, 1, 1);
};

void expect_advice(const std::string& message, const std::string& options) {
  EXPECT_NE(message.find("It fits with " + options + ": "), std::string::npos) << message;
}

TEST_F(CheckMemory, what_fits_is_silent) {
  EXPECT_EQ(check(gpu_bytes()), "fits");
  EXPECT_NE(check(gpu_bytes() - 1), "fits");
}

TEST_F(CheckMemory, names_the_cheapest_options_that_fit) {
  const auto recompute = [](RunConfig& r) { r.memory.recompute = "block"; };
  const auto offload = [](RunConfig& r) { r.memory.recompute = "block", r.memory.offload = "block_inputs"; };
  const auto tile = [](RunConfig& r) { r.memory.recompute = "block", r.memory.loss_tile_tokens = 256; };
  const auto micro = [](RunConfig& r) { r.memory.recompute = "block", r.batch.micro_batch_size = 1; };
  expect_advice(check(gpu_bytes() - 1), "--memory.recompute block");
  expect_advice(check(gpu_bytes(recompute)), "--memory.recompute block");
  expect_advice(check(gpu_bytes(tile)), "--memory.loss_tile_tokens 256 --memory.recompute block");
  run_.memory.loss_tile_tokens = 256;
  expect_advice(check(gpu_bytes(offload)), "--memory.offload block_inputs --memory.recompute block");
  expect_advice(check(gpu_bytes(micro)), "--batch.micro_batch_size 1 --memory.recompute block");
}

TEST_F(CheckMemory, the_pinned_memory_of_the_host_counts) {
  run_.memory.recompute = "block", run_.memory.offload = "block_inputs";
  const MemoryPlan plan = plan_memory(run_, model_, one_);
  const int64_t tokens = 4 * 4096, width = model_.hidden_size, blocks = model_.num_layers;
  EXPECT_EQ(static_cast<int64_t>(plan.offloaded_bytes), (blocks - 1) * tokens * width * 2);
  const int64_t host = static_cast<int64_t>(plan.offloaded_bytes + plan.buffer_bytes);
  EXPECT_EQ(check(kPlenty, host), "fits");
  expect_advice(check(kPlenty, host - 1), "--batch.micro_batch_size 2");
}

TEST_F(CheckMemory, more_ranks_may_share_the_rows) {
  run_.batch.micro_batch_size = 1, run_.memory.recompute = "block", run_.memory.offload = "block_inputs";
  run_.memory.loss_tile_tokens = 256;
  const MeshShape two = mesh_shape(2, 1, 1, 1);
  RunConfig sp = run_;
  sp.parallel.sp_size = 2;
  const int64_t enough = static_cast<int64_t>(plan_memory(sp, model_, mesh_shape(2, 1, 1, 2)).arena_bytes);
  expect_advice(check(two, enough, kPlenty), "--parallel.sp_size 2");
  EXPECT_NE(check(one_, enough, kPlenty).find("use more ranks"), std::string::npos);
}

TEST_F(CheckMemory, on_the_cpu_all_is_the_memory_of_the_host) {
  run_.train.device = "cpu", run_.train.dtype = "fp32";
  const MemoryPlan plan = plan_memory(run_, model_, one_);
  const int64_t needed = static_cast<int64_t>(plan.arena_bytes + plan.buffer_bytes);
  EXPECT_EQ(check(0, needed), "fits");
  expect_advice(check(0, needed - 1), "--memory.recompute block");
}

TEST(ProcessMemory, sees_a_block_that_was_touched) {
  const ProcessMemory before = read_process_memory();
  ASSERT_GT(before.resident_bytes, 0);
  ASSERT_GE(before.peak_bytes, before.resident_bytes);
  constexpr int64_t kSize = 64 << 20;
  std::vector<char> block(kSize, 1);
  const ProcessMemory after = read_process_memory();
  EXPECT_GT(after.resident_bytes - before.resident_bytes, kSize * 9 / 10);
  EXPECT_GT(after.peak_bytes, before.resident_bytes + kSize * 9 / 10);
  EXPECT_EQ(block[kSize / 2], 1);
}

TEST(HostMemory, is_between_what_is_and_what_may_be) {
  EXPECT_GT(available_host_memory(), int64_t{1} << 20);
  EXPECT_LT(available_host_memory(), kPlenty);
}

}  // namespace
