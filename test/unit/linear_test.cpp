#include "layers/linear.h"

#include <omp.h>

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

using Case = LinearCase;

struct Problem {
  HostTensor x, w, b, dy, y, dx, dw, db;

  Problem(const Case& c, DType dtype)
      : x(DType::F64, {c.rows, c.K}, "x"),
        w(DType::F64, {c.N, c.K}, "w"),
        b(DType::F64, {c.N}, "b"),
        dy(DType::F64, {c.rows, c.N}, "dy"),
        y(dtype, {c.rows, c.N}, "y"),
        dx(dtype, {c.rows, c.K}, "dx"),
        dw(dtype, {c.N, c.K}, "dw"),
        db(dtype, {c.N}, "db") {
    x = x.fill_normal(1).to(dtype);
    w = w.fill_normal(2).to(dtype);
    b = b.fill_normal(3).to(dtype);
    dy = dy.fill_normal(4).to(dtype);
  }
  void forward(bool accumulate = false) {
    Device device = Device::cpu();
    linear_forward(device, y, x, w, accumulate ? ConstTensor{} : ConstTensor(b), accumulate);
  }
  void backward() {
    Device device = Device::cpu();
    linear_backward(device, dx, dw, db, dy, x, w);
  }
};

TEST(Linear, gradients_equal_central_differences) {
  for (const Case& c : kLinearCases) {
    Problem p(c, DType::F64);
    p.backward();
    const auto loss = [&] {
      p.forward();
      return dot(p.dy, p.y);
    };
    expect_gradient(p.x, p.dx, loss, "dx", 1e-6, 64);
    expect_gradient(p.w, p.dw, loss, "dw", 1e-6, 64);
    expect_gradient(p.b, p.db, loss, "db", 1e-6, 64);
  }
}

TEST(Linear, fp32_is_within_rounding_of_fp64) {
  for (const Case& c : kLinearCases) {
    Problem low(c, DType::F32), exact(c, DType::F64);
    exact.x = low.x.to(DType::F64), exact.w = low.w.to(DType::F64);
    exact.b = low.b.to(DType::F64), exact.dy = low.dy.to(DType::F64);
    for (Problem* p : {&low, &exact}) p->forward(), p->backward();
    // A sum of n products rounds n times; errors of random sign grow like sqrt(n), relative to the sum's own size.
    const auto tolerance = [](int64_t n) { return 2 * 0x1p-24 * std::sqrt(static_cast<double>(n + 1)); };
    EXPECT_LE(relative_l2(low.y.to(DType::F64), exact.y), tolerance(c.K)) << c.rows << "x" << c.K << "x" << c.N;
    EXPECT_LE(relative_l2(low.dx.to(DType::F64), exact.dx), tolerance(c.N)) << c.rows << "x" << c.K << "x" << c.N;
    EXPECT_LE(relative_l2(low.dw.to(DType::F64), exact.dw), tolerance(c.rows)) << c.rows << "x" << c.K << "x" << c.N;
    EXPECT_LE(relative_l2(low.db.to(DType::F64), exact.db), tolerance(c.rows)) << c.rows << "x" << c.K << "x" << c.N;
  }
}

TEST(Linear, accumulate_adds_to_y_and_the_plain_form_ignores_what_y_held) {
  for (const Case& c : kLinearCases) {
    Problem p(c, DType::F64), sum(c, DType::F64);
    p.y.fill(1e300);
    p.forward();
    sum.y.fill(3);
    sum.forward(true);
    for (int64_t i = 0; i < p.y.numel(); i++) {
      ASSERT_NEAR(sum.y.get(i) - 3, p.y.get(i) - p.b.get(i % c.N), 1e-12 * static_cast<double>(c.K + 8)) << i;
    }
  }
}

TEST(Linear, weight_gradients_accumulate_dx_is_replaced_and_null_gradients_are_skipped) {
  const Case c{33, 100, 40};
  Problem once(c, DType::F64), twice(c, DType::F64);
  once.dx.fill(NAN);
  once.backward();
  twice.backward(), twice.backward();
  for (int64_t i = 0; i < once.dw.numel(); i++) ASSERT_NEAR(twice.dw.get(i), 2 * once.dw.get(i), 1e-12);
  for (int64_t i = 0; i < once.db.numel(); i++) ASSERT_NEAR(twice.db.get(i), 2 * once.db.get(i), 1e-12);
  EXPECT_TRUE(twice.dx.bit_equal(once.dx));
  Problem partial(c, DType::F64);
  Device device = Device::cpu();
  linear_backward(device, {}, partial.dw, {}, partial.dy, partial.x, partial.w);
  EXPECT_TRUE(partial.dw.bit_equal(once.dw));
}

TEST(Linear, a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads) {
  const Case c{130, 700, 200};
  const int threads = omp_get_max_threads();
  Problem all(c, DType::F32);
  omp_set_num_threads(1);
  all.forward(), all.backward();
  for (const int n : {2, 3, 5}) {
    omp_set_num_threads(n);
    Problem p(c, DType::F32);
    p.forward(), p.backward();
    EXPECT_TRUE(p.y.bit_equal(all.y) && p.dx.bit_equal(all.dx)) << n << " threads";
    EXPECT_TRUE(p.dw.bit_equal(all.dw) && p.db.bit_equal(all.db)) << n << " threads";
  }
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 1}, {13, 29}, {129, 1}}) {
    HostTensor y(DType::F32, {count, c.N}, "y");
    Device device = Device::cpu();
    linear_forward(device, y, ConstTensor(all.x).rows(begin, count), all.w, all.b);
    for (int64_t i = 0; i < y.numel(); i++) ASSERT_EQ(y.get(i), all.y.get(begin * c.N + i)) << begin << "+" << count;
  }
  omp_set_num_threads(threads);
}

TEST(Linear, zero_rows_write_nothing) {
  Problem p({0, 8, 5}, DType::F32);
  p.dw.fill(2), p.db.fill(3);
  p.forward(), p.backward();
  for (int64_t i = 0; i < p.dw.numel(); i++) ASSERT_EQ(p.dw.get(i), 2);
  for (int64_t i = 0; i < p.db.numel(); i++) ASSERT_EQ(p.db.get(i), 3);
}

TEST(Linear, contract_violations_are_named) {
  Device device = Device::cpu();
  HostTensor x(DType::F32, {2, 8}, "x"), w(DType::F32, {4, 7}, "w"), y(DType::F32, {2, 4}, "y"),
      b(DType::F32, {4}, "b");
  const auto message = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message([&] { linear_forward(device, y, x, w, {}); }),
            "linear_forward: w ('w') is F32 (4, 7), expected F32 (4, 8)");
  HostTensor w8(DType::F32, {4, 8}, "w");
  EXPECT_EQ(message([&] { linear_forward(device, y, x, w8, b, true); }),
            "linear_forward: a bias ('b') cannot be combined with accumulate");
  HostTensor half_x(DType::BF16, {2, 8}, "x"), half_w(DType::BF16, {4, 8}, "w"), half_y(DType::BF16, {2, 4}, "y");
  EXPECT_EQ(message([&] { linear_forward(device, half_y, half_x, half_w, {}); }),
            "linear_forward: dtype BF16 is not supported on the CPU device, use F32");
}

TEST(Linear, every_tensor_of_another_shape_is_named) {
  const Case c{2, 8, 4};
  HostTensor odd(DType::F32, {3, 3}, "odd");
  const auto forward_error = [&](HostTensor Problem::*which) {
    Problem p(c, DType::F32);
    p.*which = odd;
    return error_of([&] { p.forward(); });
  };
  EXPECT_EQ(forward_error(&Problem::y), "linear_forward: y ('odd') is F32 (3, 3), expected F32 (2, 4)");
  EXPECT_EQ(forward_error(&Problem::b), "linear_forward: b ('odd') is F32 (3, 3), expected F32 (4)");
  const auto backward_error = [&](HostTensor Problem::*which) {
    Problem p(c, DType::F32);
    p.*which = odd;
    return error_of([&] { p.backward(); });
  };
  EXPECT_EQ(backward_error(&Problem::w), "linear_backward: w ('odd') is F32 (3, 3), expected F32 (3, 8)");
  EXPECT_EQ(backward_error(&Problem::dy), "linear_backward: dy ('odd') is F32 (3, 3), expected F32 (2, 4)");
  EXPECT_EQ(backward_error(&Problem::dw), "linear_backward: dw ('odd') is F32 (3, 3), expected F32 (4, 8)");
  EXPECT_EQ(backward_error(&Problem::dx), "linear_backward: dx ('odd') is F32 (3, 3), expected F32 (2, 8)");
  EXPECT_EQ(backward_error(&Problem::db), "linear_backward: db ('odd') is F32 (3, 3), expected F32 (4)");
}

}  // namespace
