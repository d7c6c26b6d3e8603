// FlatLayout and ParamStore.
#include "comm/param_store.h"

#include "test/testing.h"

namespace {

TEST(FlatLayout, tensors_do_not_overlap_and_shards_cover_the_buffer) {
  const std::vector<TensorSpec> tensors = {{"a", {7, 9}}, {"b", {1}}, {"c", {64}}, {"d", {1000}}};
  for (const int shards : {1, 2, 3, 5, 8}) {
    const FlatLayout layout(tensors, shards);
    int64_t end = 0;
    for (size_t i = 0; i < tensors.size(); i++) {
      EXPECT_GE(layout.begin(i), end);
      EXPECT_EQ(layout.begin(i) % FlatLayout::kAlignment, 0);
      end = layout.begin(i) + tensors[i].shape.numel();
    }
    EXPECT_GE(layout.numel(), end);
    EXPECT_EQ(layout.numel(), layout.shard_numel() * shards);
    EXPECT_LE(layout.numel() - end, FlatLayout::kAlignment * (shards + 1));
    EXPECT_EQ(layout.shard_begin(shards - 1), layout.numel() - layout.shard_numel());
  }
}

TEST(ParamStore, views_lie_in_the_flat_buffer_and_gradients_are_zeroed_and_normed) {
  Device device = Device::cpu();
  Arena arena(device, 1 << 20);
  ParamStore store(arena, {{"first", {{"a", {3, 4}}, {"b", {5}}}}, {"second", {{"c", {2}}}}}, DType::F32, MeshShape{},
                   nullptr, device);
  store.gather(0);
  EXPECT_EQ(store.use(0)[1].data, store.param_shard(0).rows(64, 5).data);
  EXPECT_STREQ(store.use(0)[1].name, "b");
  store.release(0);
  store.grads(0)[0].as<float>()[11] = 3;
  store.grads(1)[0].as<float>()[1] = -4;
  EXPECT_DOUBLE_EQ(store.grad_norm(), 5);
  store.zero_grads();
  EXPECT_EQ(store.grad_norm(), 0);
}

TEST(ParamStore, a_unit_that_is_not_gathered_cannot_be_used) {
  Device device = Device::cpu();
  Arena arena(device, 1 << 20);
  ParamStore store(arena, {{"only", {{"a", {3}}}}}, DType::F32, MeshShape{}, nullptr, device);
  EXPECT_THROW(store.use(0), Error);
  EXPECT_THROW(store.release(0), Error);
}

}  // namespace
