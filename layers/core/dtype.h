// Element types of tensors, in memory and on disk.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "layers/core/check.h"

enum class DType : uint8_t { F32, F64, BF16, F16, I32, I64, U8 };

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::F64:
    case DType::I64:
      return 8;
    case DType::F32:
    case DType::I32:
      return 4;
    case DType::BF16:
    case DType::F16:
      return 2;
    case DType::U8:
      return 1;
  }
  return 0;
}

/// The name that safetensors uses.
constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return "F32";
    case DType::F64:
      return "F64";
    case DType::BF16:
      return "BF16";
    case DType::F16:
      return "F16";
    case DType::I32:
      return "I32";
    case DType::I64:
      return "I64";
    case DType::U8:
      return "U8";
  }
  return "?";
}

/// Of sums over elements of `dtype`: statistics, and gradients of parameters.
constexpr DType accumulator_dtype(DType dtype) {
  return dtype == DType::F64 ? DType::F64 : DType::F32;
}

/// bfloat16 as stored; arithmetic happens in fp32. Rounds to nearest even; NaN stays NaN.
/// Trivial, so that kernels can have __shared__ arrays of it: bf16{} is 0, an uninitialised bf16 is not.
struct bf16 {
  uint16_t bits;

  bf16() = default;
  explicit bf16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = static_cast<uint16_t>(is_nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::F32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::F64;
};
template <>
struct DTypeOf<bf16> {
  static constexpr DType value = DType::BF16;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::I32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::I64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::U8;
};

template <class T>
constexpr DType dtype_of = DTypeOf<T>::value;

/// The type that sums over T are accumulated in: fp32 for fp32 and bf16, fp64 for fp64.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

/// Calls `op(T{})` with the C++ type of a floating tensor that every CPU layer supports: fp32, or fp64 in tests.
template <class Op>
void dispatch_float(DType dtype, const char* who, Op&& op) {
  switch (dtype) {
    case DType::F32:
      op(float{});
      return;
    case DType::F64:
      op(double{});
      return;
    default:
      fail("{}: dtype {} is not supported on the CPU device, use F32", who, name_of(dtype));
  }
}
