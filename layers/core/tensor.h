// Tensor / ConstTensor: contiguous, row-major views with a name. They never own memory and have no strides;
// a change of layout is an op that one can see.
#pragma once

#include <array>
#include <initializer_list>
#include <type_traits>

#include "layers/core/dtype.h"

/// Up to four dimensions, outermost first.
class Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : rank_(static_cast<int>(dims.size())) {
    CHECK(dims.size() <= kMaxRank, "a tensor has at most {} dimensions, not {}", kMaxRank, dims.size());
    int i = 0;
    for (const int64_t d : dims) {
      CHECK(d >= 0, "a dimension cannot be negative: {}", d);
      dims_[i++] = d;
    }
  }

  int rank() const { return rank_; }
  int64_t operator[](int i) const {
    CHECK(i >= 0 && i < rank_, "dimension {} of a tensor of rank {}", i, rank_);
    return dims_[i];
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; i++) n *= dims_[i];
    return n;
  }
  /// Product of all dimensions but the last: the number of rows.
  int64_t rows() const { return rank_ == 0 ? 1 : (dims_[rank_ - 1] == 0 ? 0 : numel() / dims_[rank_ - 1]); }
  int64_t last() const { return rank_ == 0 ? 1 : dims_[rank_ - 1]; }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + rank_; }
  bool operator==(const Shape& other) const = default;

  /// "(2, 3)"
  std::string str() const {
    std::string s = "(";
    for (int i = 0; i < rank_; i++) s += (i ? ", " : "") + std::to_string(dims_[i]);
    return s + ")";
  }

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

template <bool kConst>
struct BasicTensor {
  using Void = std::conditional_t<kConst, const void, void>;
  template <class T>
  using Element = std::conditional_t<kConst, const T, T>;

  Void* data = nullptr;
  DType dtype = DType::F32;
  Shape shape;
  const char* name = "";  ///< for messages; outlives the view

  /// The typed pointer; checks the dtype.
  template <class T>
  Element<T>* as() const {
    CHECK(dtype == dtype_of<T>, "tensor '{}' {} is {}, expected {}", name, shape.str(), name_of(dtype),
          name_of(dtype_of<T>));
    return static_cast<Element<T>*>(data);
  }

  /// A null view stands for "this model has no such tensor" (a bias, say).
  explicit operator bool() const { return data != nullptr; }
  int64_t numel() const { return shape.numel(); }
  size_t size_bytes() const { return static_cast<size_t>(numel()) * size_of(dtype); }

  /// The same elements under another shape.
  BasicTensor reshaped(Shape to) const {
    CHECK(to.numel() == numel(), "tensor '{}' {} cannot be viewed as {}", name, shape.str(), to.str());
    return {data, dtype, to, name};
  }
  /// Rows [begin, begin + count) of the first dimension.
  BasicTensor rows(int64_t begin, int64_t count) const {
    CHECK(shape.rank() > 0 && begin >= 0 && count >= 0 && begin + count <= shape[0], "rows [{}, {}) of tensor '{}' {}",
          begin, begin + count, name, shape.str());
    using Byte = std::conditional_t<kConst, const char, char>;
    const int64_t row_numel = shape[0] == 0 ? 0 : numel() / shape[0];
    BasicTensor view = *this;
    if (data) view.data = static_cast<Byte*>(data) + begin * row_numel * static_cast<int64_t>(size_of(dtype));
    view.shape = with_first_dim(count);
    return view;
  }

  /// Tensor -> ConstTensor. A template, since EDG (nvcc) warns of a conversion of ConstTensor to itself.
  template <bool kOther>
  requires(kOther && !kConst) operator BasicTensor<kOther>() const { return {data, dtype, shape, name}; }

 private:
  Shape with_first_dim(int64_t count) const {
    switch (shape.rank()) {
      case 1:
        return {count};
      case 2:
        return {count, shape[1]};
      case 3:
        return {count, shape[1], shape[2]};
      default:
        return {count, shape[1], shape[2], shape[3]};
    }
  }
};

using Tensor = BasicTensor<false>;
using ConstTensor = BasicTensor<true>;

/// Checks a tensor of a layer's contract: shape and dtype, named in the message.
inline void check_tensor(const ConstTensor& t, const char* what, const Shape& shape, DType dtype) {
  CHECK(t.shape == shape && t.dtype == dtype, "{} ('{}') is {} {}, expected {} {}", what, t.name, name_of(t.dtype),
        t.shape.str(), name_of(dtype), shape.str());
  CHECK(t.data != nullptr || t.numel() == 0, "{} ('{}') has no memory", what, t.name);
}
