#include "layers/moe.h"

#include <algorithm>
#include <numeric>

#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

/// The tensors of a routing, on the host.
struct HostRouting {
  HostTensor experts, rows, slots, row_weights, offsets;

  HostRouting(int64_t T, const RouterShape& s, DType sums)
      : experts(DType::I32, {T, s.top_k}, "experts"),
        rows(DType::I32, {T, s.top_k}, "rows"),
        slots(DType::I32, {T * s.top_k}, "slots"),
        row_weights(sums, {T * s.top_k}, "row_weights"),
        offsets(DType::I32, {s.num_experts + 1}, "offsets") {}
  Routing routing() { return {experts, rows, slots, row_weights, offsets}; }
  double weight(int64_t slot) const { return row_weights.get(static_cast<int64_t>(rows.get(slot))); }
};

struct Problem {
  RouteCase c;
  int64_t T, E, k, R;
  HostRouting r;
  HostTensor logits, select_bias, d_row_weights, d_logits, slope, is_token;

  Problem(const RouteCase& c_, DType dtype)
      : c(c_),
        T(c.T),
        E(c.shape.num_experts),
        k(c.shape.top_k),
        R(T * k),
        r(T, c.shape, dtype),
        logits(DType::F64, {T, E}, "logits"),
        select_bias(DType::F64, {E}, "select_bias"),
        d_row_weights(DType::F64, {R}, "d_row_weights"),
        d_logits(dtype, {T, E}, "d_logits"),
        slope(DType::F64, {E}, "slope"),
        is_token(DType::I32, {T}, "is_token") {
    logits = logits.fill_normal(1, 2.0).to(dtype), select_bias = select_bias.fill_normal(2, 0.5).to(dtype);
    d_row_weights = d_row_weights.fill_normal(3).to(dtype), slope = slope.fill_normal(4).to(dtype);
    for (int64_t t = 0; t < T; t++) is_token.set(t, t % 3 != 1);
  }
  bool has_bias() const { return c.shape.score == RouterScore::Sigmoid; }
  void forward() {
    Device device = Device::cpu();
    route_forward(device, r.routing(), logits, has_bias() ? ConstTensor(select_bias) : ConstTensor(), c.shape);
  }
  void backward(bool has_balance) {
    Device device = Device::cpu();
    route_backward(device, d_logits, d_row_weights, logits, r.routing(), c.shape,
                   has_balance ? ConstTensor(slope) : ConstTensor(),
                   has_balance ? ConstTensor(is_token) : ConstTensor());
  }
};

TEST(Moe, rows_are_sorted_by_expert_and_token_and_none_is_lost) {
  for (const RouteCase& c : kRouteCases) {
    Problem p(c, DType::F32);
    p.forward();
    EXPECT_EQ(p.r.offsets.get(0), 0);
    EXPECT_EQ(p.r.offsets.get(p.E), p.R);
    std::vector<int64_t> seen(static_cast<size_t>(p.R));
    for (int64_t e = 0; e < p.E; e++) {
      for (auto row = static_cast<int64_t>(p.r.offsets.get(e)); row < p.r.offsets.get(e + 1); row++) {
        const auto slot = static_cast<int64_t>(p.r.slots.get(row));
        ASSERT_EQ(p.r.experts.get(slot), e);
        ASSERT_EQ(p.r.rows.get(slot), row);
        seen[static_cast<size_t>(slot)]++;
        if (row > p.r.offsets.get(e)) {
          ASSERT_LT(p.r.slots.get(row - 1), slot);
        }
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), p.R);
  }
}

/// The formulas of moe.h, by sorting.
TEST(Moe, the_best_experts_are_chosen_and_weighed) {
  for (const RouteCase& c : kRouteCases) {
    Problem p(c, DType::F64);
    p.forward();
    const RouterShape& s = c.shape;
    const int64_t width = p.E / s.num_groups;
    for (int64_t t = 0; t < p.T; t++) {
      std::vector<double> z, choice, score;
      for (int64_t e = 0; e < p.E; e++) z.push_back(p.logits.get(t * p.E + e));
      const double max = *std::max_element(z.begin(), z.end());
      double total = 0;
      for (const double x : z) total += std::exp(x - max);
      for (int64_t e = 0; e < p.E; e++) {
        const double x = z[static_cast<size_t>(e)];
        score.push_back(p.has_bias() ? 1 / (1 + std::exp(-x)) : std::exp(x - max) / total);
        choice.push_back(score.back() + (p.has_bias() ? p.select_bias.get(e) : 0));
      }
      const auto best = [](const std::vector<double>& of) {
        std::vector<int64_t> order(of.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return of[static_cast<size_t>(a)] > of[static_cast<size_t>(b)]; });
        return order;
      };
      if (s.num_groups > 1) {
        std::vector<double> groups;
        for (int64_t g = 0; g < s.num_groups; g++) {
          std::vector<double> group(choice.begin() + g * width, choice.begin() + (g + 1) * width);
          std::sort(group.rbegin(), group.rend());
          groups.push_back(group[0] + group[1]);
        }
        const auto order = best(groups);
        for (int64_t i = s.top_groups; i < s.num_groups; i++) {
          std::fill_n(choice.begin() + order[static_cast<size_t>(i)] * width, width, -1e300);
        }
      }
      const auto order = best(choice);
      double sum = 0;
      for (int64_t i = 0; i < p.k; i++) sum += score[static_cast<size_t>(order[static_cast<size_t>(i)])];
      for (int64_t i = 0; i < p.k; i++) {
        ASSERT_EQ(p.r.experts.get(t * p.k + i), order[static_cast<size_t>(i)]);
        double w = score[static_cast<size_t>(order[static_cast<size_t>(i)])];
        if (s.score == RouterScore::SoftmaxSelected || (p.has_bias() && s.renormalize)) w /= sum;
        if (p.has_bias()) w *= s.scale;
        ASSERT_NEAR(p.r.weight(t * p.k + i), w, 1e-14);
      }
    }
  }
}

TEST(Moe, of_equal_scores_the_first_experts_are_chosen) {
  Problem p({2, 8, {6, 3}}, DType::F32);
  p.logits.fill(1);
  p.logits.set(9, 2);
  p.forward();
  const double expected[] = {0, 1, 2, 3, 0, 1};
  for (int64_t i = 0; i < 6; i++) EXPECT_EQ(p.r.experts.get(i), expected[i]);
}

TEST(Moe, gradients_of_logits_equal_central_differences) {
  for (const RouteCase& c : kRouteCases) {
    for (const bool has_balance : {false, true}) {
      Problem p(c, DType::F64);
      p.forward();
      p.backward(has_balance);
      const HostTensor chosen = p.r.experts;
      const auto loss = [&] {
        p.forward();
        double sum = dot(p.d_row_weights, p.r.row_weights);
        for (int64_t t = 0; has_balance && t < p.T; t++) {
          if (p.is_token.get(t) == 0) continue;
          double total = 0, product = 0;
          for (int64_t e = 0; e < p.E; e++) {
            total += std::exp(p.logits.get(t * p.E + e));
            product += std::exp(p.logits.get(t * p.E + e)) * p.slope.get(e);
          }
          sum += product / total;
        }
        EXPECT_TRUE(p.r.experts.bit_equal(chosen));
        return sum;
      };
      expect_gradient(p.logits, p.d_logits, loss, "d_logits", 1e-6, 200);
    }
  }
}

TEST(Moe, statistics_count_tokens_only) {
  Device device = Device::cpu();
  for (const RouteCase& c : kRouteCases) {
    Problem p(c, DType::F64);
    p.forward();
    HostTensor counts(DType::F64, {p.E}), probabilities(DType::F64, {p.E});
    counts.fill(1);
    route_statistics(device, counts, probabilities, p.logits, p.r.routing(), p.is_token);
    double tokens = 0, count = 0, probability = 0;
    for (int64_t t = 0; t < p.T; t++) tokens += p.is_token.get(t);
    for (int64_t e = 0; e < p.E; e++) count += counts.get(e) - 1, probability += probabilities.get(e);
    EXPECT_EQ(count, tokens * static_cast<double>(p.k));
    EXPECT_NEAR(probability, tokens, 1e-9);
    double of_first = 1;
    for (int64_t i = 0; i < p.R; i++) of_first += p.r.experts.get(i) == 0 && p.is_token.get(i / p.k) == 1;
    EXPECT_EQ(counts.get(0), of_first);
  }
}

TEST(Moe, rows_travel_there_and_back) {
  Device device = Device::cpu();
  for (const RouteCase& c : kRouteCases) {
    Problem p(c, DType::F64);
    p.forward();
    const int64_t C = c.C;
    HostTensor x(DType::F64, {p.T, C}, "x"), rows(DType::F64, {p.R, C}, "rows"), y(DType::F64, {p.T, C}, "y");
    x.fill_normal(5);
    route_gather(device, rows, x, p.r.routing());
    for (int64_t row = 0; row < p.R; row++) {
      const auto t = static_cast<int64_t>(p.r.slots.get(row)) / p.k;
      for (int64_t c0 = 0; c0 < C; c0++) ASSERT_EQ(rows.get(row * C + c0), x.get(t * C + c0));
    }
    route_combine(device, y, rows, p.r.routing(), {});
    for (int64_t i = 0; i < y.numel(); i++) ASSERT_NEAR(y.get(i), static_cast<double>(p.k) * x.get(i), 1e-13);
  }
}

TEST(Moe, terms_of_the_sum_and_their_gradients) {
  Device device = Device::cpu();
  for (const RouteCase& c : kRouteCases) {
    Problem p(c, DType::F64);
    p.forward();
    const Shape tokens = {p.T, c.C};
    HostTensor rows(DType::F64, {p.R, c.C}, "rows"), bias(DType::F64, {p.E, c.C}, "bias"),
        shared(DType::F64, tokens, "shared"), gate(DType::F64, {p.T, 1}, "gate"), addend(DType::F64, tokens, "addend"),
        y(DType::F64, tokens, "y"), dy(DType::F64, tokens, "dy");
    for (HostTensor* t : {&rows, &bias, &shared, &gate, &addend, &dy}) t->fill_normal(6);
    const auto loss = [&] {
      route_combine(device, y, rows, p.r.routing(), {bias, shared, gate, addend});
      return dot(dy, y);
    };
    HostTensor d_bias(DType::F64, bias.shape()), d_weights(DType::F64, {p.R}), d_shared(DType::F64, tokens),
        d_gate(DType::F64, gate.shape());
    route_bias_backward(device, d_bias, d_weights, dy, bias, p.r.routing());
    shared_gate_backward(device, d_shared, d_gate, dy, shared, gate);
    expect_gradient(bias, d_bias, loss, "d_bias", 1e-6, 60);
    expect_gradient(p.r.row_weights, d_weights, loss, "d_row_weights", 1e-6, 60);
    expect_gradient(shared, d_shared, loss, "d_shared", 1e-6, 60);
    expect_gradient(gate, d_gate, loss, "d_gate", 1e-6, 60);
    HostTensor d_rows(DType::F64, rows.shape());
    route_gather(device, d_rows, dy, p.r.routing());
    expect_gradient(rows, d_rows, loss, "d_rows", 1e-6, 60);
    expect_gradient(addend, dy, loss, "d_addend", 1e-6, 60);
    loss();
    const HostTensor apart = y;
    HostTensor in_place = addend;
    route_combine(device, in_place, rows, p.r.routing(), {bias, shared, gate, in_place});
    for (int64_t i = 0; i < y.numel(); i++) ASSERT_EQ(in_place.get(i), apart.get(i));
  }
}

TEST(Moe, fp32_is_within_rounding_of_fp64_and_threads_change_no_bit) {
  for (const RouteCase& c : kRouteCases) {
    Problem low(c, DType::F32), exact(c, DType::F64), threads(c, DType::F32);
    exact.logits = low.logits.to(DType::F64), exact.select_bias = low.select_bias.to(DType::F64);
    exact.d_row_weights = low.d_row_weights.to(DType::F64), exact.slope = low.slope.to(DType::F64);
    with_threads(1, [&] { low.forward(), low.backward(true); });
    exact.forward(), exact.backward(true);
    with_threads(3, [&] { threads.forward(), threads.backward(true); });
    ASSERT_TRUE(low.r.experts.bit_equal(exact.r.experts));
    EXPECT_LE(relative_l2(low.r.row_weights, exact.r.row_weights), 20 * 0x1p-24);
    EXPECT_LE(relative_l2(low.d_logits, exact.d_logits), 40 * 0x1p-24);
    EXPECT_TRUE(threads.r.rows.bit_equal(low.r.rows) && threads.r.row_weights.bit_equal(low.r.row_weights));
    EXPECT_TRUE(threads.d_logits.bit_equal(low.d_logits));
  }
}

TEST(Moe, contract_violations_are_named) {
  Problem p({5, 8, {12, 4, RouterScore::Sigmoid, true, 5, 2, 1}}, DType::F32);
  EXPECT_EQ(error_of([&] { p.forward(); }), "route_forward: 12 experts in 5 groups, of which 2 are chosen from");
  p.c.shape = {12, 4, RouterScore::Sigmoid, true, 6, 40, 1};
  EXPECT_EQ(error_of([&] { p.forward(); }), "route_forward: 12 experts in 6 groups, of which 40 are chosen from");
  Problem many({2, 8, {80, 4, RouterScore::Sigmoid, true, 40, 33, 1}}, DType::F32);
  EXPECT_EQ(error_of([&] { many.forward(); }), "route_forward: 80 experts in 40 groups, of which 33 are chosen from");
  p.c.shape = {12, 3};
  EXPECT_EQ(error_of([&] { p.forward(); }), "route_forward: the routing is of 4 of 12 experts, the shape of 3 of 12");
  p.c.shape = {12, 4};
  Device device = Device::cpu();
  EXPECT_EQ(error_of([&] { route_forward(device, p.r.routing(), p.logits, p.select_bias, p.c.shape); }),
            "route_forward: a bias of the selection ('select_bias') goes with Sigmoid only");
}

}  // namespace
