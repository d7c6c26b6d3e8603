// Front doors and the CPU loops that specify elementwise sums, conversions and reductions. Contract: reduce.h.
#include "layers/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "layers/core/parallel.h"

namespace {

constexpr int64_t kGrain = 16384;
constexpr int64_t kPieces = 256;  // that a sum is cut into, whatever the number of threads
constexpr int64_t kLanes = 16;    // running sums inside a piece: they vectorise, and hide the latency of an addition

template <class T>
void add_cpu(T* y, const T* a, const T* b, int64_t n) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) y[i] = a[i] + b[i];
  });
}

/// To <- From through the wider of the two; bf16 converts from and to float only.
template <class To, class From>
To element_as(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<From, bf16>) {
    return static_cast<To>(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, bf16>) {
    return bf16(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

template <class To, class From>
void convert_cpu(To* to, const From* from, int64_t n) {
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) to[i] = element_as<To>(from[i]);
  });
}

// Parts in the outer loop, so that memory is read in order; a block of sums stays in the first-level cache.
template <class T, class Part>
void add_parts_cpu(T* sum, const Part* parts, int64_t n, int num_parts) {
  constexpr int64_t kBlock = 1024;
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    std::array<Accumulator<T>, kBlock> added;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t count = std::min(kBlock, end - at);
      for (int64_t i = 0; i < count; i++) added[static_cast<size_t>(i)] = element_as<Accumulator<T>>(parts[at + i]);
      for (int p = 1; p < num_parts; p++) {
        const Part* part = parts + p * n + at;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) added[static_cast<size_t>(i)] += element_as<Accumulator<T>>(part[i]);
      }
#pragma omp simd
      for (int64_t i = 0; i < count; i++) {
        sum[at + i] = element_as<T>(element_as<Accumulator<T>>(sum[at + i]) + added[static_cast<size_t>(i)]);
      }
    }
  });
}

template <class T>
double piece_sum_of_squares(const T* x, int64_t n) {
  std::array<double, kLanes> lanes{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t k = 0; k < kLanes; k++) lanes[k] += element_as<double>(x[i + k]) * element_as<double>(x[i + k]);
  }
  double sum = 0;
  for (; i < n; i++) sum += element_as<double>(x[i]) * element_as<double>(x[i]);
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class T>
double sum_of_squares_cpu(const T* x, int64_t n) {
  std::array<double, kPieces> sums;
  const int64_t grain = kPieces / std::clamp<int64_t>(n / kGrain, 1, kPieces);
  parallel_for(kPieces, grain, [&](int64_t piece_begin, int64_t piece_end) {
    for (int64_t p = piece_begin; p < piece_end; p++) {
      const int64_t begin = p * n / kPieces, end = (p + 1) * n / kPieces;
      sums[static_cast<size_t>(p)] = piece_sum_of_squares(x + begin, end - begin);
    }
  });
  double sum = 0;
  for (const double s : sums) sum += s;
  return sum;
}

template <class Op>
void dispatch_storage(DType dtype, const char* who, Op&& op) {
  if (dtype == DType::BF16) return op(bf16{});
  dispatch_float(dtype, who, op);
}

}  // namespace

void residual_add(Device& device, Tensor y, ConstTensor a, ConstTensor b) {
  check_tensor(y, "residual_add: y", a.shape, a.dtype);
  check_tensor(a, "residual_add: a", a.shape, a.dtype);
  check_tensor(b, "residual_add: b", a.shape, a.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return residual_add_cuda(device, y, a, b);
  }
  dispatch_float(a.dtype, "residual_add", [&]<class T>(T) { add_cpu(y.as<T>(), a.as<T>(), b.as<T>(), y.numel()); });
}

void add_parts(Device& device, Tensor sum, ConstTensor parts, int num_parts) {
  check_tensor(sum, "add_parts: sum", sum.shape, sum.dtype);
  check_tensor(parts, "add_parts: parts", {num_parts * sum.numel()}, parts.dtype);
  CHECK(accumulator_dtype(sum.dtype) == accumulator_dtype(parts.dtype), "add_parts: parts of {} for a sum of {}",
        name_of(parts.dtype), name_of(sum.dtype));
  CHECK(num_parts >= 1, "add_parts: {} parts", num_parts);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return add_parts_cuda(device, sum, parts, num_parts);
  }
  dispatch_storage(sum.dtype, "add_parts", [&]<class T>(T) {
    dispatch_storage(parts.dtype, "add_parts", [&]<class Part>(Part) {
      if constexpr (std::is_same_v<Accumulator<T>, Accumulator<Part>>) {
        add_parts_cpu(sum.as<T>(), parts.as<Part>(), sum.numel(), num_parts);
      }
    });
  });
}

void fill_zero(Device& device, Tensor x) {
  if (device.is_cuda()) return device.fill_zero(x.data, x.size_bytes());
  parallel_for(static_cast<int64_t>(x.size_bytes()), 1 << 20, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(x.data) + begin, 0, static_cast<size_t>(end - begin));
  });
}

void add_sum_of_squares(Device& device, Tensor sum, ConstTensor x) {
  check_tensor(sum, "add_sum_of_squares: sum", {1}, DType::F64);
  check_tensor(x, "add_sum_of_squares: x", x.shape, x.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return add_sum_of_squares_cuda(device, sum, x);
  }
  dispatch_storage(x.dtype, "add_sum_of_squares",
                   [&]<class T>(T) { *sum.as<double>() += sum_of_squares_cpu(x.as<T>(), x.numel()); });
}

void convert(Device& device, Tensor to, ConstTensor from) {
  check_tensor(from, "convert: from", from.shape, from.dtype);
  check_tensor(to, "convert: to", from.shape, to.dtype);
  if constexpr (kHasCuda) {
    if (device.is_cuda()) return convert_cuda(device, to, from);
  }
  dispatch_storage(to.dtype, "convert", [&]<class To>(To) {
    dispatch_storage(from.dtype, "convert",
                     [&]<class From>(From) { convert_cpu(to.as<To>(), from.as<From>(), to.numel()); });
  });
}
