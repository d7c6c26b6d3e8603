#include "layers/grouped_linear.h"

#include "layers/linear.h"
#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

constexpr WeightLayout kLayouts[] = {WeightLayout::OutIn, WeightLayout::InOut};

struct Problem {
  int64_t R = 0, E, K, N;
  WeightLayout layout;
  HostTensor offsets, x, w, b, y, dy, dx, dw, db;

  static int64_t sum(const std::vector<int64_t>& rows) {
    int64_t total = 0;
    for (const int64_t n : rows) total += n;
    return total;
  }
  Shape weight_shape() const { return layout == WeightLayout::OutIn ? Shape{E, N, K} : Shape{E, K, N}; }

  Problem(const GroupedLinearCase& c, WeightLayout layout_, DType dtype)
      : R(sum(c.rows)),
        E(static_cast<int64_t>(c.rows.size())),
        K(c.K),
        N(c.N),
        layout(layout_),
        offsets(DType::I32, {E + 1}, "offsets"),
        x(DType::F64, {R, K}, "x"),
        w(DType::F64, weight_shape(), "w"),
        b(DType::F64, {E, N}, "b"),
        y(dtype, {R, N}, "y"),
        dy(DType::F64, {R, N}, "dy"),
        dx(dtype, {R, K}, "dx"),
        dw(dtype, weight_shape(), "dw"),
        db(dtype, {E, N}, "db") {
    for (int64_t e = 0; e < E; e++)
      offsets.set(e + 1, offsets.get(e) + static_cast<double>(c.rows[static_cast<size_t>(e)]));
    x = x.fill_normal(1).to(dtype), w = w.fill_normal(2).to(dtype), b = b.fill_normal(3).to(dtype);
    dy = dy.fill_normal(4).to(dtype);
  }
  void forward() {
    Device device = Device::cpu();
    grouped_linear_forward(device, y, x, w, b, offsets, layout);
  }
  void backward() {
    Device device = Device::cpu();
    grouped_linear_backward(device, dx, dw, db, dy, x, w, offsets, layout);
  }
};

TEST(GroupedLinear, gradients_equal_central_differences) {
  for (const GroupedLinearCase& c : kGroupedLinearCases) {
    for (const WeightLayout layout : kLayouts) {
      Problem p(c, layout, DType::F64);
      p.backward();
      const auto loss = [&] {
        p.forward();
        return dot(p.dy, p.y);
      };
      expect_gradient(p.x, p.dx, loss, "dx", 1e-6, 100);
      expect_gradient(p.w, p.dw, loss, "dw", 1e-6, 100);
      expect_gradient(p.b, p.db, loss, "db", 1e-6, 100);
    }
  }
}

TEST(GroupedLinear, each_group_is_a_linear_layer) {
  Device device = Device::cpu();
  for (const GroupedLinearCase& c : kGroupedLinearCases) {
    Problem p(c, WeightLayout::OutIn, DType::F32);
    p.forward();
    int64_t begin = 0;
    for (int64_t e = 0; e < p.E; e++) {
      const int64_t n = c.rows[static_cast<size_t>(e)];
      HostTensor y(DType::F32, {n, p.N}, "y");
      linear_forward(device, y, p.x.view().rows(begin, n), p.w.view().rows(e, 1).reshaped({p.N, p.K}),
                     p.b.view().rows(e, 1).reshaped({p.N}));
      for (int64_t i = 0; i < n * p.N; i++) ASSERT_EQ(y.get(i), p.y.get(begin * p.N + i));
      begin += n;
    }
  }
}

TEST(GroupedLinear, layouts_agree_and_idle_experts_have_no_gradient) {
  for (const GroupedLinearCase& c : kGroupedLinearCases) {
    Problem out_in(c, WeightLayout::OutIn, DType::F64), in_out(c, WeightLayout::InOut, DType::F64);
    const auto turned = [&](int64_t e, int64_t n, int64_t k) { return (e * in_out.K + k) * in_out.N + n; };
    const auto each = [&](auto op) {
      for (int64_t i = 0; i < out_in.w.numel(); i++) {
        op(i, turned(i / (out_in.N * out_in.K), i / out_in.K % out_in.N, i % out_in.K));
      }
    };
    each([&](int64_t i, int64_t j) { in_out.w.set(j, out_in.w.get(i)); });
    for (Problem* p : {&out_in, &in_out}) p->forward(), p->backward();
    EXPECT_LE(relative_l2(in_out.y, out_in.y), 1e-14);
    EXPECT_LE(relative_l2(in_out.dx, out_in.dx), 1e-14);
    EXPECT_LE(relative_l2(in_out.db, out_in.db), 1e-14);
    each([&](int64_t i, int64_t j) {
      ASSERT_NEAR(in_out.dw.get(j), out_in.dw.get(i), 1e-12);
      if (c.rows[static_cast<size_t>(i / (out_in.N * out_in.K))] == 0) {
        ASSERT_EQ(out_in.dw.get(i), 0);
      }
    });
  }
}

TEST(GroupedLinear, threads_change_no_bit_and_gradients_accumulate) {
  for (const GroupedLinearCase& c : kGroupedLinearCases) {
    for (const WeightLayout layout : kLayouts) {
      Problem one(c, layout, DType::F32), many(c, layout, DType::F32);
      with_threads(1, [&] { one.forward(), one.backward(); });
      with_threads(3, [&] { many.forward(), many.backward(); });
      EXPECT_TRUE(many.y.bit_equal(one.y) && many.dx.bit_equal(one.dx));
      EXPECT_TRUE(many.dw.bit_equal(one.dw) && many.db.bit_equal(one.db));
      many.backward();
      for (int64_t i = 0; i < one.dw.numel(); i++) ASSERT_NEAR(many.dw.get(i), 2 * one.dw.get(i), 1e-4);
      for (int64_t i = 0; i < one.db.numel(); i++) ASSERT_NEAR(many.db.get(i), 2 * one.db.get(i), 1e-4);
    }
  }
}

TEST(GroupedLinear, contract_violations_are_named) {
  Problem p({{2, 3}, 4, 6}, WeightLayout::OutIn, DType::F32);
  p.layout = WeightLayout::InOut;
  EXPECT_EQ(error_of([&] { p.forward(); }), "grouped_linear_forward: w ('w') is F32 (2, 6, 4), expected F32 (2, 4, 4)");
  p.layout = WeightLayout::OutIn;
  p.offsets = HostTensor(DType::I32, {2}, "offsets");
  EXPECT_EQ(error_of([&] { p.backward(); }),
            "grouped_linear_backward: offsets ('offsets') is I32 (2), expected I32 (3)");
}

}  // namespace
