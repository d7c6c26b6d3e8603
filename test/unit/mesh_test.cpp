// Mesh shapes, the dealing of rows, the parts of a batch, and the Ulysses layouts: what many ranks agree on without a
// word.
#include "comm/mesh.h"

#include <numeric>
#include <set>

#include "data/batch.h"
#include "data/deal.h"
#include "layers/reduce.h"
#include "layers/ulysses.h"
#include "test/layer_cases.h"
#include "test/model_testing.h"

namespace {

TEST(MeshShape, dp_shard_follows_from_the_number_of_ranks) {
  const MeshShape plain = mesh_shape(8, 1, 1, 1);
  EXPECT_EQ(plain.dp_shard, 8);
  EXPECT_EQ(plain.shards(), 8);
  EXPECT_EQ(plain.data_parallel(), 8);
  const MeshShape all = mesh_shape(24, 2, 1, 4);
  EXPECT_EQ(all.dp_shard, 3);
  EXPECT_EQ(all.shards(), 12);
  EXPECT_EQ(all.data_parallel(), 6);
}

TEST(MeshShape, what_is_impossible_is_refused_with_what_is_legal) {
  EXPECT_EQ(error_of([] { mesh_shape(6, 1, 1, 4); }),
            "parallel.sp_size = 4 does not divide the 6 ranks of this run: use 1, 2, 3, 6");
  EXPECT_EQ(error_of([] { mesh_shape(12, 4, 1, 2); }),
            "parallel.dp_replicate_size = 4 does not divide 12 ranks / sp_size 2 = 6: use 1, 2, 3, 6");
  EXPECT_NE(error_of([] { mesh_shape(8, 1, 2, 1); }).find("parallel.cp_size = 2"), std::string::npos);
}

// ---- Dealing

std::multiset<int64_t> all_rows(const Deal& deal) {
  std::multiset<int64_t> rows;
  for (const auto& step : deal.rows) {
    for (const auto& group : step) rows.insert(group.begin(), group.end());
  }
  return rows;
}

TEST(Deal, every_row_comes_once_and_no_group_has_more_than_its_micro_batch) {
  const Philox rng(1, 2);
  for (const int64_t n : {1, 5, 12, 64, 67}) {
    std::vector<double> costs;
    for (int64_t i = 0; i < n; i++) costs.push_back(1 + rng.uniform(static_cast<uint64_t>(i)));
    for (const int64_t groups : {1, 2, 3, 8}) {
      for (const int64_t micro : {1, 2, 4}) {
        const Deal deal = deal_rows(costs, groups, micro);
        EXPECT_EQ(deal.rows.size(), static_cast<size_t>((n + groups * micro - 1) / (groups * micro)));
        const auto rows = all_rows(deal);
        EXPECT_EQ(rows.size(), static_cast<size_t>(n));
        EXPECT_EQ(std::set<int64_t>(rows.begin(), rows.end()).size(), static_cast<size_t>(n));
        for (const auto& step : deal.rows) {
          EXPECT_EQ(step.size(), static_cast<size_t>(groups));
          for (const auto& group : step) EXPECT_LE(group.size(), static_cast<size_t>(micro));
        }
        EXPECT_GE(deal.imbalance, 1.0);
      }
    }
  }
}

TEST(Deal, one_group_keeps_the_order_of_the_rows) {
  const Deal deal = deal_rows(std::vector<double>{1, 5, 2, 4}, 1, 2);
  EXPECT_EQ(deal.rows, (std::vector<std::vector<std::vector<int64_t>>>{{{0, 1}}, {{2, 3}}}));
  EXPECT_EQ(deal.imbalance, 1.0);
}

TEST(Deal, rows_of_like_cost_share_a_micro_step_and_groups_are_evened_out) {
  // Unsorted, each micro-step of 2 rows would wait for a 10: (10 + 10 + 10) / ((10 + 1) * 3 / 2).
  const Deal deal = deal_rows(std::vector<double>{10, 1, 10, 1, 10, 1}, 2, 1);
  EXPECT_EQ(deal.rows, (std::vector<std::vector<std::vector<int64_t>>>{{{0}, {2}}, {{4}, {1}}, {{3}, {5}}}));
  EXPECT_DOUBLE_EQ(deal.imbalance, (10.0 + 10 + 1) / (10 + 5.5 + 1));
  // To and fro: 8 + 1 against 6 + 3.
  const Deal even = deal_rows(std::vector<double>{8, 6, 3, 1}, 2, 2);
  EXPECT_EQ(even.rows, (std::vector<std::vector<std::vector<int64_t>>>{{{0, 3}, {1, 2}}}));
  EXPECT_DOUBLE_EQ(even.imbalance, 1.0);
}

// ---- Parts of a batch

TEST(Slice, parts_are_the_tokens_in_order_and_their_counts_add_up) {
  Batch batch = make_batch({{1, 2, 3, 4, 5}, {6, 7, 8}, {9, 10, 11, 12}});
  std::vector<int32_t> tokens, targets, positions, ids;
  int64_t num_tokens = 0, num_loss_tokens = 0;
  for (int part = 0; part < 4; part++) {
    const Batch slice = slice_of(batch, part, 4);
    EXPECT_EQ(slice.size(), 3);
    EXPECT_EQ(slice.cu_seqlens, batch.cu_seqlens);
    EXPECT_EQ(slice.longest_document, 5);
    tokens.insert(tokens.end(), slice.tokens.begin(), slice.tokens.end());
    targets.insert(targets.end(), slice.targets.begin(), slice.targets.end());
    positions.insert(positions.end(), slice.positions.begin(), slice.positions.end());
    ids.insert(ids.end(), slice.document_ids.begin(), slice.document_ids.end());
    num_tokens += slice.num_tokens, num_loss_tokens += slice.num_loss_tokens;
  }
  EXPECT_EQ(tokens, batch.tokens);
  EXPECT_EQ(targets, batch.targets);
  EXPECT_EQ(positions, batch.positions);
  EXPECT_EQ(ids, batch.document_ids);
  EXPECT_EQ(num_tokens, batch.num_tokens);
  EXPECT_EQ(num_loss_tokens, batch.num_loss_tokens);
  EXPECT_THROW(slice_of(batch, 0, 5), Error);
}

// ---- Ulysses layouts

TEST(Ulysses, heads_go_where_their_queries_are) {
  EXPECT_TRUE((UlyssesShape{8, 2, 4, 4}.is_legal()));
  EXPECT_FALSE((UlyssesShape{8, 2, 4, 3}.is_legal()));  // 3 does not divide 8
  EXPECT_FALSE((UlyssesShape{6, 2, 4, 3}.is_legal()));  // 2 kv heads for 3 parts
  const UlyssesShape shared = {8, 2, 4, 4};
  EXPECT_EQ(shared.part_kv_heads(), 1);
  const int64_t expected[] = {0, 0, 1, 1};  // interleaved, never 0 1 0 1
  for (int64_t part = 0; part < 4; part++) EXPECT_EQ(shared.first_kv_head(part), expected[part]);
}

TEST(Ulysses, packing_places_every_head_and_unpacking_adds_up_those_that_are_shared) {
  Device device = Device::cpu();
  for (const auto& [Ts, s] : kUlyssesCases) {
    const int64_t H = s.num_heads + 2 * s.num_kv_heads, h = s.part_qkv_heads(), D = s.head_dim;
    HostTensor qkv(DType::F64, {Ts, H, D}, "qkv"), sent(DType::F64, {s.parts, Ts, h, D}, "sent");
    HostTensor back(DType::F64, {Ts, H, D}, "back"), weights(DType::F64, {s.parts, Ts, h, D}, "weights");
    qkv.fill_normal(1), weights.fill_normal(2);
    ulysses_pack_qkv(device, sent, qkv, s);
    for (int64_t part = 0; part < s.parts; part++) {
      for (int64_t head = 0; head < h; head++) {
        const int64_t q = s.part_heads(), kv = s.part_kv_heads(), first = part * s.num_kv_heads / s.parts;
        const int64_t from = head < q        ? part * q + head
                             : head < q + kv ? s.num_heads + first + head - q
                                             : s.num_heads + s.num_kv_heads + first + head - q - kv;
        for (int64_t t = 0; t < Ts; t++) {
          ASSERT_EQ(sent.get(((part * Ts + t) * h + head) * D), qkv.get((t * H + from) * D)) << part << " " << head;
        }
      }
    }
    // Unpacking is the gradient of packing: <weights, pack(qkv)> = <unpack(weights), qkv>.
    ulysses_unpack_dqkv(device, back, weights, s);
    EXPECT_NEAR(dot(weights, sent), dot(back, qkv), 1e-9 * std::sqrt(dot(qkv, qkv) * dot(weights, weights)));

    HostTensor o(DType::F64, {Ts, s.num_heads, D}, "o"), parts(DType::F64, {s.parts, Ts, s.part_heads(), D}, "parts");
    HostTensor again(DType::F64, {s.parts, Ts, s.part_heads(), D}, "again");
    parts.fill_normal(3);
    ulysses_unpack_heads(device, o, parts, s);
    ulysses_pack_heads(device, again, o, s);
    EXPECT_TRUE(again.bit_equal(parts));
    EXPECT_EQ(o.get(((Ts - 1) * s.num_heads + s.num_heads - 1) * D), parts.get(parts.numel() - D));
  }
}

TEST(Reduce, parts_are_added_in_their_order) {
  Device device = Device::cpu();
  const int64_t n = 5000;
  HostTensor parts(DType::F32, {3 * n}, "parts"), sum(DType::F32, {n}, "sum");
  parts.fill_normal(1), sum.fill_normal(2);
  const HostTensor before = sum;
  add_parts(device, sum, parts, 3);
  for (int64_t i = 0; i < n; i++) {
    const auto part = [&](int64_t p) { return static_cast<float>(parts.get(p * n + i)); };
    ASSERT_EQ(sum.get(i), static_cast<float>(before.get(i)) + (part(0) + part(1) + part(2)));
  }
}

}  // namespace
