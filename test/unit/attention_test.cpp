#include "layers/attention.h"

#include <omp.h>

#include <numeric>

#include "layers/core/parallel.h"
#include "test/layer_cases.h"
#include "test/testing.h"

namespace {

using Case = AttentionCase;

// Documents of one token, of two, around every block size, odd; G = 1, 2, 3; odd head widths; windows of one token,
// shorter than, equal to and longer than a document; softcap; scores of thousands; sinks.
const Case kLongCases[] = {
    {{1}, 1, 1, 1},
    {{1, 2, 1, 3}, 3, 1, 5},
    {{63, 64, 65}, 2, 2, 16},
    {{95, 96, 97, 1}, 4, 2, 8},
    {{191, 2, 193}, 2, 1, 20},
    {{150, 7, 211}, 6, 2, 33},
    {{130}, 3, 1, 64},
    {{101, 40}, 2, 1, 80},
    {{64, 33}, 2, 2, 128},
    {{40, 100, 101, 199}, 2, 1, 12, 100},
    {{5, 230}, 3, 3, 6, 1},
    {{260, 3}, 6, 2, 10, 37},
    {{220, 31}, 3, 1, 24, 97},
    {{140, 60}, 4, 2, 9, 50, 2.0},
    {{99, 2}, 3, 1, 16, 0, 5.0},
    {{120, 9}, 2, 1, 16, 0, 0, 300.0},
    {{1, 150, 60}, 6, 2, 12, 0, 0, 1.0, true},
    {{230, 7}, 3, 3, 20, 50, 4.0, 5.0, true},
};

/// These and the ones that the CUDA kernels are tested at.
std::vector<Case> all_cases() {
  std::vector<Case> cases(std::begin(kLongCases), std::end(kLongCases));
  cases.insert(cases.end(), std::begin(kAttentionCases), std::end(kAttentionCases));
  return cases;
}

std::string describe(const Case& c) {
  std::string lengths;
  for (const int64_t d : c.documents) lengths += fmt::format(" {}", d);
  return fmt::format("documents{}, {} heads on {}, width {}, window {}, softcap {}{}", lengths, c.NH, c.NKV, c.HD,
                     c.window, c.softcap, c.has_sinks ? ", sinks" : "");
}

struct Problem {
  Case c;
  int64_t T;
  std::vector<int64_t> cu{0};
  AttentionShape shape;
  HostTensor qkv, d_o, o, lse, dqkv, sinks, d_sinks, workspace;

  Problem(const Case& c_, DType dtype)
      : c(c_),
        T(std::accumulate(c.documents.begin(), c.documents.end(), int64_t{0})),
        shape{c.NH, c.NKV, c.HD, 1 / std::sqrt(static_cast<double>(c.HD)), c.softcap, c.window, c.has_sinks},
        qkv(DType::F64, {T, c.NH + 2 * c.NKV, c.HD}, "qkv"),
        d_o(DType::F64, {T, c.NH, c.HD}, "do"),
        o(dtype, {T, c.NH, c.HD}, "o"),
        lse(dtype, {c.NH, T}, "lse"),
        dqkv(dtype, qkv.shape(), "dqkv"),
        sinks(DType::F64, {c.NH}, "sinks"),
        d_sinks(dtype, {c.NH}, "d_sinks"),
        workspace(DType::U8, {static_cast<int64_t>(attention_workspace_bytes(shape, dtype, T, DeviceKind::Cpu))},
                  "workspace") {
    for (const int64_t d : c.documents) cu.push_back(cu.back() + d);
    qkv.fill_normal(1);
    for (int64_t t = 0; t < T; t++) {
      for (int64_t i = 0; i < c.NH * c.HD; i++) {
        const int64_t at = t * (c.NH + 2 * c.NKV) * c.HD + i;
        qkv.set(at, qkv.get(at) * c.q_stddev);
      }
    }
    qkv = qkv.to(dtype);
    d_o = d_o.fill_normal(2).to(dtype);
    sinks = sinks.fill_normal(3, 2.0, 1.0).to(dtype);
    o.fill(NAN), lse.fill(NAN), dqkv.fill(NAN);                               // whatever a call does not write shows
    std::memset(workspace.view().data, 0xff, workspace.view().size_bytes());  // NaN in any type
  }
  void forward() {
    Device device = Device::cpu();
    attention_forward(device, o, lse, qkv, {cu, {}}, shape, workspace,
                      c.has_sinks ? ConstTensor(sinks) : ConstTensor());
  }
  void backward() {
    Device device = Device::cpu();
    if (c.has_sinks) {
      attention_backward(device, dqkv, d_o, qkv, o, lse, {cu, {}}, shape, workspace, sinks, d_sinks);
    } else {
      attention_backward(device, dqkv, d_o, qkv, o, lse, {cu, {}}, shape, workspace);
    }
  }
  Problem& run() {
    forward(), backward();
    return *this;
  }
};

/// The formulas of attention.h, in fp64, one query at a time.
struct Reference {
  HostTensor o, lse, dqkv, d_sinks;

  explicit Reference(const Problem& p)
      : o(DType::F64, p.o.shape(), "o"),
        lse(DType::F64, p.lse.shape(), "lse"),
        dqkv(DType::F64, p.dqkv.shape(), "dqkv"),
        d_sinks(DType::F64, p.sinks.shape(), "d_sinks") {
    const int64_t HD = p.c.HD, row = (p.c.NH + 2 * p.c.NKV) * HD;
    for (size_t d = 0; d + 1 < p.cu.size(); d++) {
      for (int64_t h = 0; h < p.c.NH; h++) {
        const int64_t kv = h / (p.c.NH / p.c.NKV);
        const int64_t k_at = (p.c.NH + kv) * HD, v_at = k_at + p.c.NKV * HD;
        for (int64_t i = p.cu[d]; i < p.cu[d + 1]; i++) add_query(p, p.cu[d], i, h, row, k_at, v_at);
      }
    }
  }

 private:
  void add_query(const Problem& p, int64_t begin, int64_t i, int64_t h, int64_t row, int64_t k_at, int64_t v_at) {
    const int64_t HD = p.c.HD, q_at = i * row + h * HD, o_at = (i * p.c.NH + h) * HD;
    std::vector<double> s(static_cast<size_t>(i - begin + 1)), slope(s.size(), 1.0);
    const auto visible = [&](int64_t j) { return p.c.window == 0 || i - j < p.c.window; };
    double max = p.c.has_sinks ? p.sinks.get(h) : -1e300;
    for (int64_t j = begin; j <= i; j++) {
      if (!visible(j)) continue;
      double x = 0;
      for (int64_t c = 0; c < HD; c++) x += p.qkv.get(q_at + c) * p.qkv.get(j * row + k_at + c);
      x *= p.shape.scale;
      if (p.c.softcap > 0) {
        const double t = std::tanh(x / p.c.softcap);
        x = p.c.softcap * t, slope[j - begin] = 1 - t * t;
      }
      s[j - begin] = x, max = std::max(max, x);
    }
    double sum = p.c.has_sinks ? std::exp(p.sinks.get(h) - max) : 0;
    for (int64_t j = begin; j <= i; j++) sum += visible(j) ? std::exp(s[j - begin] - max) : 0;
    lse.set(h * p.T + i, max + std::log(sum));
    double D = 0;
    for (int64_t c = 0; c < HD; c++) {
      double out = 0;
      for (int64_t j = begin; j <= i; j++) {
        if (visible(j)) out += std::exp(s[j - begin] - max) / sum * p.qkv.get(j * row + v_at + c);
      }
      o.set(o_at + c, out);
      D += out * p.d_o.get(o_at + c);
    }
    // The sink is a key with the value 0: ds = prob (0 - D).
    if (p.c.has_sinks) d_sinks.set(h, d_sinks.get(h) - std::exp(p.sinks.get(h) - max) / sum * D);
    for (int64_t j = begin; j <= i; j++) {
      if (!visible(j)) continue;
      const double prob = std::exp(s[j - begin] - max) / sum;
      double dp = 0;
      for (int64_t c = 0; c < HD; c++) dp += p.d_o.get(o_at + c) * p.qkv.get(j * row + v_at + c);
      const double ds = p.shape.scale * slope[j - begin] * prob * (dp - D);
      for (int64_t c = 0; c < HD; c++) {
        add(j * row + v_at + c, prob * p.d_o.get(o_at + c));
        add(j * row + k_at + c, ds * p.qkv.get(q_at + c));
        add(q_at + c, ds * p.qkv.get(j * row + k_at + c));
      }
    }
  }
  void add(int64_t i, double value) { dqkv.set(i, dqkv.get(i) + value); }
};

TEST(Attention, fp64_equals_the_plain_formulas) {
  for (const Case& c : all_cases()) {
    Problem p(c, DType::F64);
    p.run();
    const Reference r(p);
    // Sums of at most a few hundred terms in another order, softmax weights with relative error eps * |score|.
    EXPECT_LE(relative_l2(p.o, r.o), 1e-11) << describe(c);
    EXPECT_LE(relative_l2(p.lse, r.lse), 1e-11) << describe(c);
    EXPECT_LE(relative_l2(p.dqkv, r.dqkv), 1e-11) << describe(c);
    if (c.has_sinks) {
      EXPECT_LE(relative_l2(p.d_sinks, r.d_sinks), 1e-11) << describe(c);
    }
  }
}

TEST(Attention, fp32_is_within_rounding_of_fp64) {
  for (const Case& c : all_cases()) {
    Problem low(c, DType::F32), exact(c, DType::F64);
    exact.qkv = low.qkv.to(DType::F64), exact.d_o = low.d_o.to(DType::F64);
    exact.sinks = low.sinks.to(DType::F64);
    low.run(), exact.run();
    // A score is a sum of HD products of size q_stddev / sqrt(HD): its error, eps * q_stddev, is the relative error
    // of a softmax weight. Gradients are differences of such weights, hence a few times that.
    const double tolerance = 8 * 0x1p-24 * (8 + 4 * c.q_stddev);
    EXPECT_LE(relative_l2(low.o.to(DType::F64), exact.o), tolerance) << describe(c);
    EXPECT_LE(relative_l2(low.lse.to(DType::F64), exact.lse), tolerance) << describe(c);
    if (c.window != 1 && low.T > 1) {  // one visible key has weight 1: dq = dk = 0 up to rounding
      EXPECT_LE(relative_l2(low.dqkv.to(DType::F64), exact.dqkv), tolerance) << describe(c);
    }
    if (c.has_sinks) {
      EXPECT_LE(relative_l2(low.d_sinks.to(DType::F64), exact.d_sinks), tolerance) << describe(c);
    }
  }
}

TEST(Attention, gradients_equal_central_differences) {
  for (const Case& c :
       {Case{{7, 1, 12}, 4, 2, 5, 0, 3.0}, Case{{3, 110}, 3, 1, 4, 20}, Case{{9, 40}, 4, 2, 6, 20, 0, 1, true}}) {
    Problem p(c, DType::F64);
    p.run();
    const auto loss = [&] {
      p.forward();
      return dot(p.d_o, p.o);
    };
    expect_gradient(p.qkv, p.dqkv, loss, "dqkv", 1e-6, 300);
    if (c.has_sinks) expect_gradient(p.sinks, p.d_sinks, loss, "d_sinks");
  }
}

/// Rows [begin, begin + count) of a (T, ...) tensor, for comparing bits.
std::vector<double> rows_of(const HostTensor& t, int64_t begin, int64_t count) {
  const int64_t width = t.numel() / t.shape()[0];
  std::vector<double> out;
  for (int64_t i = begin * width; i < (begin + count) * width; i++) out.push_back(t.get(i));
  return out;
}

TEST(Attention, a_document_has_the_same_bits_alone_and_packed_at_any_offset) {
  for (const Case& c : all_cases()) {
    Problem packed(c, DType::F32);
    packed.run();
    for (size_t d = 0; d < c.documents.size(); d++) {
      const int64_t begin = packed.cu[d], count = c.documents[d];
      Case single = c;
      single.documents = {count};
      Problem alone(single, DType::F32);
      std::memcpy(alone.qkv.view().data, packed.qkv.view().rows(begin, count).data, alone.qkv.view().size_bytes());
      std::memcpy(alone.d_o.view().data, packed.d_o.view().rows(begin, count).data, alone.d_o.view().size_bytes());
      alone.run();
      EXPECT_EQ(rows_of(alone.o, 0, count), rows_of(packed.o, begin, count)) << describe(c);
      EXPECT_EQ(rows_of(alone.dqkv, 0, count), rows_of(packed.dqkv, begin, count)) << describe(c);
      for (int64_t h = 0; h < c.NH; h++) {
        for (int64_t i = 0; i < count; i++) {
          ASSERT_EQ(alone.lse.get(h * count + i), packed.lse.get(h * packed.T + begin + i)) << describe(c);
        }
      }
    }
  }
}

TEST(Attention, packed_documents_do_not_see_each_other) {
  const Case c{{130, 99, 70}, 6, 2, 16, 80};
  Problem a(c, DType::F32), b(c, DType::F32);
  for (int64_t i = 0; i < 130 * 10 * 16; i++) b.qkv.set(i, b.qkv.get(i) * -3 + 1);
  for (int64_t i = 0; i < 130 * 6 * 16; i++) b.d_o.set(i, 7);
  a.run(), b.run();
  EXPECT_EQ(rows_of(a.o, 130, 169), rows_of(b.o, 130, 169));
  EXPECT_EQ(rows_of(a.dqkv, 130, 169), rows_of(b.dqkv, 130, 169));
  EXPECT_NE(rows_of(a.o, 0, 130), rows_of(b.o, 0, 130));
}

TEST(Attention, bits_do_not_depend_on_the_number_of_threads) {
  const int threads = omp_get_max_threads();
  for (const Case& c : {Case{{700}, 2, 1, 16}, Case{{20, 700, 300, 1, 400}, 6, 2, 8, 150, 0, 1, true}}) {
    omp_set_num_threads(1);
    Problem one(c, DType::F32);
    one.run();
    for (const int n : {2, 3, 4}) {
      omp_set_num_threads(n);
      Problem many(c, DType::F32);
      many.run();
      EXPECT_TRUE(many.o.bit_equal(one.o) && many.lse.bit_equal(one.lse)) << n << " threads, " << describe(c);
      EXPECT_TRUE(many.dqkv.bit_equal(one.dqkv) && many.d_sinks.bit_equal(one.d_sinks))
          << n << " threads, " << describe(c);
    }
  }
  omp_set_num_threads(threads);
}

TEST(Attention, every_token_knows_the_bounds_of_its_document) {
  EXPECT_EQ(document_bounds(std::vector<int64_t>{0, 1, 4, 6}),
            (std::vector<int32_t>{0, 1, 1, 4, 1, 4, 1, 4, 4, 6, 4, 6}));
  EXPECT_TRUE(document_bounds(std::vector<int64_t>{0}).empty());
}

TEST(Attention, documents_are_cut_into_chunks_from_their_start) {
  const std::vector<int64_t> documents = {0, 1, 8, 14, 17};
  EXPECT_EQ(cut_documents(documents, 3), (std::vector<int64_t>{0, 1, 4, 7, 8, 11, 14, 17}));
  EXPECT_EQ(cut_documents(documents, 1).size(), 18u);
  EXPECT_EQ(cut_documents(documents, 7), documents);
  EXPECT_EQ(cut_documents(std::vector<int64_t>{0}, 3), std::vector<int64_t>{0});
}

TEST(Attention, huge_scores_stay_finite) {
  for (const double stddev : {1e4, 1e15}) {
    Problem p({{50, 3}, 2, 1, 8, 0, 0, stddev}, DType::F32);
    p.run();
    for (const HostTensor* t : {&p.o, &p.lse, &p.dqkv}) {
      for (int64_t i = 0; i < t->numel(); i++) ASSERT_TRUE(std::isfinite(t->get(i))) << stddev;
    }
  }
}

TEST(Attention, a_sink_far_below_the_scores_is_none_and_one_far_above_takes_all) {
  const Case with{{40, 9}, 2, 1, 8, 0, 0, 1, true}, without{{40, 9}, 2, 1, 8};
  Problem low(with, DType::F32), none(without, DType::F32), high(with, DType::F32);
  low.sinks.fill(-1e4), high.sinks.fill(1e4);
  for (Problem* p : {&low, &none, &high}) p->run();
  EXPECT_LE(relative_l2(low.o, none.o), 1e-6);
  EXPECT_LE(relative_l2(low.dqkv, none.dqkv), 1e-6);
  EXPECT_EQ(low.d_sinks.get(0), 0);
  for (const HostTensor* t : {&high.o, &high.dqkv, &high.d_sinks}) {
    for (int64_t i = 0; i < t->numel(); i++) ASSERT_NEAR(t->get(i), 0, 1e-30);
  }
}

TEST(Attention, contract_violations_are_named) {
  Problem p({{5, 3}, 2, 1, 4}, DType::F32);
  HostTensor tiny(DType::U8, {1}, "tiny");
  Device device = Device::cpu();
  const auto message = [&](const std::vector<int64_t>& cu, Tensor w) -> std::string {
    try {
      attention_forward(device, p.o, p.lse, p.qkv, {cu, {}}, p.shape, w);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({0, 5, 7}, p.workspace), "attention_forward: cu_seqlens must run from 0 to T = 8");
  EXPECT_EQ(message({0, 5, 5, 8}, p.workspace),
            "attention_forward: cu_seqlens[2] = 5 does not exceed cu_seqlens[1] = 5");
  EXPECT_EQ(message({0, 5, 8}, tiny),
            fmt::format("attention_forward: the workspace ('tiny') has 1 bytes, {} are needed for {} threads",
                        attention_workspace_bytes(p.shape, DType::F32, 8, DeviceKind::Cpu), num_threads()));
  p.shape.has_sinks = true;
  EXPECT_EQ(message({0, 5, 8}, p.workspace), "attention_forward: sinks are missing");
  p.shape.has_sinks = false;
  EXPECT_EQ(error_of([&] {
              attention_forward(device, p.o, p.lse, p.qkv, {p.cu, {}}, p.shape, p.workspace, p.sinks);
            }),
            "attention_forward: sinks are not of this shape");
  p.shape.num_kv_heads = 0;
  EXPECT_EQ(message({0, 5, 8}, p.workspace), "attention_forward: 2 query heads of width 4 cannot share 0 kv heads");
}

}  // namespace
