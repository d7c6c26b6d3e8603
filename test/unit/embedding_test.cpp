#include "layers/embedding.h"

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

constexpr int64_t kT = 150, kV = 40, kC = 200;  // four column blocks, the last not full; tokens repeat

struct Problem {
  HostTensor w, dy, tokens, y, dw;

  Problem(DType dtype, int64_t T = kT, int64_t V = kV, int64_t C = kC)
      : w(DType::F64, {V, C}, "w"),
        dy(DType::F64, {T, C}, "dy"),
        tokens(DType::I32, {T}, "tokens"),
        y(dtype, {T, C}, "y"),
        dw(dtype, {V, C}, "dw") {
    w = w.fill_normal(1).to(dtype);
    dy = dy.fill_normal(2).to(dtype);
    const Philox rng(3, 0);
    for (int64_t t = 0; t < T; t++) {
      tokens.set(t, static_cast<double>(rng.below(static_cast<uint64_t>(t), static_cast<uint64_t>(V))));
    }
  }
  void forward(double scale) {
    Device device = Device::cpu();
    embedding_forward(device, y, tokens, w, scale);
  }
  void backward(double scale, int64_t pad_token_id = -1) {
    Device device = Device::cpu();
    embedding_backward(device, dw, dy, tokens, {}, scale, pad_token_id);
  }
};

TEST(Embedding, forward_looks_up_and_scales_rows) {
  Problem p(DType::F32);
  p.forward(0.5);
  for (int64_t t = 0; t < kT; t++) {
    const int64_t row = static_cast<int64_t>(p.tokens.get(t));
    for (int64_t c = 0; c < kC; c++) ASSERT_EQ(p.y.get(t * kC + c), 0.5 * p.w.get(row * kC + c));
  }
}

TEST(Embedding, gradient_equals_central_differences) {
  constexpr int64_t kMaxElements = 10000;  // every difference evaluates the whole tensor
  for (const auto& [T, V, C] : kEmbeddingCases) {
    if (T * C > kMaxElements) continue;
    Problem p(DType::F64, T, V, C);
    p.backward(1.5);
    const auto loss = [&] {
      p.forward(1.5);
      return dot(p.dy, p.y);
    };
    expect_gradient(p.w, p.dw, loss, "dw");
  }
}

TEST(Embedding, fp32_is_within_rounding_of_fp64) {
  Problem low(DType::F32), exact(DType::F64);
  exact.w = low.w.to(DType::F64), exact.dy = low.dy.to(DType::F64);
  for (Problem* p : {&low, &exact}) p->forward(1.7), p->backward(1.7);
  EXPECT_LE(relative_l2(low.y, exact.y), 0x1p-23);  // scale and product round once each
  // Two roundings an addend, one an addition, T / V of them a row.
  EXPECT_LE(relative_l2(low.dw, exact.dw), 3 * 0x1p-24 * std::sqrt(static_cast<double>(kT) / kV));
}

TEST(Embedding, gradient_accumulates_but_for_the_pad_row) {
  Problem once(DType::F32), twice(DType::F32);
  const int64_t pad = static_cast<int64_t>(once.tokens.get(5));
  once.backward(1.0, pad);
  twice.dw.fill(3.0);
  twice.backward(1.0, pad);
  for (int64_t i = 0; i < kV * kC; i++) {
    if (i / kC == pad) {
      ASSERT_EQ(once.dw.get(i), 0.0);
      ASSERT_EQ(twice.dw.get(i), 3.0);
    } else {
      ASSERT_NEAR(twice.dw.get(i), 3.0 + once.dw.get(i), 1e-5);
    }
  }
}

TEST(Embedding, threads_change_no_bit) {
  Problem one(DType::F32);
  with_threads(1, [&] { one.forward(1.7), one.backward(1.7); });
  for (const int threads : {2, 3}) {
    Problem many(DType::F32);
    with_threads(threads, [&] { many.forward(1.7), many.backward(1.7); });
    EXPECT_TRUE(many.y.bit_equal(one.y)) << threads;
    EXPECT_TRUE(many.dw.bit_equal(one.dw)) << threads;
  }
}

TEST(Embedding, order_sorts_positions_by_token_and_then_by_position) {
  const std::vector<int32_t> tokens = {3, 0, 3, 1, 0, 3};
  EXPECT_EQ(embedding_order(tokens, 4), (std::vector<int32_t>{1, 4, 3, 0, 2, 5}));
  EXPECT_EQ(embedding_order({}, 4), std::vector<int32_t>());
  EXPECT_EQ(error_of([&] { embedding_order(tokens, 3); }),
            "embedding_order: token id 3 at position 0 is outside the vocabulary [0, 3)");
}

TEST(Embedding, contract_violations_are_named) {
  Problem p(DType::F32);
  Device device = Device::cpu();
  HostTensor order(DType::I32, {kT - 1}, "order");
  EXPECT_EQ(error_of([&] { embedding_backward(device, p.dw, p.dy, p.tokens, order, 1.0, -1); }),
            "embedding_backward: order ('order') is I32 (149), expected I32 (150)");
  p.tokens.set(7, kV);
  EXPECT_EQ(error_of([&] { p.forward(1.0); }),
            "embedding_forward: token id 40 at position 7 is outside the vocabulary [0, 40)");
  p.tokens.set(7, -1);
  EXPECT_EQ(error_of([&] { p.backward(1.0); }),
            "embedding_backward: token id -1 at position 7 is outside the vocabulary [0, 40)");
  p.tokens.set(7, 0);
  EXPECT_EQ(error_of([&] { p.backward(1.0, 40); }),
            "embedding_backward: pad_token_id 40 is outside the vocabulary [0, 40); -1 = none");
  HostTensor narrow(DType::F32, {kT, kC - 1}, "narrow");
  EXPECT_EQ(error_of([&] { embedding_forward(device, narrow, p.tokens, p.w, 1.0); }),
            "embedding_forward: y ('narrow') is F32 (150, 199), expected F32 (150, 200)");
}

}  // namespace
