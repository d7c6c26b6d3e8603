// The CUDA kernels of the experts' linear layers, run on the CPU, against the CPU layer.
#include "layers/grouped_linear.h"

#include <algorithm>
#include <cmath>

#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr WeightLayout kLayouts[] = {WeightLayout::OutIn, WeightLayout::InOut};
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11};

// More than a tile (64 and 128) in every dimension, whole packs and odd; rows that end with a tile, one before and one
// after; more experts than a warp has lanes, of which many are idle; nobody; sums of as many steps as there are stages.
const GroupedLinearCase kTileCases[] = {
    {{130, 0, 66}, 136, 136},
    {{70}, 131, 67},
    {{64, 128, 63, 127, 65, 129}, 8, 16},
    {{0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
      1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 0},
     32,
     8},
    {{0, 0, 0}, 8, 8},
    {{40, 3}, 96, 16},
};

std::vector<GroupedLinearCase> all_cases() {
  std::vector<GroupedLinearCase> cases(std::begin(kGroupedLinearCases), std::end(kGroupedLinearCases));
  cases.insert(cases.end(), std::begin(kTileCases), std::end(kTileCases));
  return cases;
}

struct Outputs {
  HostTensor y, plain, dx, dw, db;  ///< plain: y without a bias
};

struct Inputs {
  GroupedLinearCase c;
  WeightLayout layout;
  DType dtype;
  int64_t R = 0, E, K, N;
  HostTensor offsets, x, w, b, dy, dw, db;  ///< dw, db: what is added to

  static int64_t sum(const std::vector<int64_t>& rows) {
    int64_t total = 0;
    for (const int64_t n : rows) total += n;
    return total;
  }
  Inputs(const GroupedLinearCase& c_, WeightLayout layout_, DType dtype_)
      : c(c_),
        layout(layout_),
        dtype(dtype_),
        R(sum(c.rows)),
        E(static_cast<int64_t>(c.rows.size())),
        K(c.K),
        N(c.N),
        offsets(DType::I32, {E + 1}, "offsets"),
        x(dtype, {R, K}, "x"),
        w(dtype, layout == WeightLayout::OutIn ? Shape{E, N, K} : Shape{E, K, N}, "w"),
        b(dtype, {E, N}, "b"),
        dy(dtype, {R, N}, "dy"),
        dw(DType::F32, w.shape(), "dw"),
        db(DType::F32, {E, N}, "db") {
    for (int64_t e = 0; e < E; e++) {
      offsets.set(e + 1, offsets.get(e) + static_cast<double>(c.rows[static_cast<size_t>(e)]));
    }
    x.fill_normal(1), w.fill_normal(2), b.fill_normal(3), dy.fill_normal(4), dw.fill_normal(5), db.fill_normal(6);
  }
  int64_t rows_of(int64_t e) const { return c.rows[static_cast<size_t>(e)]; }

  /// In fp32, on the same values: what CUDA should give but for its rounding.
  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    const HostTensor x_ = x.to(DType::F32), w_ = w.to(DType::F32), b_ = b.to(DType::F32), dy_ = dy.to(DType::F32);
    Outputs out = {dy_, dy_, x_, dw, db};
    grouped_linear_forward(cpu, out.y, x_, w_, b_, offsets, layout);
    grouped_linear_forward(cpu, out.plain, x_, w_, {}, offsets, layout);
    grouped_linear_backward(cpu, out.dx, out.dw, out.db, dy_, x_, w_, offsets, layout);
    return out;
  }

  /// `odd`: a bit for each tensor that lies an element behind an aligned address.
  static constexpr unsigned kNumTensors = 9;
  Outputs on_cuda(Device& cuda, unsigned odd = 0) const {
    const auto offset = [&](unsigned tensor) { return int64_t{odd >> tensor & 1}; };
    DeviceTensor offsets_(cuda, offsets), x_(cuda, x, offset(0)), w_(cuda, w, offset(1)), b_(cuda, b, offset(2)),
        dy_(cuda, dy, offset(3)), dw_(cuda, dw, offset(4)), db_(cuda, db, offset(5)),
        y_(cuda, dtype, dy.shape(), offset(6)), plain(cuda, dtype, dy.shape(), offset(7)),
        dx_(cuda, dtype, x.shape(), offset(8));
    grouped_linear_forward(cuda, y_, x_, w_, b_, offsets_, layout);
    grouped_linear_forward(cuda, plain, x_, w_, {}, offsets_, layout);
    grouped_linear_backward(cuda, dx_, dw_, db_, dy_, x_, w_, offsets_, layout);
    return {y_.to_host(), plain.to_host(), dx_.to_host(), dw_.to_host(), db_.to_host()};
  }
};

std::string describe(const Inputs& in, unsigned odd = 0) {
  std::string rows;
  for (const int64_t n : in.c.rows) rows += fmt::format(" {}", n);
  return fmt::format("{} rows{} K {} N {} {} odd {:b}", name_of(in.dtype), rows, in.K, in.N,
                     in.layout == WeightLayout::OutIn ? "(N, K)" : "(K, N)", odd);
}

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.y.bit_equal(b.y) && a.plain.bit_equal(b.plain) && a.dx.bit_equal(b.dx) && a.dw.bit_equal(b.dw) &&
         a.db.bit_equal(b.db);
}

class GroupedLinearCuda : public testing::Test {
 protected:
  GroupedLinearCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(GroupedLinearCuda, kernels_equal_the_cpu_layer) {
  for (const GroupedLinearCase& c : all_cases()) {
    for (const WeightLayout layout : kLayouts) {
      for (const DType dtype : {DType::F32, DType::BF16}) {
        const Inputs in(c, layout, dtype);
        SCOPED_TRACE(describe(in));
        const Outputs found = in.on_cuda(cuda), expected = in.on_cpu();
        expect_sums_near(found.y, expected.y, in.K, "y");
        expect_sums_near(found.plain, expected.plain, in.K, "y without a bias");
        expect_sums_near(found.dx, expected.dx, in.N, "dx");
        const int64_t longest = *std::max_element(c.rows.begin(), c.rows.end());
        expect_sums_near(found.dw, expected.dw, longest, "dw");
        expect_sums_near(found.db, expected.db, longest, "db");
      }
    }
  }
}

TEST_F(GroupedLinearCuda, alignment_changes_no_bit) {
  for (const GroupedLinearCase& c : {kGroupedLinearCases[1], kTileCases[5]}) {
    for (const WeightLayout layout : kLayouts) {
      for (const DType dtype : {DType::F32, DType::BF16}) {
        const Inputs in(c, layout, dtype);
        Outputs aligned = in.on_cuda(cuda);
        const HostTensor db = in.on_cpu().db;
        for (unsigned i = 0; i <= Inputs::kNumTensors; i++) {  // one of them, or all
          const unsigned odd = i < Inputs::kNumTensors ? 1u << i : ~0u;
          const Outputs offset = in.on_cuda(cuda, odd);
          expect_sums_near(offset.db, db, in.R, "db");  // whose columns are cut otherwise
          aligned.db = offset.db;
          EXPECT_TRUE(bit_equal(offset, aligned)) << describe(in, odd);
        }
      }
    }
  }
}

TEST_F(GroupedLinearCuda, bits_do_not_depend_on_the_schedule) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const Inputs& in :
         {Inputs(kTileCases[0], WeightLayout::OutIn, dtype), Inputs(kTileCases[1], WeightLayout::InOut, dtype),
          Inputs(kTileCases[3], WeightLayout::OutIn, dtype)}) {
      const Outputs first = in.on_cuda(cuda);
      for (const uint64_t schedule : kOtherSchedules) {
        simt_options().schedule = schedule;
        EXPECT_TRUE(bit_equal(in.on_cuda(cuda), first)) << describe(in) << " schedule " << schedule;
      }
      simt_options() = {};
    }
  }
}

// What is read is multiplied, if only with 0: NaN shows it.
TEST_F(GroupedLinearCuda, experts_do_not_see_each_others_rows_and_weights) {
  for (const WeightLayout layout : kLayouts) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      Inputs in({{70, 1, 40}, 40, 72}, layout, dtype);
      const Outputs before = in.on_cuda(cuda);
      constexpr int64_t kExpert = 1;
      const int64_t begin = 70, end = 71, weights = in.N * in.K;
      for (int64_t i = begin * in.K; i < end * in.K; i++) in.x.set(i, NAN);
      for (int64_t i = begin * in.N; i < end * in.N; i++) in.dy.set(i, NAN);
      for (int64_t i = kExpert * weights; i < (kExpert + 1) * weights; i++) in.w.set(i, NAN);
      for (int64_t i = kExpert * in.N; i < (kExpert + 1) * in.N; i++) in.b.set(i, NAN);
      const Outputs after = in.on_cuda(cuda);
      const auto expect_same_but = [&](const HostTensor& a, const HostTensor& b, int64_t from, int64_t to) {
        for (int64_t i = 0; i < a.numel(); i++) {
          ASSERT_EQ(std::isnan(a.get(i)), i >= from && i < to) << describe(in) << " " << i;
          if (i < from || i >= to) {
            ASSERT_EQ(a.get(i), b.get(i)) << describe(in) << " " << i;
          }
        }
      };
      expect_same_but(after.y, before.y, begin * in.N, end * in.N);
      expect_same_but(after.dx, before.dx, begin * in.K, end * in.K);
      expect_same_but(after.dw, before.dw, kExpert * weights, (kExpert + 1) * weights);
      expect_same_but(after.db, before.db, kExpert * in.N, (kExpert + 1) * in.N);
    }
  }
}

TEST_F(GroupedLinearCuda, an_expert_without_rows_keeps_its_gradient) {
  for (const WeightLayout layout : kLayouts) {
    const Inputs in({{20, 0, 3}, 24, 16}, layout, DType::BF16);
    const Outputs out = in.on_cuda(cuda);
    for (int64_t i = 0; i < in.N * in.K; i++) ASSERT_EQ(out.dw.get(in.N * in.K + i), in.dw.get(in.N * in.K + i));
    for (int64_t i = 0; i < in.N; i++) ASSERT_EQ(out.db.get(in.N + i), in.db.get(in.N + i));
  }
}

TEST_F(GroupedLinearCuda, a_null_bias_has_no_gradient) {
  const Inputs in(kTileCases[5], WeightLayout::OutIn, DType::BF16);
  DeviceTensor offsets(cuda, in.offsets), x(cuda, in.x), w(cuda, in.w), dy(cuda, in.dy), dw(cuda, in.dw),
      dx(cuda, DType::BF16, in.x.shape());
  grouped_linear_backward(cuda, dx, dw, {}, dy, x, w, offsets, in.layout);
  const Outputs with_bias = in.on_cuda(cuda);
  EXPECT_TRUE(dx.to_host().bit_equal(with_bias.dx) && dw.to_host().bit_equal(with_bias.dw));
}

TEST_F(GroupedLinearCuda, what_the_kernels_cannot_do_is_refused_by_name) {
  const Inputs in({{2, 3}, 4, 6}, WeightLayout::OutIn, DType::F64);
  HostTensor y = in.dy;
  EXPECT_EQ(error_of([&] { grouped_linear_forward(cuda, y, in.x, in.w, {}, in.offsets, in.layout); }),
            "grouped_linear: dtype F64 is not supported on the CUDA device, use F32 or BF16");
}

TEST_F(GroupedLinearCuda, these_kernels_ran) {
  Inputs({{2, 3}, 4, 6}, WeightLayout::OutIn, DType::BF16).on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"grouped_rows_kernel", "grouped_weights_kernel", "column_sums_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
