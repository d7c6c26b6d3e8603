// What cuDNN would do on GPUs that are not here: attention_cudnn_plans() must say yes exactly where cuDNN has an engine
// in both directions, within the workspace that is set aside. Engines are asked for, not built: nothing here runs or
// compiles a kernel. Needs a driver library of stubs (Makefile), else every test is skipped.
#include <dlfcn.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "layers/attention_cudnn.h"
#include "llama/config.h"
#include "test/cudnn/device_properties.h"
#include "test/hf_configs.h"
#include "test/testing.h"

namespace {

namespace fs = std::filesystem;

const AttentionCudnnBatch kBatch = {8, 4096, 8192};

AttentionShape shape_of(const ModelConfig& c, int64_t window) {
  return {c.num_heads, c.num_kv_heads, c.head_dim, c.attention_scale, c.attention_softcap, window};
}

struct Named {
  std::string name;
  AttentionShape shape;
};

/// One for each window that a layer of the model has.
void add_shapes(std::vector<Named>& to, const std::string& name, const ModelConfig& c) {
  std::set<int64_t> windows;
  for (const LayerConfig& layer : c.layers) windows.insert(layer.window);
  for (const int64_t window : windows) to.push_back({fmt::format("{}, window {}", name, window), shape_of(c, window)});
}

/// Of the configurations in this repository, and of published models.
std::vector<Named> all_shapes() {
  std::vector<Named> shapes;
  for (const auto& entry : fs::directory_iterator("configs/models")) {
    add_shapes(shapes, entry.path().string(), load_model_config(entry.path()));
  }
  for (const auto& entry : fs::directory_iterator("test/fixtures")) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    add_shapes(shapes, entry.path().string(), load_model_config(entry.path()));
  }
  for (const PublishedModel* model : kPublishedModels) {
    add_shapes(shapes, model->name, parse_model_config(nlohmann::json::parse(model->v5), model->name));
  }
  return shapes;
}

AttentionShape of_width(int64_t head_dim, int64_t num_kv_heads = 2) {
  return {8, num_kv_heads, head_dim, 1 / std::sqrt(static_cast<double>(head_dim)), 0, 0};
}

/// cuDNN's own answer; softcap is not in its graphs.
bool has_engines(const AttentionShape& shape, const AttentionCudnnBatch& batch, const Gpu& gpu, std::string& reason) {
  reason = attention_cudnn_support(shape, batch, false, gpu.sm, device_properties(gpu));
  if (reason.empty()) reason = attention_cudnn_support(shape, batch, true, gpu.sm, device_properties(gpu));
  return reason.empty();
}

class CudnnPlans : public testing::Test {
 protected:
  void SetUp() override {
    if (!dlopen("libcuda.so.1", RTLD_NOW)) GTEST_SKIP() << "no libcuda.so.1, not even one of stubs";
  }
};

TEST_F(CudnnPlans, agree_with_cudnn_for_every_model) {
  int num_planned = 0;
  for (const Named& model : all_shapes()) {
    for (const Gpu& gpu : kGpus) {
      SCOPED_TRACE(fmt::format("{} on {}", model.name, gpu.name));
      const bool planned = attention_cudnn_plans(model.shape, DType::BF16, gpu.sm);
      num_planned += planned;
      std::string reason;
      EXPECT_EQ(planned, model.shape.softcap == 0 && has_engines(model.shape, kBatch, gpu, reason)) << reason;
    }
  }
  EXPECT_GT(num_planned, 0);
}

TEST_F(CudnnPlans, widths_by_architecture) {
  const std::set<int64_t> up_to_128 = {16, 32, 64, 80, 96, 112, 128};
  std::set<int64_t> up_to_256 = up_to_128;
  up_to_256.insert({160, 192, 256});
  const std::map<int, std::set<int64_t>> expected = {{80, {}}, {90, up_to_256}, {100, up_to_128}};
  for (const Gpu& gpu : kGpus) {
    for (const int64_t head_dim : {8, 16, 32, 60, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 264}) {
      SCOPED_TRACE(fmt::format("width {} on {}", head_dim, gpu.name));
      const bool planned = attention_cudnn_plans(of_width(head_dim), DType::BF16, gpu.sm);
      EXPECT_EQ(planned, expected.at(gpu.sm).contains(head_dim));
      std::string reason;
      EXPECT_EQ(planned, has_engines(of_width(head_dim), kBatch, gpu, reason)) << reason;
    }
  }
}

TEST_F(CudnnPlans, what_cudnn_has_no_engine_for) {
  const Gpu &a100 = kGpus[0], &h200 = kGpus[1], &b200 = kGpus[2];
  const auto reason = [](const AttentionShape& shape, bool is_backward, const Gpu& gpu) {
    return attention_cudnn_support(shape, kBatch, is_backward, gpu.sm, device_properties(gpu));
  };
  EXPECT_EQ(reason(of_width(128), false, a100), "");
  EXPECT_NE(reason(of_width(128), true, a100).find("Packed/ragged LSE"), std::string::npos);
  EXPECT_EQ(reason(of_width(256), false, b200), "");
  EXPECT_NE(reason(of_width(256), true, b200), "");
  EXPECT_NE(reason(of_width(60), false, h200), "");
  // An engine there is, but its scratch grows with slots * slot_length.
  EXPECT_NE(reason(of_width(72), true, h200).find("workspace violation"), std::string::npos);
}

TEST_F(CudnnPlans, every_batch_fits_the_workspace) {
  const AttentionCudnnBatch batches[] = {
      {1, 128, 128}, {4096, 128, 8192}, {2, 1 << 17, 1 << 17}, {1024, 1 << 15, 1 << 15}};
  AttentionShape sliding = of_width(128);
  sliding.window = 1;
  for (const Gpu& gpu : kGpus) {
    if (gpu.sm == 80) continue;
    for (const AttentionCudnnBatch& batch : batches) {
      for (const AttentionShape& shape : {of_width(64, 8), of_width(64, 1), of_width(128), sliding}) {
        std::string reason;
        EXPECT_TRUE(has_engines(shape, batch, gpu, reason)) << fmt::format(
            "{} slots of {}, {} kv heads: {}", batch.slots, batch.slot_length, shape.num_kv_heads, reason);
      }
    }
  }
}

TEST(CudnnBatch, is_rounded_up_to_few_sizes) {
  const auto expect = [](std::vector<int64_t> cu_seqlens, AttentionCudnnBatch expected) {
    const AttentionCudnnBatch batch = attention_cudnn_batch(cu_seqlens);
    EXPECT_EQ(batch.slots, expected.slots);
    EXPECT_EQ(batch.slot_length, expected.slot_length);
    EXPECT_EQ(batch.num_tokens, expected.num_tokens);
  };
  expect({0}, {0, 0, 0});
  expect({0, 1}, {1, 128, 128});
  expect({0, 129, 200}, {2, 256, 256});
  expect({0, 100, 200, 8192}, {4, 8192, 8192});
  expect({0, 4097}, {1, 8192, 4608});
  for (int64_t T = 1; T < 5000; T += 7) {
    const AttentionCudnnBatch batch = attention_cudnn_batch(std::vector<int64_t>{0, T});
    EXPECT_GE(batch.num_tokens, T);
    EXPECT_EQ(batch.num_tokens % 64, 0);
    EXPECT_LE(batch.num_tokens, std::max<int64_t>(128, T + std::max<int64_t>(63, T / 8))) << T;
  }
}

TEST(CudnnWorkspace, grows_with_the_tokens_alone) {
  const AttentionShape shape = of_width(128);
  const auto bytes = [&](int64_t T) { return attention_cudnn_workspace_bytes(shape, DType::BF16, T); };
  // dq, dk, dv; their fp32 sums; do . o
  const size_t of_token = 2 * 12 * 128 + 12 * 8 * 128 + 4 * 8;
  EXPECT_EQ(bytes(1 << 17) - bytes(1 << 16), (size_t{1} << 16) * of_token);
  EXPECT_EQ(bytes(0), 0u);
  EXPECT_EQ(attention_cudnn_workspace_bytes(shape, DType::F32, 4096), 0u);
  for (int64_t T = 1; T < 3000; T += 31) EXPECT_LE(bytes(T), bytes(T + 31)) << T;
}

TEST(CudnnPlanned, leaves_to_our_own_kernels) {
  const AttentionShape planned = of_width(64);
  EXPECT_TRUE(attention_cudnn_plans(planned, DType::BF16, 90));
  EXPECT_FALSE(attention_cudnn_plans(planned, DType::F32, 90));
  AttentionShape shape = planned;
  shape.softcap = 50;
  EXPECT_FALSE(attention_cudnn_plans(shape, DType::BF16, 90));
  shape = planned;
  shape.own_kernels = true;
  EXPECT_FALSE(attention_cudnn_plans(shape, DType::BF16, 90));
}

}  // namespace
