// The linear layer on CUDA, run on the CPU over the double of cuBLASLt, against the CPU layer.
#include "layers/linear.h"

#include "layers/core/blas.h"
#include "test/layer_cases.h"
#include "test/simt/compare.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11, 12, 13};

// For the bias and its gradient: more ranges of rows than one, whole packs with a tail of a chunk, N beyond one chunk.
constexpr LinearCase kBiasCases[] = {{700, 2, 24}, {300, 1, 264}, {129, 2, 300}, {64, 3, 8}};

struct Outputs {
  HostTensor y, sum, dx, dw, db;
};

struct Inputs {
  HostTensor x, w, b, dy, y, dw, db;  ///< y, dw, db: what is added to

  Inputs(const LinearCase& c, DType dtype)
      : x(dtype, {c.rows, c.K}, "x"),
        w(dtype, {c.N, c.K}, "w"),
        b(dtype, {c.N}, "b"),
        dy(dtype, {c.rows, c.N}, "dy"),
        y(dtype, {c.rows, c.N}, "y"),
        dw(DType::F32, {c.N, c.K}, "dw"),
        db(DType::F32, {c.N}, "db") {
    x.fill_normal(1), w.fill_normal(2), b.fill_normal(3), dy.fill_normal(4), y.fill_normal(5);
    dw.fill_normal(6), db.fill_normal(7);
  }

  /// In fp32, on the same values: what CUDA should give but for its rounding.
  Outputs on_cpu() const {
    Device cpu = Device::cpu();
    const HostTensor x_ = x.to(DType::F32), w_ = w.to(DType::F32), b_ = b.to(DType::F32), dy_ = dy.to(DType::F32);
    Outputs out = {HostTensor(DType::F32, y.shape()), y.to(DType::F32), HostTensor(DType::F32, x.shape()), dw, db};
    linear_forward(cpu, out.y, x_, w_, b_);
    linear_forward(cpu, out.sum, x_, w_, {}, true);
    linear_backward(cpu, out.dx, out.dw, out.db, dy_, x_, w_);
    return out;
  }

  /// `offset`: elements between a tensor and an aligned address.
  Outputs on_cuda(Device& cuda, int64_t offset = 0) const {
    DeviceTensor x_(cuda, x, offset), w_(cuda, w, offset), b_(cuda, b, offset), dy_(cuda, dy, offset);
    DeviceTensor y_(cuda, y.dtype(), y.shape(), offset), sum_(cuda, y, offset);
    DeviceTensor dx_(cuda, x.dtype(), x.shape(), offset), dw_(cuda, dw, offset), db_(cuda, db, offset);
    linear_forward(cuda, y_, x_, w_, b_);
    linear_forward(cuda, sum_, x_, w_, {}, true);
    linear_backward(cuda, dx_, dw_, db_, dy_, x_, w_);
    return {y_.to_host(), sum_.to_host(), dx_.to_host(), dw_.to_host(), db_.to_host()};
  }
};

std::string describe(const LinearCase& c, DType dtype, int64_t offset = 0) {
  return fmt::format("{} ({}, {}) x ({}, {}) offset {}", name_of(dtype), c.rows, c.K, c.N, c.K, offset);
}

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.y.bit_equal(b.y) && a.sum.bit_equal(b.sum) && a.dx.bit_equal(b.dx) && a.dw.bit_equal(b.dw) &&
         a.db.bit_equal(b.db);
}

void expect_equal(const Outputs& cuda, const Outputs& cpu, const LinearCase& c) {
  expect_sums_near(cuda.y, cpu.y, c.K, "y");
  expect_sums_near(cuda.sum, cpu.sum, c.K, "y +=");
  expect_sums_near(cuda.dx, cpu.dx, c.N, "dx");
  expect_sums_near(cuda.dw, cpu.dw, c.rows, "dw");
  expect_sums_near(cuda.db, cpu.db, c.rows, "db");
}

class LinearCuda : public testing::Test {
 protected:
  LinearCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(LinearCuda, equals_the_cpu_layer) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const int64_t offset : {0, 1}) {
      const auto expect = [&](const LinearCase& c) {
        SCOPED_TRACE(describe(c, dtype, offset));
        const Inputs in(c, dtype);
        expect_equal(in.on_cuda(cuda, offset), in.on_cpu(), c);
      };
      for (const LinearCase& c : kLinearCases) expect(c);
      for (const LinearCase& c : kBiasCases) expect(c);
    }
  }
}

TEST_F(LinearCuda, a_bias_that_cublaslt_cannot_add_costs_no_rounding) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const int64_t offset : {0, 1}) {
      for (const LinearCase& c : {LinearCase{5, 3, 17}, {33, 100, 40}, {3, 2, 2056}}) {
        SCOPED_TRACE(describe(c, dtype, offset));
        const Inputs in(c, dtype);
        const Outputs with_epilogue = in.on_cuda(cuda, offset);
        simt_options().blas_adds_bias = false;
        Device other = Device::cuda(0);
        EXPECT_TRUE(bit_equal(in.on_cuda(other, offset), with_epilogue));
        simt_options() = {};
      }
    }
  }
}

// N is a multiple of a pack, so that the pointers alone decide: of our kernel, and of the algorithm of cuBLASLt.
TEST_F(LinearCuda, one_tensor_out_of_line_is_enough) {
  for (const bool adds_bias : {true, false}) {
    simt_options().blas_adds_bias = adds_bias;
    Device other = Device::cuda(0);
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Inputs in({3, 2, 264}, dtype);
      const HostTensor aligned = in.on_cuda(other).y;
      DeviceTensor x(other, in.x), w(other, in.w);
      for (const bool is_y : {false, true}) {
        DeviceTensor b(other, in.b, is_y ? 0 : 1), y(other, dtype, in.y.shape(), is_y ? 1 : 0);
        linear_forward(other, y, x, w, b);
        EXPECT_TRUE(y.to_host().bit_equal(aligned)) << name_of(dtype) << (is_y ? " y" : " b") << " " << adds_bias;
      }
    }
  }
}

TEST_F(LinearCuda, bits_do_not_depend_on_the_schedule) {
  for (const LinearCase& c : kBiasCases) {
    const Inputs in(c, DType::BF16);
    const Outputs first = in.on_cuda(cuda);
    for (const uint64_t schedule : kOtherSchedules) {
      simt_options().schedule = schedule;
      EXPECT_TRUE(bit_equal(in.on_cuda(cuda), first)) << describe(c, DType::BF16) << " schedule " << schedule;
    }
    simt_options() = {};
  }
}

TEST_F(LinearCuda, no_rows_are_no_work_and_an_empty_sum_is_zero) {
  const Inputs none({0, 8, 5}, DType::BF16);
  const Outputs out = none.on_cuda(cuda);
  EXPECT_TRUE(out.dw.bit_equal(none.dw) && out.db.bit_equal(none.db));
  const Inputs empty({3, 0, 5}, DType::F32);
  for (const bool adds_bias : {true, false}) {
    simt_options().blas_adds_bias = adds_bias;
    const HostTensor y = empty.on_cuda(cuda).y;
    for (int64_t i = 0; i < y.numel(); i++) EXPECT_EQ(y.get(i), empty.b.get(i % 5));
  }
  DeviceTensor x(cuda, empty.x), w(cuda, empty.w), y(cuda, DType::F32, {3, 5});
  linear_forward(cuda, y, x, w, {});
  for (int64_t i = 0; i < 15; i++) EXPECT_EQ(y.to_host().get(i), 0);
}

TEST_F(LinearCuda, null_gradients_are_skipped) {
  const Inputs in({33, 100, 40}, DType::BF16);
  DeviceTensor x(cuda, in.x), w(cuda, in.w), dy(cuda, in.dy), dw(cuda, in.dw);
  linear_backward(cuda, {}, dw, {}, dy, x, w);
  EXPECT_TRUE(dw.to_host().bit_equal(in.on_cuda(cuda).dw));
}

// The logits of a router.
TEST_F(LinearCuda, bf16_products_are_stored_in_fp32_where_the_caller_wants_it) {
  for (const LinearCase& c : {LinearCase{33, 100, 40}, {5, 3, 17}, {3, 2, 2056}, {1, 1, 1}}) {
    for (const bool has_bias : {false, true}) {
      for (const int64_t offset : {0, 1}) {
        SCOPED_TRACE(describe(c, DType::BF16, offset) + (has_bias ? " with a bias" : ""));
        const Inputs in(c, DType::BF16);
        DeviceTensor x(cuda, in.x, offset), w(cuda, in.w, offset), b(cuda, in.b, offset);
        DeviceTensor y(cuda, DType::F32, in.y.shape(), offset);
        linear_forward(cuda, y, x, w, has_bias ? ConstTensor(b) : ConstTensor());
        HostTensor expected(DType::F32, in.y.shape());
        const HostTensor b32 = in.b.to(DType::F32);
        Device cpu = Device::cpu();
        linear_forward(cpu, expected, in.x.to(DType::F32), in.w.to(DType::F32),
                       has_bias ? ConstTensor(b32) : ConstTensor());
        expect_sums_near(y.to_host(), expected, c.K, "y");
      }
    }
  }
}

// A second device would fail if the first had taken the algorithm with it; the moved one must keep it.
TEST_F(LinearCuda, the_choice_of_an_algorithm_lives_and_moves_with_its_device) {
  const Inputs in({5, 3, 17}, DType::F32);
  const Outputs first = in.on_cuda(cuda);
  {
    Device other = Device::cuda(0);
    EXPECT_TRUE(bit_equal(in.on_cuda(other), first));
  }
  Device moved = std::move(cuda);
  EXPECT_TRUE(bit_equal(in.on_cuda(moved), first));
}

TEST_F(LinearCuda, what_cannot_be_is_refused_by_name) {
  HostTensor x(DType::F64, {2, 8}, "x"), w(DType::F64, {4, 8}, "w"), y(DType::F64, {2, 4}, "y"),
      dw(DType::F64, {4, 8}, "dw");
  const std::string refused = "linear: dtype F64 is not supported on the CUDA device, use F32 or BF16";
  EXPECT_EQ(error_of([&] { linear_forward(cuda, y, x, w, {}); }), refused);
  EXPECT_EQ(error_of([&] { linear_backward(cuda, {}, dw, {}, y, x, w); }), refused);
  EXPECT_EQ(error_of([&] { blas_gemm(cuda, y, {x}, {w}); }),
            "matrix product: F64 (2, 8) 'x' x F64 (4, 8) 'w' does not give (2, 4) 'y'");
  HostTensor narrow_y(DType::BF16, {2, 4}, "y"), wide_x(DType::F32, {2, 8}, "x"), wide_w(DType::F32, {4, 8}, "w");
  EXPECT_EQ(error_of([&] {
              blas_gemm(cuda, narrow_y, {wide_x}, {wide_w, true});
            }),
            "cuBLASLt: no choice for F32 (2, 8) x (8, 4) transposed -> BF16: an invalid value");
  EXPECT_EQ(error_of([&] { linear_forward(cuda, narrow_y, wide_x, wide_w, {}); }),
            "linear_forward: y ('y') is BF16 (2, 4), expected F32 (2, 4)");
}

TEST_F(LinearCuda, memory_of_the_host_is_found_out) {
  HostTensor x(DType::F32, {2, 8}, "x"), w(DType::F32, {4, 8}, "w");
  DeviceTensor y(cuda, DType::F32, {2, 4}), w_(cuda, w);
  const std::string error = error_of([&] { linear_forward(cuda, y, x, w_, {}); });
  EXPECT_EQ(error.find("cuBLASLt: B of 64 bytes leaves its memory: host address"), 0u) << error;
}

TEST_F(LinearCuda, these_kernels_ran) {
  const Inputs in({300, 3, 17}, DType::F32);
  simt_options().blas_adds_bias = false;
  in.on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"linear_bias_kernel", "column_sums_kernel", "column_sums_add_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

}  // namespace
