// The CUDA kernels of attention, run on the CPU, against the CPU layer; and attention_cudnn.cu on a double of cuDNN.
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "layers/attention.h"
#include "layers/attention_cudnn.h"
#include "test/layer_cases.h"
#include "test/simt/device_tensor.h"

namespace {

constexpr double kFp32 = 0x1p-24, kBf16 = 0x1p-8;  // unit roundoffs
constexpr uint64_t kOtherSchedules[] = {kSimtDescending, 11};

struct Outputs {
  HostTensor o, lse, dqkv, d_sinks;
};

struct Inputs {
  AttentionCase c;
  DType dtype;
  std::vector<int64_t> cu{0};
  int64_t T, row;  ///< row: elements of a token in qkv
  AttentionShape shape;
  HostTensor qkv, d_o, bounds, sinks, d_sinks;  ///< d_sinks: what the gradient adds to

  Inputs(const AttentionCase& c_, DType dtype_)
      : c(c_),
        dtype(dtype_),
        T(std::accumulate(c.documents.begin(), c.documents.end(), int64_t{0})),
        row((c.NH + 2 * c.NKV) * c.HD),
        shape{c.NH, c.NKV, c.HD, 1 / std::sqrt(static_cast<double>(c.HD)), c.softcap, c.window, c.has_sinks},
        qkv(dtype, {T, c.NH + 2 * c.NKV, c.HD}, "qkv"),
        d_o(dtype, {T, c.NH, c.HD}, "do"),
        bounds(DType::I32, {T, 2}, "bounds"),
        sinks(dtype, {c.NH}, "sinks"),
        d_sinks(DType::F32, {c.NH}, "d_sinks") {
    for (const int64_t length : c.documents) cu.push_back(cu.back() + length);
    qkv.fill_normal(1), d_o.fill_normal(2), sinks.fill_normal(3, 2.0, 1.0), d_sinks.fill_normal(4);
    for (int64_t t = 0; t < T; t++) {
      for (int64_t i = 0; i < c.NH * c.HD; i++) qkv.set(t * row + i, qkv.get(t * row + i) * c.q_stddev);
    }
    const std::vector<int32_t> from = document_bounds(cu);
    for (int64_t i = 0; i < bounds.numel(); i++) bounds.set(i, from[static_cast<size_t>(i)]);
  }

  /// In fp32. The backward starts from `forward`'s o and lse, so that their rounding is none of its errors.
  Outputs on_cpu(const Outputs& forward) const {
    Device cpu = Device::cpu();
    const HostTensor qkv32 = qkv.to(DType::F32), d_o32 = d_o.to(DType::F32), o32 = forward.o.to(DType::F32);
    HostTensor sinks32 = sinks.to(DType::F32);
    Outputs out = {HostTensor(DType::F32, d_o.shape()), HostTensor(DType::F32, {c.NH, T}),
                   HostTensor(DType::F32, qkv.shape()), d_sinks};
    const ConstTensor sinks_ = c.has_sinks ? ConstTensor(sinks32) : ConstTensor();
    const Tensor d_sinks_ = c.has_sinks ? Tensor(out.d_sinks) : Tensor();
    HostTensor workspace(DType::U8,
                         {static_cast<int64_t>(attention_workspace_bytes(shape, DType::F32, T, DeviceKind::Cpu))}, "w");
    attention_forward(cpu, out.o, out.lse, qkv32, {cu, {}}, shape, workspace, sinks_);
    attention_backward(cpu, out.dqkv, d_o32, qkv32, o32, forward.lse, {cu, {}}, shape, workspace, sinks_, d_sinks_);
    return out;
  }

  /// `offset`: elements between a tensor and an aligned address. `asks_cudnn`: lse is (T, NH) where it has a plan.
  /// `lowers_lse`: by an ulp, before the backward.
  Outputs on_cuda(Device& cuda, int64_t offset = 0, bool asks_cudnn = false, bool lowers_lse = false) const {
    DeviceTensor qkv_(cuda, qkv, offset), d_o_(cuda, d_o, offset), bounds_(cuda, bounds);
    DeviceTensor sinks_(cuda, sinks), d_sinks_(cuda, d_sinks);
    DeviceTensor cu_(cuda, DType::I64, {static_cast<int64_t>(cu.size())});
    cuda.copy_from_host(cu_.view().data, cu.data(), cu.size() * sizeof(int64_t));
    DeviceTensor o_(cuda, dtype, d_o.shape(), offset), lse_(cuda, DType::F32, {c.NH, T});
    DeviceTensor dqkv_(cuda, dtype, qkv.shape(), offset);
    DeviceTensor workspace(cuda, DType::U8,
                           {static_cast<int64_t>(attention_workspace_bytes(shape, dtype, T, DeviceKind::Cuda))},
                           asks_cudnn ? offset : 0);
    Documents documents = {cu, bounds_};
    if (asks_cudnn) documents.cu_seqlens_device = cu_;
    const ConstTensor in_sinks = c.has_sinks ? ConstTensor(sinks_) : ConstTensor();
    const Tensor out_sinks = c.has_sinks ? Tensor(d_sinks_) : Tensor();
    attention_forward(cuda, o_, lse_, qkv_, documents, shape, workspace, in_sinks);
    if (lowers_lse) {
      HostTensor lse = lse_.to_host();
      for (int64_t i = 0; i < lse.numel(); i++) lse.set(i, std::nextafter(lse.as<float>()[i], -INFINITY));
      cuda.copy_from_host(lse_.view().data, lse.as<float>(), static_cast<size_t>(lse.numel()) * sizeof(float));
    }
    attention_backward(cuda, dqkv_, d_o_, qkv_, o_, lse_, documents, shape, workspace, in_sinks, out_sinks);
    return {o_.to_host(), lse_.to_host(), dqkv_.to_host(), d_sinks_.to_host()};
  }
};

std::string describe(const Inputs& in, int64_t offset = 0) {
  std::string lengths;
  for (const int64_t d : in.c.documents) lengths += fmt::format(" {}", d);
  return fmt::format("{}, documents{}, {} heads on {}, width {}, window {}, softcap {}, {} sinks, offset {}",
                     name_of(in.dtype), lengths, in.c.NH, in.c.NKV, in.c.HD, in.c.window, in.c.softcap,
                     in.c.has_sinks ? "with" : "no", offset);
}

bool bit_equal(const Outputs& a, const Outputs& b) {
  return a.o.bit_equal(b.o) && a.lse.bit_equal(b.lse) && a.dqkv.bit_equal(b.dqkv) && a.d_sinks.bit_equal(b.d_sinks);
}

/// How far each element of the outputs may lie from the CPU layer's, by the plain formulas in fp64.
///
/// An fp32 sum of n terms in another order, and each of the few operations after it, errs by about sqrt(n) roundings of
/// the sum of absolute values; 8 times that is never reached. From there errors are carried on:
///   a score errs by e_s, a weight w = exp(s - lse) by 2 e_s w;  do . v and D by their own sums
///   ds = scale w (do . v - D) slope errs by all four of its factors;  d_sink = -sum w D by both and its own sum
/// bf16: w and ds are rounded once as operands (kBf16 of themselves), and every output once.
struct Bounds {
  HostTensor o, lse, dqkv, d_sinks;

  explicit Bounds(const Inputs& in)
      : o(DType::F64, in.d_o.shape(), "o"),
        lse(DType::F64, {in.c.NH, in.T}, "lse"),
        dqkv(DType::F64, in.qkv.shape(), "dqkv"),
        d_sinks(DType::F64, {in.c.NH}, "d_sinks"),
        in_(in),
        sum_(8 * kFp32 * std::sqrt(static_cast<double>(in.c.HD))),
        operand_(in.dtype == DType::BF16 ? kBf16 : 0) {
    for (int64_t i = 0; i < in.qkv.numel(); i++) x_.push_back(in.qkv.get(i));
    for (int64_t i = 0; i < in.d_o.numel(); i++) d_o_.push_back(in.d_o.get(i));
    for (size_t d = 0; d + 1 < in.cu.size(); d++) {
      for (int64_t h = 0; h < in.c.NH; h++) {
        for (int64_t i = in.cu[d]; i < in.cu[d + 1]; i++) add_query(in.cu[d], i, h);
      }
    }
  }

 private:
  struct Dot {
    double value = 0, size = 0;  ///< sum of products, and of their absolute values
  };
  Dot dot(const double* a, const double* b) const {
    Dot dot;
    for (int64_t c = 0; c < in_.c.HD; c++) dot.value += a[c] * b[c], dot.size += std::abs(a[c] * b[c]);
    return dot;
  }

  void add_query(int64_t document, int64_t i, int64_t h) {
    const AttentionCase& c = in_.c;
    const int64_t HD = c.HD, k_at = (c.NH + h / (c.NH / c.NKV)) * HD, v_at = k_at + c.NKV * HD,
                  o_at = (i * c.NH + h) * HD;
    const int64_t first = c.window > 0 ? std::max(document, i - c.window + 1) : document;
    const double n = static_cast<double>(i - first + 1), order = 8 * kFp32 * std::sqrt(n);
    const double* q = &x_[static_cast<size_t>(i * in_.row + h * HD)];
    const double* d_o = &d_o_[static_cast<size_t>(o_at)];
    std::vector<double> w, slope;
    const double sink = in_.sinks.get(h);
    double max = c.has_sinks ? sink : -1e300, e_s = 0;
    for (int64_t j = first; j <= i; j++) {
      const Dot qk = dot(q, &x_[static_cast<size_t>(j * in_.row + k_at)]);
      double s = qk.value * in_.shape.scale, t = 0;
      e_s = std::max(e_s, sum_ * (qk.size * in_.shape.scale + std::abs(s)));
      if (c.softcap > 0) t = std::tanh(s / c.softcap), s = c.softcap * t;
      w.push_back(s), slope.push_back(1 - t * t), max = std::max(max, s);
    }
    const double sink_weight = c.has_sinks ? std::exp(sink - max) : 0;
    double total = sink_weight;
    for (double& x : w) total += x = std::exp(x - max);
    lse.set(h * in_.T + i, 2 * e_s + order + 8 * kFp32 * std::abs(max + std::log(total)));
    std::vector<double> out(static_cast<size_t>(HD));
    for (int64_t j = first; j <= i; j++) {
      const double weight = w[static_cast<size_t>(j - first)] /= total;
      const double* v = &x_[static_cast<size_t>(j * in_.row + v_at)];
      for (int64_t a = 0; a < HD; a++) {
        out[static_cast<size_t>(a)] += weight * v[a];
        add(o, o_at + a, (2 * e_s + operand_ + order) * weight * std::abs(v[a]));
      }
    }
    const Dot D = dot(d_o, out.data());
    const double over_tokens = 8 * kFp32 * std::sqrt(static_cast<double>(in_.T));
    add(d_sinks, h, sink_weight / total * (2 * e_s + order + over_tokens + sum_ + operand_) * D.size);
    for (int64_t j = first; j <= i; j++) {
      const size_t at = static_cast<size_t>(j - first);
      const double* k = &x_[static_cast<size_t>(j * in_.row + k_at)];
      const Dot dw = dot(d_o, &x_[static_cast<size_t>(j * in_.row + v_at)]);
      // D comes from o as it was rounded
      const double difference = std::abs(dw.value - D.value) + (operand_ + sum_) * D.size;
      const double e_slope = c.softcap > 0 ? 2 * e_s / c.softcap : 0;
      const double ds = in_.shape.scale * w[at] * slope[at] * difference;
      const double e_ds = (2 * e_s + operand_ + order) * ds +
                          in_.shape.scale * w[at] * (e_slope * difference + sum_ * (dw.size + D.size));
      for (int64_t a = 0; a < HD; a++) {
        add(dqkv, i * in_.row + h * HD + a, e_ds * std::abs(k[a]));
        add(dqkv, j * in_.row + k_at + a, e_ds * std::abs(q[a]));
        add(dqkv, j * in_.row + v_at + a, (2 * e_s + operand_ + order) * w[at] * std::abs(d_o[a]));
      }
    }
  }
  static void add(HostTensor& t, int64_t i, double value) { t.set(i, t.get(i) + value); }

  const Inputs& in_;
  double sum_, operand_;
  std::vector<double> x_, d_o_;
};

void expect_within(const HostTensor& actual, const HostTensor& expected, const HostTensor& bound, const char* what) {
  const double store = actual.dtype() == DType::BF16 ? kBf16 : kFp32;
  for (int64_t i = 0; i < actual.numel(); i++) {
    const double a = actual.get(i), e = expected.get(i);
    ASSERT_LE(std::abs(a - e), bound.get(i) + store * std::abs(e) * (1 + kBf16))
        << what << "[" << i << "] = " << a << ", not " << e;
  }
}

class AttentionCuda : public testing::Test {
 protected:
  AttentionCuda() { simt_options() = {}; }

  Device cuda = Device::cuda(0);
};

TEST_F(AttentionCuda, kernels_equal_the_cpu_layer) {
  for (const AttentionCase& c : kAttentionCases) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Inputs in(c, dtype);
      const Bounds bounds(in);
      for (const int64_t offset : {0, 1}) {
        if (offset > 0 && in.T * c.HD > 2500) continue;  // nothing else happens, only slowly
        SCOPED_TRACE(describe(in, offset));
        const Outputs on_cuda = in.on_cuda(cuda, offset), on_cpu = in.on_cpu(on_cuda);
        expect_within(on_cuda.o, on_cpu.o, bounds.o, "o");
        expect_within(on_cuda.lse, on_cpu.lse, bounds.lse, "lse");
        expect_within(on_cuda.dqkv, on_cpu.dqkv, bounds.dqkv, "dqkv");
        expect_within(on_cuda.d_sinks, on_cpu.d_sinks, bounds.d_sinks, "d_sinks");
      }
    }
  }
}

TEST_F(AttentionCuda, bits_do_not_depend_on_the_schedule) {
  for (const AttentionCase& c :
       {AttentionCase{{70, 3, 10}, 2, 1, 32, 30, 4.0, 1, true}, AttentionCase{{35}, 1, 1, 256}}) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
      const Inputs in(c, dtype);
      const Outputs first = in.on_cuda(cuda);
      for (const uint64_t schedule : kOtherSchedules) {
        simt_options().schedule = schedule;
        EXPECT_TRUE(bit_equal(in.on_cuda(cuda), first)) << describe(in) << " schedule " << schedule;
      }
      simt_options() = {};
    }
  }
}

TEST_F(AttentionCuda, alignment_changes_no_bit) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    const Inputs in({{50, 20}, 2, 1, 24}, dtype);
    EXPECT_TRUE(bit_equal(in.on_cuda(cuda, 1), in.on_cuda(cuda))) << describe(in);
  }
}

/// The elements of tokens [begin, T) of a (T, ...) tensor.
std::vector<double> tokens_from(const HostTensor& t, int64_t begin) {
  std::vector<double> values;
  const int64_t width = t.numel() / t.shape()[0];
  for (int64_t i = begin * width; i < t.numel(); i++) values.push_back(t.get(i));
  return values;
}

TEST_F(AttentionCuda, packed_documents_do_not_see_each_other) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    Inputs in({{21, 50, 9}, 4, 2, 16}, dtype);
    const Outputs before = in.on_cuda(cuda);
    for (int64_t i = 0; i < 21 * in.row; i++) in.qkv.set(i, 1 - 3 * in.qkv.get(i));
    for (int64_t i = 0; i < 21 * 4 * 16; i++) in.d_o.set(i, 7);
    const Outputs after = in.on_cuda(cuda);
    EXPECT_EQ(tokens_from(after.o, 21), tokens_from(before.o, 21));
    EXPECT_EQ(tokens_from(after.dqkv, 21), tokens_from(before.dqkv, 21));
    EXPECT_NE(tokens_from(after.o, 0), tokens_from(before.o, 0));
  }
}

// What is read is multiplied, if only with 0: NaN shows it.
TEST_F(AttentionCuda, tiles_that_the_mask_hides_are_not_read) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const bool is_window : {false, true}) {
      // documents of 64 and 71: tiles end with the first one; or a window that is shorter than a tile
      Inputs in(is_window ? AttentionCase{{195}, 1, 1, 64, 10} : AttentionCase{{64, 71}, 1, 1, 64}, dtype);
      for (int64_t i = 0; i < 64 * in.row; i++) in.qkv.set(i, NAN);
      const Outputs out = in.on_cuda(cuda);
      for (const double x : tokens_from(out.o, is_window ? 128 : 64)) ASSERT_TRUE(std::isfinite(x)) << describe(in);
      for (const double x : tokens_from(out.dqkv, is_window ? 192 : 64)) ASSERT_TRUE(std::isfinite(x)) << describe(in);
    }
  }
}

TEST_F(AttentionCuda, huge_scores_stay_finite) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    for (const double stddev : {1e4, 1e15}) {
      const Outputs out = Inputs({{50, 3}, 2, 1, 8, 0, 0, stddev}, dtype).on_cuda(cuda);
      for (const HostTensor* t : {&out.o, &out.lse, &out.dqkv}) {
        for (int64_t i = 0; i < t->numel(); i++) ASSERT_TRUE(std::isfinite(t->get(i))) << stddev;
      }
    }
  }
}

// nvcc makes an FMA of score * log2(e) - lse: lse is rounded, the score is not, and of huge ones the difference is
// huge, too. Here nothing is contracted, and lse errs by as much.
TEST_F(AttentionCuda, weights_are_at_most_one_though_lse_is_rounded) {
  for (const DType dtype : {DType::F32, DType::BF16}) {
    const Outputs out = Inputs({{50, 3}, 2, 1, 8, 0, 0, 1e15}, dtype).on_cuda(cuda, 0, false, true);
    for (int64_t i = 0; i < out.dqkv.numel(); i++) ASSERT_TRUE(std::isfinite(out.dqkv.get(i))) << i;
  }
}

TEST_F(AttentionCuda, no_tokens_are_no_work) {
  EXPECT_NO_THROW(Inputs({{}, 2, 1, 8}, DType::F32).on_cuda(cuda));
}

TEST_F(AttentionCuda, what_the_kernels_cannot_do_is_refused_by_name) {
  const auto message = [&](const AttentionCase& c, DType dtype) -> std::string {
    const Inputs in(c, dtype);
    HostTensor o(dtype, in.d_o.shape()), lse(accumulator_dtype(dtype), {c.NH, in.T}), workspace(DType::U8, {4096});
    try {
      attention_forward(cuda, o, lse, in.qkv, {in.cu, in.bounds}, in.shape, workspace);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({{3}, 1, 1, 8}, DType::F64),
            "attention: dtype F64 is not supported on the CUDA device, use F32 or BF16");
  EXPECT_EQ(message({{3}, 1, 1, 258}, DType::BF16), "attention: heads of width 258, the CUDA kernels allow 256");
}

class AttentionCudnn : public AttentionCuda {
 protected:
  AttentionCudnn() {
    attention_cudnn_log([this](const std::string& line) { lines_.push_back(line); });
  }
  ~AttentionCudnn() override { attention_cudnn_log({}); }

  /// cuDNN's (T, NH) as (NH, T).
  static HostTensor by_head(const Inputs& in, const HostTensor& lse) {
    HostTensor turned(DType::F32, lse.shape());
    for (int64_t t = 0; t < in.T; t++) {
      for (int64_t h = 0; h < in.c.NH; h++) turned.set(h * in.T + t, lse.get(t * in.c.NH + h));
    }
    return turned;
  }
  /// The layout of lse shows that it was cuDNN.
  void expect_cpu(const Inputs& in, int64_t offset = 0) {
    SCOPED_TRACE(describe(in, offset));
    const Bounds bounds(in);
    Outputs found = in.on_cuda(cuda, offset, true);
    found.lse = by_head(in, found.lse);
    const Outputs on_cpu = in.on_cpu(found);
    expect_within(found.o, on_cpu.o, bounds.o, "o");
    expect_within(found.lse, on_cpu.lse, bounds.lse, "lse");
    expect_within(found.dqkv, on_cpu.dqkv, bounds.dqkv, "dqkv");
    for (const std::string& line : lines_) EXPECT_EQ(line.find("our own kernels"), std::string::npos) << line;
  }

  std::vector<std::string> lines_;  ///< of the log
};

// One document; one token; more documents than a power of two, so that slots stay empty; shared keys; windows of one
// token, shorter and longer than a document.
TEST_F(AttentionCudnn, documents_windows_and_shared_heads_equal_the_cpu_layer) {
  for (const AttentionCase& c : {AttentionCase{{135}, 2, 1, 64}, AttentionCase{{1}, 1, 1, 16},
                                 AttentionCase{{5, 4, 3, 2, 1, 7, 6, 5, 9, 8, 3, 2, 30}, 4, 2, 16},
                                 AttentionCase{{110, 23}, 6, 3, 32, 7}, AttentionCase{{40, 19, 1}, 2, 2, 16, 30},
                                 AttentionCase{{5, 20}, 3, 1, 48, 1}, AttentionCase{{41, 27, 150}, 1, 1, 128}}) {
    for (const int64_t offset : {0, 8}) expect_cpu(Inputs(c, DType::BF16), offset);
  }
}

// As many slots as the workspace has room for, in memory that begins next to a boundary: not a byte is left over.
TEST_F(AttentionCudnn, the_workspace_is_enough_for_the_most_documents) {
  std::vector<int64_t> documents(2049, 1);
  documents[7] = 2;
  for (const int64_t offset : {0, 8}) expect_cpu(Inputs({documents, 1, 1, 16}, DType::BF16), offset);
}

TEST_F(AttentionCudnn, batches_of_about_a_size_share_their_plans) {
  for (const auto& documents : {std::vector<int64_t>{130, 20, 3}, {160, 13, 7}, {140, 1, 1, 1}}) {
    expect_cpu(Inputs({documents, 2, 1, 80}, DType::BF16));
  }
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("cuDNN 91900, planned"), std::string::npos) << lines_[0];
  expect_cpu(Inputs({{130, 20, 3, 1, 1}, 2, 1, 80}, DType::BF16));
  EXPECT_EQ(lines_.size(), 2u);
}

// What differs in one thing only, mostly with as much scratch.
TEST_F(AttentionCudnn, another_shape_or_batch_has_plans_of_its_own) {
  for (const AttentionCase& c : {AttentionCase{{100, 33, 9}, 4, 2, 96}, AttentionCase{{100, 33, 9}, 4, 1, 96},
                                 AttentionCase{{130, 3, 9}, 4, 1, 96}, AttentionCase{{100, 33, 9}, 4, 2, 96, 20},
                                 AttentionCase{{100, 33, 9}, 4, 2, 96, 30}, AttentionCase{{100, 33, 9}, 6, 2, 64, 30},
                                 AttentionCase{{100, 33, 3, 3, 3}, 4, 2, 96}}) {
    expect_cpu(Inputs(c, DType::BF16));
  }
  Inputs scaled({{100, 33, 9}, 4, 2, 96}, DType::BF16);
  scaled.shape.scale *= 2;
  expect_cpu(scaled);
  EXPECT_EQ(lines_.size(), 8u);
}

TEST_F(AttentionCudnn, what_it_refuses_goes_to_our_own_kernels) {
  const Inputs in({{70, 9}, 2, 1, 112}, DType::BF16);
  simt_options().cudnn_has_backward = false;
  for (int i = 0; i < 2; i++) EXPECT_TRUE(bit_equal(in.on_cuda(cuda, 0, true), in.on_cuda(cuda)));
  simt_options().cudnn_has_backward = true;
  EXPECT_TRUE(bit_equal(in.on_cuda(cuda, 0, true), in.on_cuda(cuda)));  // it is asked once
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_NE(lines_[0].find("our own kernels, as cuDNN 91900 has no backward (the double"), std::string::npos);
}

// 9.x: a fixed order takes memory S^2. 10.x: it costs nothing.
TEST_F(AttentionCudnn, sums_have_a_fixed_order_where_that_is_to_be_had) {
  const AttentionShape shape{2, 1, 64, 0.125};
  const AttentionCudnnBatch batch{1, 1024, 1024};
  for (const int sm : {90, 100, 103}) {
    for (const bool is_backward : {false, true}) {
      EXPECT_EQ(attention_cudnn_support(shape, batch, is_backward, sm, "{}"), "") << sm;
    }
  }
}

TEST_F(AttentionCudnn, the_order_of_its_stream_is_kept) {
  const Inputs in({{50, 20}, 2, 1, 32}, DType::BF16);
  const Outputs eager = in.on_cuda(cuda, 0, true);
  simt_options().streams = 5;
  EXPECT_TRUE(bit_equal(in.on_cuda(cuda, 0, true), eager));
}

TEST_F(AttentionCudnn, what_it_does_not_plan_goes_to_our_own_kernels) {
  const AttentionShape plain{2, 1, 64, 0.125};
  const auto plans = [&](auto change, DType dtype = DType::BF16, int sm = 90) {
    AttentionShape shape = plain;
    change(shape);
    return attention_cudnn_plans(shape, dtype, sm);
  };
  EXPECT_TRUE(plans([](AttentionShape&) {}));
  EXPECT_FALSE(plans([](AttentionShape&) {}, DType::F32));
  EXPECT_FALSE(plans([](AttentionShape&) {}, DType::BF16, 80));
  EXPECT_FALSE(plans([](AttentionShape& s) { s.softcap = 5; }));
  EXPECT_FALSE(plans([](AttentionShape& s) { s.has_sinks = true; }));
  EXPECT_FALSE(plans([](AttentionShape& s) { s.head_dim = 40; }));
  EXPECT_FALSE(plans([](AttentionShape& s) { s.own_kernels = true; }));
  // More documents than slots.
  const Inputs in({std::vector<int64_t>(4097, 1), 1, 1, 16}, DType::BF16);
  const Outputs out = in.on_cuda(cuda, 0, true);
  for (int64_t i = 0; i < out.o.numel(); i++) ASSERT_EQ(out.o.get(i), in.qkv.get(i / 16 * 48 + 32 + i % 16));
  EXPECT_TRUE(lines_.empty());
}

TEST_F(AttentionCuda, these_kernels_ran) {
  Inputs({{5}, 1, 1, 8, 0, 0, 1, true}, DType::BF16).on_cuda(cuda);
  const std::set<std::string> kernels = simt_launched_kernels();
  for (const char* name : {"attention_forward_kernel", "attention_row_dot_kernel", "attention_backward_queries_kernel",
                           "attention_backward_keys_kernel", "attention_sink_gradient_kernel"}) {
    EXPECT_TRUE(kernels.contains(name)) << name;
  }
}

/// Attention asks cuDNN on a GPU of compute capability 9.0, where a batch brings cu_seqlens_device.
const bool is_hopper = setenv("TRAIN_GPT_SIMT_SM", "90", 1) == 0;

}  // namespace
