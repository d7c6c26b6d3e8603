// Helpers of the layer tests: owning tensors, random data, the gradient check, and error measures.
#pragma once

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "layers/core/rng.h"
#include "layers/core/tensor.h"

/// An owning tensor in its own heap block, so that sanitizers see its ends.
class HostTensor {
 public:
  HostTensor(DType dtype, Shape shape, std::string name = "t")
      : dtype_(dtype),
        shape_(shape),
        name_(std::move(name)),
        bytes_(std::max<size_t>(1, static_cast<size_t>(shape.numel()) * size_of(dtype))) {}

  operator Tensor() { return {bytes_.data(), dtype_, shape_, name_.c_str()}; }
  operator ConstTensor() const { return {bytes_.data(), dtype_, shape_, name_.c_str()}; }
  Tensor view() { return *this; }
  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  int64_t numel() const { return shape_.numel(); }
  template <class T>
  T* as() {
    return view().as<T>();
  }

  double get(int64_t i) const {
    const void* p = bytes_.data();
    switch (dtype_) {
      case DType::F32:
        return static_cast<const float*>(p)[i];
      case DType::F64:
        return static_cast<const double*>(p)[i];
      case DType::BF16:
        return static_cast<float>(static_cast<const bf16*>(p)[i]);
      case DType::I32:
        return static_cast<const int32_t*>(p)[i];
      default:
        fail("HostTensor::get: dtype {}", name_of(dtype_));
    }
  }
  void set(int64_t i, double value) {
    void* p = bytes_.data();
    switch (dtype_) {
      case DType::F32:
        static_cast<float*>(p)[i] = static_cast<float>(value);
        return;
      case DType::F64:
        static_cast<double*>(p)[i] = value;
        return;
      case DType::BF16:
        static_cast<bf16*>(p)[i] = bf16(static_cast<float>(value));
        return;
      case DType::I32:
        static_cast<int32_t*>(p)[i] = static_cast<int32_t>(value);
        return;
      default:
        fail("HostTensor::set: dtype {}", name_of(dtype_));
    }
  }
  void fill(double value) {
    for (int64_t i = 0; i < numel(); i++) set(i, value);
  }
  /// mean + stddev * N(0, 1), the same values (rounded) for every dtype.
  HostTensor& fill_normal(uint64_t seed, double stddev = 1.0, double mean = 0.0) {
    const Philox rng(seed, hash_name(name_));
    for (int64_t i = 0; i < numel(); i++) set(i, mean + stddev * rng.normal(static_cast<uint64_t>(i)));
    return *this;
  }
  HostTensor to(DType dtype) const {
    HostTensor out(dtype, shape_, name_);
    for (int64_t i = 0; i < numel(); i++) out.set(i, get(i));
    return out;
  }
  bool bit_equal(const HostTensor& other) const { return dtype_ == other.dtype_ && bytes_ == other.bytes_; }

 private:
  DType dtype_;
  Shape shape_;
  std::string name_;
  std::vector<char> bytes_;
};

/// ||a - b|| / ||b|| (||a|| when b is zero).
inline double relative_l2(const HostTensor& a, const HostTensor& b) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < b.numel(); i++) {
    difference += (a.get(i) - b.get(i)) * (a.get(i) - b.get(i));
    norm += b.get(i) * b.get(i);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

/// Runs `op` with `threads` OpenMP threads.
inline void with_threads(int threads, const std::function<void()>& op) {
  const int before = omp_get_max_threads();
  omp_set_num_threads(threads);
  op();
  omp_set_num_threads(before);
}

/// F64 gradient check: compares `gradient` with central differences of `loss()` as `x` moves, element by element
/// (every element up to `max_elements`, then evenly spread ones). The error is relative to the largest gradient, so
/// that zeros are checked too. Central differences with step h err by h^2 f''' + eps f / h: about 1e-9 at h = 1e-5.
/// `loss` runs on one thread: thousands of tiny parallel regions are slow on a machine that is busy otherwise.
inline void expect_gradient(HostTensor& x, const HostTensor& gradient, const std::function<double()>& loss,
                            const char* what, double tolerance = 1e-6, int64_t max_elements = 256) {
  ASSERT_EQ(x.dtype(), DType::F64) << what;
  ASSERT_EQ(x.numel(), gradient.numel()) << what;
  double scale = 0;
  for (int64_t i = 0; i < gradient.numel(); i++) scale = std::max(scale, std::abs(gradient.get(i)));
  const auto loss_at = [&](int64_t i, double value) {
    double result = 0;
    x.set(i, value);
    with_threads(1, [&] { result = loss(); });
    return result;
  };
  const int64_t n = x.numel();
  const int64_t stride = std::max<int64_t>(1, n / max_elements);
  for (int64_t i = 0; i < n; i += stride) {
    const double x0 = x.get(i), h = 1e-5 * std::max(1.0, std::abs(x0));
    const double up = loss_at(i, x0 + h), down = loss_at(i, x0 - h);
    x.set(i, x0);
    const double numeric = (up - down) / (2 * h);
    ASSERT_NEAR(gradient.get(i), numeric, tolerance * std::max(scale, 1e-3)) << what << "[" << i << "]";
  }
}

/// sum_i weights[i] * y[i]: turns a tensor into a scalar whose gradient with respect to y is `weights`.
inline double dot(const HostTensor& weights, const HostTensor& y) {
  double sum = 0;
  for (int64_t i = 0; i < y.numel(); i++) sum += weights.get(i) * y.get(i);
  return sum;
}

/// The message of the Error that `op` throws; empty when it throws none.
inline std::string error_of(const std::function<void()>& op) {
  try {
    op();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
