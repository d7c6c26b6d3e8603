// Collectives, the sharded store, and the exchange of heads, on real ranks. Values are small integers: every sum is
// exact, so that results are compared bit for bit.
#include <algorithm>

#include "comm/mesh.h"
#include "comm/param_store.h"
#include "comm/ulysses.h"
#include "layers/attention.h"
#include "test/distributed/world.h"
#include "test/testing.h"

namespace {

TEST(Communicator, parts_reach_everybody_in_the_order_of_ranks) {
  Communicator& world = test_world();
  const int P = world.size(), r = world.rank();
  for (const int64_t n : {1, 7, 1000, 100000}) {
    HostTensor all(DType::I32, {P * n}), sent(DType::I32, {P * n}), received(DType::I32, {P * n});
    for (int64_t i = 0; i < n; i++) all.as<int32_t>()[r * n + i] = static_cast<int32_t>(1000 * r + i % 1000);
    for (int64_t i = 0; i < P * n; i++) sent.as<int32_t>()[i] = static_cast<int32_t>(100 * r + i / n);
    auto gather = world.start_all_gather(all);
    auto exchange = world.start_all_to_all(received, sent);  // two at once, waited for the other way round
    exchange->wait();
    gather->wait();
    gather->wait();  // which may be called again
    bool is_right = true;
    for (int64_t i = 0; i < P * n; i++) {
      is_right &= all.as<int32_t>()[i] == 1000 * (i / n) + i % n % 1000;
      is_right &= received.as<int32_t>()[i] == 100 * (i / n) + r;
    }
    EXPECT_TRUE(is_right) << n;
  }
}

TEST(Communicator, sums_and_texts_are_the_same_on_all_ranks) {
  Communicator& world = test_world();
  const int64_t P = world.size(), r = world.rank();
  EXPECT_EQ(world.sum(r), P * (P - 1) / 2);
  EXPECT_EQ(world.max(r * r), (P - 1) * (P - 1));
  // In the order of ranks: another order would round differently.
  double expected = 0;
  for (int64_t i = 0; i < P; i++) expected += i == 0 ? 1e16 : 1.0 + static_cast<double>(i);
  EXPECT_EQ(world.sum(r == 0 ? 1e16 : 1.0 + static_cast<double>(r)), expected);
  const auto texts = world.all_texts(std::string(static_cast<size_t>(r * r), 'x'));
  for (int64_t i = 0; i < P; i++) EXPECT_EQ(texts[static_cast<size_t>(i)].size(), static_cast<size_t>(i * i));
  EXPECT_EQ(world.text_of_first(r == 0 ? "first" : "other"), "first");
  EXPECT_EQ(world.split_by_host()->size(), P);
}

TEST(Communicator, parts_that_are_not_equal_are_refused) {
  Communicator& world = test_world();
  HostTensor odd(DType::F32, {world.size() + 1}), even(DType::F32, {world.size()});
  EXPECT_THROW(world.start_all_gather(odd), Error);
  EXPECT_THROW(world.start_all_to_all(even, odd), Error);
}

TEST(Communicator, ranks_that_call_different_collectives_are_told_when_they_are_checked) {
  const auto ranks = test_world().split(0, "checked ranks");
  ranks->check_collectives();
  const auto inner = ranks->split(0, "inner ranks");  // which are checked, too
  HostTensor a(DType::F32, {16}, "a"), b(DType::F32, {16}, "b"), longer(DType::F32, {32}, "a");
  EXPECT_NO_THROW(inner->all_gather(a));
  const bool is_odd_one = inner->rank() == 3;
  const std::string kind = error_of([&] { is_odd_one ? inner->all_to_all(b, a) : inner->all_gather(a); });
  EXPECT_NE(kind.find("rank 3: call 2: all_to_all of a"), std::string::npos) << kind;
  EXPECT_EQ(kind.find("rank 4"), std::string::npos) << kind;
  const std::string name = error_of([&] { inner->all_gather(is_odd_one ? b : a); });
  EXPECT_NE(name.find("rank 3: call 3: all_gather of b"), std::string::npos) << name;
  const std::string size = error_of([&] { inner->all_gather(is_odd_one ? longer : a); });
  EXPECT_NE(size.find("16 bytes a part"), std::string::npos) << size;
  EXPECT_NO_THROW(inner->all_gather(a));  // and they can go on
}

TEST(Mesh, groups_are_neighbours_and_dp_shard_follows) {
  Communicator& world = test_world();
  Device device = Device::cpu();
  Mesh mesh(world, mesh_shape(8, 2, 1, 2), device);
  EXPECT_EQ(mesh.shape().dp_shard, 2);
  EXPECT_EQ(mesh.sp().rank(), world.rank() % 2);
  EXPECT_EQ(mesh.shard().rank(), world.rank() % 4);
  EXPECT_EQ(mesh.replicate().rank(), world.rank() / 4);
  EXPECT_EQ(mesh.data_parallel_rank(), world.rank() / 2);
  EXPECT_EQ(mesh.replica(), world.rank() / 4);
}

// ---- ParamStore

const std::vector<UnitSpec> kUnits = {{"embedding", {{"w", {37, 11}}}},
                                      {"block 0", {{"a", {5, 3}}, {"b", {130}}}},
                                      {"block 1", {{"a", {5, 3}}, {"b", {131}}}},
                                      {"block 2", {{"a", {5, 3}}, {"b", {9}}}},
                                      {"head", {{"norm", {3}}}}};

float weight(size_t unit, size_t tensor, int64_t i) {
  return static_cast<float>(1000 * unit + 100 * tensor + static_cast<size_t>(i) % 89 + 1);
}
float gradient(int rank, int micro, size_t unit, int64_t i) {
  return static_cast<float>((rank + 1) * (micro + 1) + static_cast<int>(unit) + i % 13);
}

class ShardedStore {
 public:
  ShardedStore(Communicator& ranks, int replicas, DType grad_dtype = DType::F32)
      : mesh_(ranks, mesh_shape(ranks.size(), replicas, 1, 1), device_),
        arena_(device_, 1 << 22),
        store_(arena_, kUnits, DType::F32, mesh_.shape(), &mesh_, device_, grad_dtype) {}
  ParamStore& operator*() { return store_; }
  ParamStore* operator->() { return &store_; }

  /// Writes this rank's shards.
  void fill() {
    for (size_t u = 0; u < kUnits.size(); u++) {
      const FlatLayout& layout = store_.layout(u);
      const int64_t begin = store_.shard_begin(u), end = begin + layout.shard_numel();
      for (size_t i = 0; i < kUnits[u].tensors.size(); i++) {
        const int64_t first = layout.begin(i), n = kUnits[u].tensors[i].shape.numel();
        for (int64_t k = std::max(first, begin); k < std::min(first + n, end); k++) {
          store_.param_shard(u).as<float>()[k - begin] = weight(u, i, k - first);
        }
      }
    }
    store_.weights_changed();
  }

 private:
  Device device_ = Device::cpu();
  Mesh mesh_;
  Arena arena_;
  ParamStore store_;
};

void expect_weights(ParamStore& store, size_t u) {
  const auto& views = store.use(u);
  for (size_t i = 0; i < views.size(); i++) {
    EXPECT_EQ(views[i].shape, kUnits[u].tensors[i].shape);
    bool is_right = true;
    for (int64_t k = 0; k < views[i].numel(); k++) is_right &= views[i].as<float>()[k] == weight(u, i, k);
    EXPECT_TRUE(is_right) << kUnits[u].name;
  }
}

double element(ConstTensor t, int64_t i) {
  return t.dtype == DType::BF16 ? static_cast<double>(static_cast<float>(t.as<bf16>()[i])) : t.as<float>()[i];
}

/// `bound`: of the relative error of an element of a gradient.
void expect_protocol(int size, int replicas, DType grad_dtype, double bound) {
  const auto ranks = first_ranks(size);
  if (!ranks) return;
  ShardedStore store(*ranks, replicas, grad_dtype);
  store.fill();
  constexpr int kMicroSteps = 2;
  store->zero_grads();
  for (int micro = 0; micro < kMicroSteps; micro++) {
    store->gather(0);
    for (size_t u = 0; u < kUnits.size(); u++) {  // a forward, with prefetch
      if (u + 1 < kUnits.size()) store->gather(u + 1);
      expect_weights(*store, u);
      if (u > 0) store->release(u);  // the first stays, as a tied embedding does
    }
    // A backward. It begins with a gradient of the first unit, as that of a tied head does, while the sum of the
    // micro-step before is still under way.
    for (int64_t i = 0; i < store->grads(0)[0].numel(); i++) store->grads(0)[0].as<float>()[i] += 5;
    for (size_t u = kUnits.size(); u-- > 0;) {
      store->gather(u);
      if (u > 0) store->gather(u - 1);
      expect_weights(*store, u);
      for (const Tensor& g : store->grads(u)) {
        for (int64_t i = 0; i < g.numel(); i++) g.as<float>()[i] += gradient(ranks->rank(), micro, u, i);
      }
      store->release(u);
      if (u > 0) store->release(u - 1);
      store->reduce(u);
    }
    store->release(0);
  }
  store->finish_grads();
  double squares = 0;
  for (size_t u = 0; u < kUnits.size(); u++) {
    const FlatLayout& layout = store->layout(u);
    const int64_t begin = store->shard_begin(u), end = begin + layout.shard_numel();
    bool is_right = true;
    for (size_t t = 0; t < kUnits[u].tensors.size(); t++) {
      for (int64_t i = 0; i < kUnits[u].tensors[t].shape.numel(); i++) {
        float expected = 0;
        for (int micro = 0; micro < kMicroSteps; micro++) {
          for (int r = 0; r < size; r++) expected += gradient(r, micro, u, i) + (u == 0 ? 5.0f : 0.0f);
        }
        squares += static_cast<double>(expected) * expected;
        const int64_t at = layout.begin(t) + i;
        if (at < begin || at >= end) continue;
        is_right &= std::abs(element(store->grad_shard(u), at - begin) - expected) <= bound * std::abs(expected);
      }
    }
    EXPECT_TRUE(is_right) << size << " ranks, " << replicas << " replicas, " << kUnits[u].name;
  }
  EXPECT_NEAR(store->grad_norm(), std::sqrt(squares), std::max(bound, 1e-9) * std::sqrt(squares));
  int64_t sent = 0;
  for (size_t u = 0; u < kUnits.size() && store->layout(u).numel() > store->layout(u).shard_numel(); u++) {
    sent += kMicroSteps * (store->layout(u).numel() - store->layout(u).shard_numel());
  }
  EXPECT_EQ(store->traffic().reduces.bytes, sent * static_cast<int64_t>(size_of(grad_dtype)));
}

TEST(ParamStore, weights_are_whole_while_they_are_used_and_gradients_are_sums_over_all_ranks_and_steps) {
  for (const auto& [size, replicas] : {std::pair{2, 1}, {3, 1}, {5, 1}, {8, 1}, {8, 2}, {6, 3}, {4, 4}}) {
    expect_protocol(size, replicas, DType::F32, 0);
  }
}

TEST(ParamStore, gradients_of_bf16_are_sent_and_kept_in_bf16) {
  // Rounded when sent, after each micro-step, and as sums over replicas: up to five times by 2^-9.
  for (const auto& [size, replicas] : {std::pair{1, 1}, {2, 1}, {5, 1}, {8, 2}, {4, 4}}) {
    expect_protocol(size, replicas, DType::BF16, 5 * 0x1p-9);
  }
}

TEST(ParamStore, changed_weights_are_gathered_again) {
  ShardedStore store(test_world(), 1);
  store.fill();
  store->gather(1);
  expect_weights(*store, 1);
  EXPECT_THROW(store->weights_changed(), Error);  // while they are used
  store->release(1);
  for (int64_t i = 0; i < store->param_shard(1).numel(); i++) store->param_shard(1).as<float>()[i] = 7;
  store->weights_changed();
  store->gather(1);
  EXPECT_EQ(store->use(1)[0].as<float>()[0], 7);
  store->release(1);
}

TEST(ParamStore, misuse_is_an_error) {
  ShardedStore store(test_world(), 1);
  store.fill();
  EXPECT_THROW(store->use(0), Error);
  EXPECT_THROW(store->reduce(0), Error);
  store->gather(1);
  EXPECT_THROW(store->gather(3), Error);  // block 0 and block 2 share a buffer
  store->grads(1);
  EXPECT_THROW(store->grads(3), Error);
  EXPECT_THROW(store->finish_grads(), Error);
}

// ---- Ulysses

struct Heads {
  int64_t q, kv;
  int parts;
};
const Heads kHeads[] = {{8, 8, 2}, {8, 2, 2}, {8, 2, 4}, {8, 1, 8}, {6, 3, 3}, {8, 4, 8}, {5, 5, 1}};

TEST(Ulysses, attention_is_bit_equal_to_that_of_one_rank_and_its_gradient_is_the_same_sum) {
  constexpr int64_t kTokens = 13, D = 8;  // of a rank
  for (const Heads& h : kHeads) {
    const auto ranks = first_ranks(h.parts);
    if (!ranks) continue;
    const int r = ranks->rank();
    Device device = Device::cpu();
    const int64_t T = kTokens * h.parts, H = h.q + 2 * h.kv;
    const std::vector<int64_t> cu = {0, 1, T / 2, T - 3, T};
    const Documents documents = {cu, {}};
    HostTensor qkv(DType::F32, {T, H, D}), o(DType::F32, {T, h.q, D}), lse(DType::F32, {h.q, T});
    HostTensor d_o(DType::F32, {T, h.q, D}), dqkv(DType::F32, {T, H, D});
    qkv.fill_normal(1, 0.0, 1.0), d_o.fill_normal(2, 0.0, 1.0);
    const AttentionShape whole = {h.q, h.kv, D, 0.3, 0, 5};
    HostTensor workspace(DType::U8,
                         {static_cast<int64_t>(attention_workspace_bytes(whole, DType::F32, T, DeviceKind::Cpu))});
    attention_forward(device, o, lse, qkv, documents, whole, workspace);
    attention_backward(device, dqkv, d_o, qkv, o, lse, documents, whole, workspace);

    const UlyssesShape shape = {h.q, h.kv, D, h.parts};
    Arena arena(device, 1 << 20);
    Ulysses ulysses(arena, DType::F32, shape, kTokens, ranks.get());
    const auto mine = [&](HostTensor& t) { return t.view().rows(r * kTokens, kTokens); };
    HostTensor part_qkv(DType::F32, {T, shape.part_qkv_heads(), D}), part_o(DType::F32, {T, shape.part_heads(), D});
    HostTensor part_lse(DType::F32, {shape.part_heads(), T}), my_o(DType::F32, {kTokens, h.q, D});
    HostTensor part_do(DType::F32, {T, shape.part_heads(), D}), my_dqkv(DType::F32, {kTokens, H, D});
    HostTensor part_dqkv(DType::F32, {T, shape.part_qkv_heads(), D});
    const AttentionShape part = {shape.part_heads(), shape.part_kv_heads(), D, 0.3, 0, 5};
    ulysses.scatter_heads(device, part_qkv, mine(qkv));
    attention_forward(device, part_o, part_lse, part_qkv, documents, part, workspace);
    ulysses.gather_heads(device, my_o, part_o);
    ulysses.gather_heads_backward(device, part_do, mine(d_o));
    attention_backward(device, part_dqkv, part_do, part_qkv, part_o, part_lse, documents, part, workspace);
    ulysses.scatter_heads_backward(device, my_dqkv, part_dqkv);

    EXPECT_EQ(std::memcmp(my_o.view().data, mine(o).data, mine(o).size_bytes()), 0)
        << h.q << " " << h.kv << " " << h.parts;
    // dk and dv of a shared head are summed in another order: not bit-equal.
    const Tensor expected = mine(dqkv);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < expected.numel(); i++) {
      const double d = my_dqkv.get(i) - static_cast<double>(expected.as<float>()[i]);
      error += d * d, norm += static_cast<double>(expected.as<float>()[i]) * expected.as<float>()[i];
    }
    EXPECT_LE(std::sqrt(error / norm), h.kv % h.parts == 0 ? 0 : 1e-6) << h.q << " " << h.kv << " " << h.parts;
    const int64_t bytes = (2 * shape.part_qkv_heads() + 2 * shape.part_heads()) * D * 4 * kTokens * (h.parts - 1);
    EXPECT_EQ(ulysses.traffic(), (Traffic::Kind{4, bytes}));
  }
}

}  // namespace
