// The CUDA kernels of a mixture of experts, run on the CPU, against the CPU layer.
#include "layers/moe.h"

#include <cmath>
#include <limits>

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12};

// Experts beyond what 4 and 8 entries of a lane hold, with and without whole packs; all that may be; groups; slots of
// several blocks of the sort.
constexpr RouteCase kWideCases[] = {
    {5, 8, {300, 8}},
    {4, 5, {301, 4, RouterScore::SoftmaxAll}},
    {3, 8, {512, 32}},
    {20, 8, {256, 8, RouterScore::Sigmoid, true, 8, 4, 2.5}},
    {3, 24, {512, 6, RouterScore::Sigmoid, true, 256, 32, 1}},
    {600, 8, {37, 6}},
};

std::vector<RouteCase> all_cases() {
  std::vector<RouteCase> cases(std::begin(kRouteCases), std::end(kRouteCases));
  cases.insert(cases.end(), std::begin(kWideCases), std::end(kWideCases));
  return cases;
}

/// Owns a routing: of T is DeviceTensor or HostTensor.
template <class Owner>
struct OwnedRouting {
  Owner experts, rows, slots, row_weights, offsets;

  operator Routing() { return {experts, rows, slots, row_weights, offsets}; }
};

OwnedRouting<HostTensor> host_routing(const RouteCase& c) {
  const int64_t T = c.T, k = c.shape.top_k;
  return {HostTensor(DType::I32, {T, k}, "experts"), HostTensor(DType::I32, {T, k}, "rows"),
          HostTensor(DType::I32, {T * k}, "slots"), HostTensor(DType::F32, {T * k}, "row_weights"),
          HostTensor(DType::I32, {c.shape.num_experts + 1}, "offsets")};
}

/// Everything that the kernels give, on the host; `of_rows` is what moe_rows.cu makes.
struct Outputs {
  OwnedRouting<HostTensor> routing;
  HostTensor d_logits, balanced, counts, probabilities;
};
struct RowOutputs {
  HostTensor gathered, combined, plain, d_bias, d_row_weights, d_shared, d_gate;
};

void expect_bit_equal(const Outputs& a, const Outputs& b) {
  const auto parts = [](const Outputs& o) {
    return std::vector<const HostTensor*>{&o.routing.experts, &o.routing.rows, &o.routing.slots, &o.routing.row_weights,
                                          &o.routing.offsets, &o.d_logits,     &o.balanced,      &o.counts,
                                          &o.probabilities};
  };
  for (size_t i = 0; i < parts(a).size(); i++) EXPECT_TRUE(parts(a)[i]->bit_equal(*parts(b)[i])) << i;
}
void expect_bit_equal(const RowOutputs& a, const RowOutputs& b) {
  const auto parts = [](const RowOutputs& o) {
    return std::vector<const HostTensor*>{&o.gathered,      &o.combined, &o.plain, &o.d_bias,
                                          &o.d_row_weights, &o.d_shared, &o.d_gate};
  };
  for (size_t i = 0; i < parts(a).size(); i++) EXPECT_TRUE(parts(a)[i]->bit_equal(*parts(b)[i])) << i;
}

/// What the router gets, and what comes back to it.
struct Inputs {
  RouteCase c;
  int64_t T, E, k, R;
  HostTensor logits, select_bias, d_row_weights, slope, is_token, counts, probabilities;

  explicit Inputs(const RouteCase& c_)
      : c(c_),
        T(c.T),
        E(c.shape.num_experts),
        k(c.shape.top_k),
        R(T * k),
        logits(DType::F32, {T, E}, "logits"),
        select_bias(DType::F32, {E}, "select_bias"),
        d_row_weights(DType::F32, {R}, "d_row_weights"),
        slope(DType::F32, {E}, "slope"),
        is_token(DType::I32, {T}, "is_token"),
        counts(DType::F64, {E}, "counts"),
        probabilities(DType::F64, {E}, "probabilities") {
    logits.fill_normal(1, 2.0), select_bias.fill_normal(2, 0.5), d_row_weights.fill_normal(3), slope.fill_normal(4);
    for (int64_t t = 0; t < T; t++) is_token.set(t, t % 3 != 1);
    counts.fill(3), probabilities.fill_normal(5);
  }
  ConstTensor bias_of(ConstTensor bias) const { return c.shape.score == RouterScore::Sigmoid ? bias : ConstTensor(); }

  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    Outputs out = {host_routing(c), HostTensor(DType::F32, logits.shape()), HostTensor(DType::F32, logits.shape()),
                   counts, probabilities};
    route_forward(cpu, out.routing, logits, bias_of(select_bias), c.shape);
    route_backward(cpu, out.d_logits, d_row_weights, logits, out.routing, c.shape, {}, {});
    route_backward(cpu, out.balanced, d_row_weights, logits, out.routing, c.shape, slope, is_token);
    route_statistics(cpu, out.counts, out.probabilities, logits, out.routing, is_token);
    return out;
  }

  /// `offset`: elements between a tensor and an aligned address. `dtype`: of d_logits.
  Outputs on_cuda(Device& cuda, DType dtype, int64_t offset = 0) const {
    DeviceTensor logits_(cuda, logits, offset), bias(cuda, select_bias, offset), d_weights(cuda, d_row_weights, offset),
        slope_(cuda, slope, offset), is_token_(cuda, is_token), d_logits(cuda, dtype, logits.shape(), offset),
        balanced(cuda, dtype, logits.shape(), offset), counts_(cuda, counts), probabilities_(cuda, probabilities);
    OwnedRouting<DeviceTensor> r = {{cuda, DType::I32, {T, k}, offset},
                                    {cuda, DType::I32, {T, k}, offset},
                                    {cuda, DType::I32, {R}, offset},
                                    {cuda, DType::F32, {R}, offset},
                                    {cuda, DType::I32, {E + 1}, offset}};
    route_forward(cuda, r, logits_, bias_of(bias), c.shape);
    route_backward(cuda, d_logits, d_weights, logits_, r, c.shape, {}, {});
    route_backward(cuda, balanced, d_weights, logits_, r, c.shape, slope_, is_token_);
    route_statistics(cuda, counts_, probabilities_, logits_, r, is_token_);
    return {{r.experts.to_host(), r.rows.to_host(), r.slots.to_host(), r.row_weights.to_host(), r.offsets.to_host()},
            d_logits.to_host(),
            balanced.to_host(),
            counts_.to_host(),
            probabilities_.to_host()};
  }
};

/// Rows on their way, and all terms of their sum.
struct Rows {
  RouteCase c;
  DType dtype;
  OwnedRouting<HostTensor> routing;
  HostTensor x, from, bias, shared, gate, addend, d_to, d_bias, d_row_weights;

  Rows(const RouteCase& c_, DType dtype_)
      : c(c_),
        dtype(dtype_),
        routing(Inputs(c).on_cpu().routing),
        x(dtype, {c.T, c.C}, "x"),
        from(dtype, {c.T * c.shape.top_k, c.C}, "from"),
        bias(dtype, {c.shape.num_experts, c.C}, "bias"),
        shared(dtype, x.shape(), "shared"),
        gate(dtype, {c.T, 1}, "gate"),
        addend(dtype, x.shape(), "addend"),
        d_to(dtype, x.shape(), "d_to"),
        d_bias(DType::F32, bias.shape(), "d_bias"),
        d_row_weights(DType::F32, {from.shape()[0]}, "d_row_weights") {
    for (HostTensor* t : {&x, &from, &bias, &shared, &gate, &addend, &d_to, &d_bias, &d_row_weights}) t->fill_normal(7);
  }

  /// In fp32, from the same numbers.
  RowOutputs on_cpu() const {
    Device cpu = Device::cpu();
    OwnedRouting<HostTensor> r = routing;
    const auto f32 = [](const HostTensor& t) { return t.to(DType::F32); };
    const HostTensor from_ = f32(from), bias_ = f32(bias), shared_ = f32(shared), gate_ = f32(gate),
                     addend_ = f32(addend), d_to_ = f32(d_to);
    RowOutputs out = {from_, f32(x), f32(x), d_bias, d_row_weights, f32(x), gate_};
    route_gather(cpu, out.gathered, f32(x), r);
    route_combine(cpu, out.combined, from_, r, {bias_, shared_, gate_, addend_});
    route_combine(cpu, out.plain, from_, r, {});
    route_bias_backward(cpu, out.d_bias, out.d_row_weights, d_to_, bias_, r);
    shared_gate_backward(cpu, out.d_shared, out.d_gate, d_to_, shared_, gate_);
    return out;
  }

  /// `in_place`: the sum replaces its addend.
  RowOutputs on_cuda(Device& cuda, int64_t offset = 0, bool in_place = false) const {
    OwnedRouting<DeviceTensor> r = {{cuda, routing.experts},
                                    {cuda, routing.rows},
                                    {cuda, routing.slots},
                                    {cuda, routing.row_weights},
                                    {cuda, routing.offsets}};
    DeviceTensor x_(cuda, x, offset), from_(cuda, from, offset), bias_(cuda, bias, offset),
        shared_(cuda, shared, offset), gate_(cuda, gate, offset), addend_(cuda, addend, offset),
        d_to_(cuda, d_to, offset), d_bias_(cuda, d_bias, offset), d_weights(cuda, d_row_weights, offset),
        gathered(cuda, dtype, from.shape(), offset), combined(cuda, dtype, x.shape(), offset),
        plain(cuda, dtype, x.shape(), offset), d_shared(cuda, dtype, x.shape(), offset),
        d_gate(cuda, dtype, gate.shape(), offset);
    route_gather(cuda, gathered, x_, r);
    route_combine(cuda, in_place ? addend_ : combined, from_, r, {bias_, shared_, gate_, addend_});
    route_combine(cuda, plain, from_, r, {});
    route_bias_backward(cuda, d_bias_, d_weights, d_to_, bias_, r);
    shared_gate_backward(cuda, d_shared, d_gate, d_to_, shared_, gate_);
    return {gathered.to_host(),  (in_place ? addend_ : combined).to_host(),
            plain.to_host(),     d_bias_.to_host(),
            d_weights.to_host(), d_shared.to_host(),
            d_gate.to_host()};
  }
};

std::string describe(const RouteCase& c, DType dtype, int64_t offset = 0) {
  return fmt::format("{} T {} C {}, {} of {} experts, score {}, groups {} of {}, offset {}", name_of(dtype), c.T, c.C,
                     c.shape.top_k, c.shape.num_experts, static_cast<int>(c.shape.score), c.shape.top_groups,
                     c.shape.num_groups, offset);
}

class MoeCuda : public testing::Test {
 protected:
  MoeCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

/// Probabilities are quotients of exponentials and sums of n of them in two orders: a few roundings, and sqrt(n).
double few_roundings(int64_t n) {
  return (8 + 2 * std::sqrt(static_cast<double>(n))) * kRoundF32;
}

TEST_F(MoeCuda, routing_equals_the_cpu_layer) {
  for (const RouteCase& c : all_cases()) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(describe(c, dtype, offset));
        const Inputs in(c);
        const Outputs found = in.on_cuda(cuda, dtype, offset), expected = in.on_cpu();
        ASSERT_TRUE(found.routing.experts.bit_equal(expected.routing.experts));
        EXPECT_TRUE(found.routing.rows.bit_equal(expected.routing.rows));
        EXPECT_TRUE(found.routing.slots.bit_equal(expected.routing.slots));
        EXPECT_TRUE(found.routing.offsets.bit_equal(expected.routing.offsets));
        EXPECT_TRUE(found.counts.bit_equal(expected.counts));
        const double relative = few_roundings(in.E);
        expect_elements_near(found.routing.row_weights, expected.routing.row_weights, relative, 0, "row_weights");
        expect_elements_near(found.probabilities, expected.probabilities, relative, 2 * relative, "probabilities");
        // Differences of products of weights and gradients, of which Sigmoid's may be larger than 1.
        for (const auto& [d, of] :
             {std::pair(&found.d_logits, &expected.d_logits), {&found.balanced, &expected.balanced}}) {
          const double largest = largest_of(in.d_row_weights) + largest_of(in.slope) + largest_of(*of);
          expect_elements_near(*d, *of, relative, relative * largest, "d_logits");
        }
      }
    }
  }
}

TEST_F(MoeCuda, rows_equal_the_cpu_layer) {
  for (const RouteCase& c : all_cases()) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(describe(c, dtype, offset));
        const Rows in(c, dtype);
        const RowOutputs found = in.on_cuda(cuda, offset), expected = in.on_cpu();
        EXPECT_TRUE(found.gathered.bit_equal(expected.gathered.to(dtype)));
        EXPECT_TRUE(found.combined.bit_equal(expected.combined.to(dtype)));  // the same additions, rounded once
        EXPECT_TRUE(found.plain.bit_equal(expected.plain.to(dtype)));
        EXPECT_TRUE(found.d_shared.bit_equal(expected.d_shared.to(dtype)));
        // Sums of n products in another order.
        const auto sum_of = [&](int64_t n, const HostTensor& a, const HostTensor& b) {
          return 8 * kRoundF32 * (1 + std::sqrt(static_cast<double>(n)) * largest_of(a) * largest_of(b));
        };
        const int64_t R = in.from.shape()[0];
        expect_elements_near(found.d_gate, expected.d_gate, 0, sum_of(c.C, in.d_to, in.shared), "d_gate");
        expect_elements_near(found.d_row_weights, expected.d_row_weights, 4 * kRoundF32, sum_of(c.C, in.d_to, in.bias),
                             "d_row_weights");
        expect_elements_near(found.d_bias, expected.d_bias, 4 * kRoundF32, sum_of(R, in.d_to, in.routing.row_weights),
                             "d_bias");
      }
    }
  }
}

TEST_F(MoeCuda, bits_do_not_depend_on_the_schedule) {
  for (const RouteCase& c : {kRouteCases[5], kRouteCases[7], kRouteCases[8], kWideCases[5]}) {
    const Inputs in(c);
    const Rows rows(c, DType::BF16);
    const Outputs first = in.on_cuda(cuda, DType::BF16);
    const RowOutputs first_rows = rows.on_cuda(cuda);
    for (const uint64_t schedule : kOtherSchedules) {
      SCOPED_TRACE(describe(c, DType::BF16) + fmt::format(" schedule {}", schedule));
      simt_options().schedule = schedule;
      expect_bit_equal(in.on_cuda(cuda, DType::BF16), first);
      expect_bit_equal(rows.on_cuda(cuda), first_rows);
    }
    simt_options() = {};
  }
}

TEST_F(MoeCuda, the_sum_may_replace_its_addend) {
  for (const RouteCase& c : kRouteCases) {
    const Rows in(c, DType::BF16);
    expect_bit_equal(in.on_cuda(cuda, 0, true), in.on_cuda(cuda));
  }
}

// Packs need every pointer to be aligned.
TEST_F(MoeCuda, one_misaligned_tensor_among_aligned_ones) {
  const Rows in({33, 24, {5, 2}}, DType::BF16);
  const RowOutputs expected = in.on_cuda(cuda);
  OwnedRouting<DeviceTensor> r = {{cuda, in.routing.experts},
                                  {cuda, in.routing.rows},
                                  {cuda, in.routing.slots},
                                  {cuda, in.routing.row_weights},
                                  {cuda, in.routing.offsets}};
  for (int odd = 0; odd < 8; odd++) {
    const auto offset = [&](int which) { return odd == which ? 1 : 0; };
    DeviceTensor from(cuda, in.from, offset(0)), bias(cuda, in.bias, offset(1)), shared(cuda, in.shared, offset(2)),
        addend(cuda, in.addend, offset(3)), to(cuda, in.dtype, in.x.shape(), offset(4)), x(cuda, in.x, offset(5)),
        gathered(cuda, in.dtype, in.from.shape(), offset(6)), d_to(cuda, in.d_to, offset(7)),
        d_shared(cuda, in.dtype, in.x.shape(), offset(4)), gate(cuda, in.gate), d_gate(cuda, in.dtype, in.gate.shape()),
        d_bias(cuda, in.d_bias), d_weights(cuda, in.d_row_weights);
    route_combine(cuda, to, from, r, {bias, shared, gate, addend});
    route_gather(cuda, gathered, x, r);
    route_bias_backward(cuda, d_bias, d_weights, d_to, bias, r);
    shared_gate_backward(cuda, d_shared, d_gate, d_to, shared, gate);
    EXPECT_TRUE(to.to_host().bit_equal(expected.combined)) << odd;
    EXPECT_TRUE(gathered.to_host().bit_equal(expected.gathered)) << odd;
    EXPECT_TRUE(d_shared.to_host().bit_equal(expected.d_shared)) << odd;
    // Other widths add up in another order.
    expect_elements_near(d_weights.to_host(), expected.d_row_weights, 1e-5, 1e-5, "d_row_weights");
    expect_elements_near(d_gate.to_host(), expected.d_gate, 0x1p-7, 1e-5, "d_gate");
    expect_elements_near(d_bias.to_host(), expected.d_bias, 1e-5, 1e-5, "d_bias");
  }
}

TEST_F(MoeCuda, a_term_that_is_not_there_is_not_added) {
  const Rows in({33, 24, {5, 2}}, DType::F32);
  Device cpu = Device::cpu();
  OwnedRouting<HostTensor> r = in.routing;
  const HostTensor *const bias = &in.bias, *const shared = &in.shared, *const gate = &in.gate, *addend = &in.addend;
  for (int which = 0; which < 16; which++) {
    const auto pick = [&](int bit, const HostTensor* t) { return which >> bit & 1 ? t : nullptr; };
    const std::array<const HostTensor*, 4> terms = {pick(0, bias), pick(1, shared), pick(1, pick(2, gate)),
                                                    pick(3, addend)};
    HostTensor expected(DType::F32, in.x.shape());
    DeviceTensor from(cuda, in.from), to(cuda, DType::F32, in.x.shape());
    OwnedRouting<DeviceTensor> on_cuda = {
        {cuda, r.experts}, {cuda, r.rows}, {cuda, r.slots}, {cuda, r.row_weights}, {cuda, r.offsets}};
    std::array<std::unique_ptr<DeviceTensor>, 4> copies;
    const auto host = [&](size_t i) { return terms[i] ? ConstTensor(*terms[i]) : ConstTensor(); };
    const auto device = [&](size_t i) {
      if (terms[i]) copies[i] = std::make_unique<DeviceTensor>(cuda, *terms[i]);
      return copies[i] ? ConstTensor(*copies[i]) : ConstTensor();
    };
    route_combine(cpu, expected, in.from, r, {host(0), host(1), host(2), host(3)});
    route_combine(cuda, to, from, on_cuda, {device(0), device(1), device(2), device(3)});
    EXPECT_TRUE(to.to_host().bit_equal(expected)) << which;
  }
}

TEST_F(MoeCuda, probabilities_are_not_summed_where_nobody_wants_them) {
  const Inputs in(kRouteCases[7]);
  const Outputs expected = in.on_cpu();
  DeviceTensor counts(cuda, in.counts), logits(cuda, in.logits), is_token(cuda, in.is_token);
  OwnedRouting<DeviceTensor> r = {{cuda, expected.routing.experts},
                                  {cuda, expected.routing.rows},
                                  {cuda, expected.routing.slots},
                                  {cuda, expected.routing.row_weights},
                                  {cuda, expected.routing.offsets}};
  route_statistics(cuda, counts, {}, logits, r, is_token);
  EXPECT_TRUE(counts.to_host().bit_equal(expected.counts));
}

TEST_F(MoeCuda, the_balance_loss_equals_the_cpu_layer) {
  for (const int64_t E : {1, 8, 128, 300, 512}) {
    for (const int64_t layers : {1, 3}) {
      SCOPED_TRACE(fmt::format("E {} layers {}", E, layers));
      HostTensor counts(DType::F64, {layers, E}, "counts"), probabilities(DType::F64, {E}, "probabilities"),
          slope(DType::F32, {E}, "slope"), loss(DType::F64, {1}, "loss");
      for (int64_t i = 0; i < counts.numel(); i++) counts.set(i, static_cast<double>(1 + i * 7 % 11));
      for (int64_t e = 0; e < E; e++) probabilities.set(e, 0.25 + static_cast<double>(e % 5));
      loss.set(0, 0.5);
      DeviceTensor counts_(cuda, counts), probabilities_(cuda, probabilities), slope_(cuda, DType::F32, {E}),
          loss_(cuda, loss);
      route_balance(cuda, slope_, loss_, counts_, probabilities_, 0.01, 77);
      Device cpu = Device::cpu();
      route_balance(cpu, slope, loss, counts, probabilities, 0.01, 77);
      EXPECT_TRUE(slope_.to_host().bit_equal(slope));
      EXPECT_GT(loss.get(0), 0.5);  // sums of up to 512 positive numbers in fp64, in another order
      EXPECT_NEAR(loss_.to_host().get(0), loss.get(0), 1e-13 * loss.get(0));
    }
  }
}

TEST_F(MoeCuda, of_equal_scores_the_first_experts_are_chosen) {
  for (const int64_t E : {6, 40, 132, 300}) {
    Inputs in({2, 8, {E, 3}});
    in.logits.fill(0);
    for (int64_t e = 0; e < E; e += 2) in.logits.set(e, -0.0);
    in.logits.set(E + 5, 2);
    const HostTensor experts = in.on_cuda(cuda, DType::F32).routing.experts;
    const double expected[] = {0, 1, 2, 5, 0, 1};
    for (int64_t i = 0; i < 6; i++) EXPECT_EQ(experts.get(i), expected[i]) << E;
  }
}

// Whatever the logits are, rows are a permutation; and what is not a number shows in the weights.
TEST_F(MoeCuda, logits_that_are_no_numbers_give_no_index_out_of_range) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const RouteCase& c : {kRouteCases[1], kRouteCases[3], kRouteCases[5], kRouteCases[7], kWideCases[0]}) {
    for (const double value : {std::nan(""), -kInfinity, kInfinity}) {
      for (const bool is_everywhere : {false, true}) {
        Inputs in(c);
        SCOPED_TRACE(describe(c, DType::F32) + fmt::format(" {} {}", value, is_everywhere));
        for (int64_t i = 0; i < in.logits.numel(); i++) {
          if (is_everywhere || i % 7 == 3) in.logits.set(i, value);
        }
        const Outputs out = in.on_cuda(cuda, DType::BF16);
        EXPECT_EQ(out.routing.offsets.get(in.E), in.R);
        std::vector<bool> is_row(static_cast<size_t>(in.R));
        for (int64_t slot = 0; slot < in.R; slot++) {
          const double e = out.routing.experts.get(slot), row = out.routing.rows.get(slot);
          ASSERT_TRUE(e >= 0 && e < static_cast<double>(in.E));
          ASSERT_TRUE(row >= 0 && row < static_cast<double>(in.R) && !is_row[static_cast<size_t>(row)]);
          is_row[static_cast<size_t>(row)] = true;
          for (int64_t other = slot / in.k * in.k; other < slot; other++) {
            ASSERT_NE(out.routing.experts.get(other), e);
          }
          const int64_t t = slot / in.k;
          const bool is_nan = std::isnan(in.logits.get(t * in.E + static_cast<int64_t>(e)));
          if (is_nan) {
            EXPECT_TRUE(std::isnan(out.routing.row_weights.get(static_cast<int64_t>(row))));
          }
          bool has_nan = false;
          for (int64_t i = 0; i < in.E; i++) has_nan = has_nan || std::isnan(in.logits.get(t * in.E + i));
          if (slot % in.k == 0) {
            EXPECT_EQ(is_nan, has_nan) << "token " << t;
          }
        }
      }
    }
  }
}

// 512 blocks of the sort, of more than 128 slots a warp.
TEST_F(MoeCuda, slots_of_a_warp_get_more_when_there_would_be_too_many_blocks) {
  if (simt_build() != SimtBuild::Plain) GTEST_SKIP() << "slow";
  const Inputs in({16500, 1, {33, 32}});
  OwnedRouting<HostTensor> expected = host_routing(in.c);
  Device cpu = Device::cpu();
  route_forward(cpu, expected, in.logits, {}, in.c.shape);
  DeviceTensor logits(cuda, in.logits);
  OwnedRouting<DeviceTensor> r = {{cuda, DType::I32, {in.T, in.k}},
                                  {cuda, DType::I32, {in.T, in.k}},
                                  {cuda, DType::I32, {in.R}},
                                  {cuda, DType::F32, {in.R}},
                                  {cuda, DType::I32, {in.E + 1}}};
  route_forward(cuda, r, logits, {}, in.c.shape);
  EXPECT_TRUE(r.experts.to_host().bit_equal(expected.experts));
  EXPECT_TRUE(r.rows.to_host().bit_equal(expected.rows));
  EXPECT_TRUE(r.slots.to_host().bit_equal(expected.slots));
  EXPECT_TRUE(r.offsets.to_host().bit_equal(expected.offsets));
}

TEST_F(MoeCuda, no_tokens_are_no_work) {
  const RouteCase c = {0, 8, {4, 2}};
  const Inputs in(c);
  DeviceTensor logits(cuda, in.logits), counts(cuda, in.counts), probabilities(cuda, in.probabilities),
      offsets(cuda, DType::I32, {5});
  const Tensor no_copies = {nullptr, DType::I32, {0, 2}}, no_slots = {nullptr, DType::I32, {0}},
               no_weights = {nullptr, DType::F32, {0}};
  const Routing r = {no_copies, no_copies, no_slots, no_weights, offsets};
  route_forward(cuda, r, logits, {}, c.shape);
  route_statistics(cuda, counts, probabilities, logits, r, no_slots);
  for (int64_t e = 0; e <= in.E; e++) EXPECT_EQ(offsets.to_host().get(e), 0);
  EXPECT_TRUE(counts.to_host().bit_equal(in.counts) && probabilities.to_host().bit_equal(in.probabilities));
  const Rows rows(c, DType::BF16);
  EXPECT_TRUE(rows.on_cuda(cuda).d_bias.bit_equal(rows.d_bias));
}

TEST_F(MoeCuda, what_the_kernels_cannot_do_is_refused_by_name) {
  EXPECT_EQ(error_of([&] {
              Inputs({2, 8, {513, 2}}).on_cuda(cuda, DType::F32);
            }),
            "moe: 513 experts, the CUDA kernels allow 512");
  HostTensor logits(DType::F64, {2, 4}, "logits"), weights(DType::F64, {4}, "row_weights"), x(DType::F64, {2, 8}, "x"),
      rows(DType::F64, {4, 8}, "rows");
  OwnedRouting<HostTensor> r = host_routing({2, 8, {4, 2}});
  r.row_weights = weights;
  EXPECT_EQ(error_of([&] {
              route_forward(cuda, r, logits, {}, {4, 2});
            }),
            "moe: dtype F64 is not supported on the CUDA device, use F32");
  EXPECT_EQ(error_of([&] { route_gather(cuda, rows, x, r); }),
            "moe: dtype F64 is not supported on the CUDA device, use F32 or BF16");
}

TEST_F(MoeCuda, these_kernels_ran) {
  const RouteCase c = {700, 8, {4, 2}};
  Inputs(c).on_cuda(cuda, DType::F32);
  Rows(c, DType::F32).on_cuda(cuda);
  DeviceTensor counts(cuda, HostTensor(DType::F64, {1, 4})), probabilities(cuda, HostTensor(DType::F64, {4})),
      slope(cuda, DType::F32, {4}), loss(cuda, HostTensor(DType::F64, {1}));
  route_balance(cuda, slope, loss, counts, probabilities, 1, 1);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"route_choose_kernel", "route_count_kernel", "route_scan_kernel", "route_scatter_kernel",
                           "route_backward_kernel", "route_statistics_kernel", "route_statistics_sum_kernel",
                           "route_gather_kernel", "route_combine_kernel", "route_bias_weights_kernel",
                           "shared_gate_backward_kernel", "column_sums_kernel", "route_balance_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
