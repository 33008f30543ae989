// The extents of a tensor, outermost first.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::nn {

/// Up to six extents, each at least 0; more are a UsageError. A value type that never allocates. Neither the sign of an
/// extent nor the number of an axis is checked.
class Shape {
 public:
  static constexpr int kMaxDims = 6;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const std::int64_t> dims) : size_(static_cast<int>(dims.size())) {
    if (dims.size() > kMaxDims) [[unlikely]]
      throw UsageError("a shape of " + std::to_string(dims.size()) + " axes",
                       "give at most " + std::to_string(kMaxDims));
    for (std::size_t i = 0; i < dims.size(); ++i) dims_[i] = dims[i];
  }

  int size() const { return size_; }
  std::int64_t operator[](int i) const { return dims_[static_cast<std::size_t>(i)]; }
  std::int64_t& operator[](int i) { return dims_[static_cast<std::size_t>(i)]; }
  /// Of this object.
  std::span<const std::int64_t> dims() const { return {dims_.data(), static_cast<std::size_t>(size_)}; }

  /// The number of elements; 1 for a scalar (no dimensions). Does not look for overflow; Tensor::empty() does.
  std::int64_t count() const {
    std::int64_t n = 1;
    for (const auto d : dims()) n *= d;
    return n;
  }

  /// (…) → (…, extent)
  Shape with_last(std::int64_t extent) const {
    if (size_ == kMaxDims) [[unlikely]]
      throw UsageError("an axis more than " + std::to_string(kMaxDims), "give fewer");
    Shape more = *this;
    more.dims_[static_cast<std::size_t>(more.size_++)] = extent;
    return more;
  }

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::array<std::int64_t, kMaxDims> dims_ = {};
  int size_ = 0;
};

/// "[64, 8, 8, 1]"
inline std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace lockstep::nn
