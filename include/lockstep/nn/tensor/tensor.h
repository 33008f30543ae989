// A row-major array in device memory: contiguous, or with rows further apart than they are long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "lockstep/base/dtype.h"
#include "lockstep/base/error.h"
#include "lockstep/nn/tensor/allocator.h"
#include "lockstep/nn/tensor/shape.h"

namespace lockstep::nn {

template <class T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::kF32;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::kF64;
}
template <>
constexpr DType dtype_of<BFloat16>() {
  return DType::kBF16;
}
template <>
constexpr DType dtype_of<Float16>() {
  return DType::kF16;
}
template <>
constexpr DType dtype_of<std::int32_t>() {
  return DType::kI32;
}
template <>
constexpr DType dtype_of<std::int64_t>() {
  return DType::kI64;
}
template <>
constexpr DType dtype_of<std::uint8_t>() {
  return DType::kU8;
}

/// From here on are the elements of tensors that have shapes alone (nn/ops/meta_backend.h): no address of a program's.
inline constexpr std::uintptr_t kShapesAlone = std::uintptr_t{1} << 60;

/// A handle: copies share the memory. Either it holds a reference to an allocator's block, or it is a view of memory
/// that somebody else owns and keeps alive (`view_of`). Reference counts are atomic, so several threads may have
/// handles of one memory; the content is not guarded, nor is one handle. Pointers and spans into it are valid as long
/// as somebody has the memory; those of a GPU's are addresses there.
///
/// data(), f32() and span() of one that holds nothing, or as another type than it has, and parts and shapes that it has
/// not, are UsageErrors; raw(), rows() and raw_rows() of one that holds nothing are nullptr. A default one holds
/// nothing, and has the shape of a scalar; one that was moved from holds nothing, and keeps its shape and type.
///
/// Note [Pitch]
/// Rows of the last axis follow each other at once, but for those of a tensor with a pitch (`empty` with one), whose
/// content between rows is unspecified: matrix products of GPUs read and write rows fast only if each begins at a
/// multiple of 16 bytes. Its memory is reached by rows<T>() alone; what has contiguous elements in mind (data(), raw())
/// fails. Var::value() never has one, Backend::contiguous() makes a copy without.
///
/// Note [Zero rows]
/// A product is fast on a GPU only if the numbers of its rows and columns are multiples of 8 or more, too. Where a
/// weight's are not (50,257 tokens), rows of zeros may follow its last row in memory (zero_rows()): kernels then
/// compute with them, and leave what comes of it between the rows of their result, if that is nobody's
/// (between_rows()). Nobody else sees them: they are in no shape, file, norm, update or sum over ranks.
class Tensor {
 public:
  Tensor() = default;
  Tensor(const Tensor& other)
      : block_(other.block_),
        data_(other.data_),
        shape_(other.shape_),
        dtype_(other.dtype_),
        pitch_(other.pitch_),
        zero_rows_(other.zero_rows_),
        between_(other.between_) {
    if (block_ != nullptr) block_->references.fetch_add(1, std::memory_order_relaxed);
  }
  Tensor(Tensor&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        shape_(other.shape_),
        dtype_(other.dtype_),
        pitch_(other.pitch_),
        zero_rows_(other.zero_rows_),
        between_(other.between_) {}
  Tensor& operator=(Tensor other) noexcept {
    std::swap(block_, other.block_);
    std::swap(data_, other.data_);
    std::swap(shape_, other.shape_);
    std::swap(dtype_, other.dtype_);
    std::swap(pitch_, other.pitch_);
    std::swap(zero_rows_, other.zero_rows_);
    std::swap(between_, other.between_);
    return *this;
  }
  ~Tensor() {
    if (block_ != nullptr && block_->references.fetch_sub(1, std::memory_order_acq_rel) == 1) recycle(block_);
  }

  /// New memory; the content is unspecified. `allocator` may end before it. Throws UsageError for sizes that no memory
  /// has, and what CachingAllocator::acquire() does.
  static Tensor empty(CachingAllocator& allocator, const Shape& shape, DType dtype = DType::kF32) {
    std::size_t bytes = size_of(dtype);
    for (const auto extent : shape.dims())
      if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes))
        throw UsageError("a tensor of " + to_string(shape) + " is no size that memory can have");
    Tensor made;
    made.block_ = allocator.acquire(bytes);
    made.data_ = made.block_->data;
    made.shape_ = shape;
    made.dtype_ = dtype;
    return made;
  }
  /// The same with rows of the last axis `pitch` elements apart, at least their length (Note [Pitch]); else
  /// InternalError.
  static Tensor empty(CachingAllocator& allocator, const Shape& shape, DType dtype, std::int64_t pitch) {
    const int last = shape.size() - 1;
    if (last < 0 || pitch < shape[last])
      throw InternalError(to_string(shape) + " with rows " + std::to_string(pitch) + " apart");
    if (pitch == shape[last]) return empty(allocator, shape, dtype);
    Shape apart = shape;
    apart[last] = pitch;
    Tensor made = empty(allocator, apart, dtype);
    made.shape_ = shape;
    made.pitch_ = pitch;
    made.between_ = Between::kUnspecified;
    return made;
  }
  /// A view of `shape.count()` elements at `data`, which must stay valid as long as the tensor and its copies, parts
  /// and reshapes. nullptr: one that holds nothing. Nobody checks whose device's memory it is.
  static Tensor view_of(void* data, const Shape& shape, DType dtype = DType::kF32) {
    Tensor made;
    made.data_ = static_cast<std::byte*>(data);
    made.shape_ = shape;
    made.dtype_ = dtype;
    return made;
  }

  bool defined() const { return data_ != nullptr; }
  /// Whose memory it is; nothing for a view, which knows an address alone.
  std::optional<Device> device() const { return block_ != nullptr ? std::optional(device_of(*block_)) : std::nullopt; }
  const Shape& shape() const { return shape_; }
  std::int64_t size(int dim) const { return shape_[dim]; }
  std::int64_t count() const { return shape_.count(); }
  DType dtype() const { return dtype_; }
  /// From the first element to the end of the last row, with what lies between rows.
  std::size_t bytes() const {
    if (is_contiguous()) return static_cast<std::size_t>(count()) * size_of(dtype_);
    return static_cast<std::size_t>(row_count() * pitch_) * size_of(dtype_);
  }
  bool is_contiguous() const { return pitch_ == 0; }
  /// Elements from one row of the last axis, of which there is one, to the next.
  std::int64_t pitch() const { return is_contiguous() ? shape_[shape_.size() - 1] : pitch_; }
  /// What lies between rows with a pitch: perhaps other tensors' elements, as with columns(); or nobody's, which may be
  /// written.
  enum class Between : std::uint8_t { kOthers, kUnspecified, kZeros };
  Between between_rows() const { return between_; }
  /// This one; the caller has seen to it that zeros are there.
  Tensor with_zeros_between_rows() const {
    if (between_ == Between::kOthers) return *this;
    Tensor other(*this);
    other.between_ = Between::kZeros;
    return other;
  }
  /// Rows of the outermost axis that follow the last in memory, full of zeros, which nobody writes (Note [Zero rows]).
  std::int64_t zero_rows() const { return zero_rows_; }
  /// This one; the caller has seen to it that so many rows of zeros follow.
  Tensor with_zero_rows(std::int64_t rows) const {
    Tensor other(*this);
    other.zero_rows_ = rows;
    return other;
  }
  /// Whether nobody else can see changes of the content. False for a view.
  bool is_sole_owner() const { return block_ != nullptr && block_->references.load(std::memory_order_acquire) == 1; }

  void* raw() const {
    if (!is_contiguous()) [[unlikely]]
      refuse_pitch();
    return data_;
  }
  template <class T>
  T* data() const {
    if (dtype_of<T>() != dtype_) [[unlikely]]
      refuse_type(dtype_of<T>());
    if ((data_ == nullptr && count() > 0) || reinterpret_cast<std::uintptr_t>(data_) >= kShapesAlone) [[unlikely]]
      refuse_nothing();
    return static_cast<T*>(raw());
  }
  /// The first row's; others are pitch() elements apart.
  template <class T>
  T* rows() const {
    if (dtype_of<T>() != dtype_) [[unlikely]]
      refuse_type(dtype_of<T>());
    return reinterpret_cast<T*>(data_);
  }
  void* raw_rows() const { return data_; }
  float* f32() const { return data<float>(); }
  template <class T>
  std::span<T> span() const {
    return {data<T>(), static_cast<std::size_t>(count())};
  }

  /// The same memory under another shape of the same number of elements; with a pitch, of as long rows.
  Tensor reshaped(const Shape& shape) const {
    if (shape.count() != count()) [[unlikely]]
      refuse_shape(shape);
    if (!is_contiguous() && (shape.size() == 0 || shape[shape.size() - 1] != shape_[shape_.size() - 1])) [[unlikely]]
      refuse_pitch();
    Tensor other(*this);
    other.shape_ = shape;
    other.zero_rows_ = 0;
    return other;
  }

  /// Rows [begin, end) of the outermost axis: the same memory.
  Tensor slice(std::int64_t begin, std::int64_t end) const {
    if (shape_.size() == 0 || begin < 0 || end < begin || end > shape_[0]) [[unlikely]]
      refuse_rows(begin, end);
    Tensor other(*this);
    other.zero_rows_ = 0;
    other.shape_[0] = end - begin;
    if (shape_[0] > 0 && data_ != nullptr)
      other.data_ += bytes() / static_cast<std::size_t>(shape_[0]) * static_cast<std::size_t>(begin);
    return other;
  }

  /// Columns [begin, end) of the last axis: the same memory, with a pitch. For kernels that read rows: bytes() reaches
  /// beyond them.
  Tensor columns(std::int64_t begin, std::int64_t end) const {
    const int last = shape_.size() - 1;
    if (last < 0 || begin < 0 || end < begin || end > shape_[last]) [[unlikely]]
      refuse_rows(begin, end);
    Tensor other(*this);
    other.pitch_ = pitch();
    other.zero_rows_ = 0;
    other.between_ = Between::kOthers;
    other.shape_[last] = end - begin;
    if (data_ != nullptr) other.data_ += static_cast<std::size_t>(begin) * size_of(dtype_);
    return other;
  }

 private:
  std::int64_t row_count() const {
    std::int64_t rows = 1;
    for (const auto extent : shape_.dims().first(static_cast<std::size_t>(shape_.size() - 1))) rows *= extent;
    return rows;
  }
  [[noreturn]] void refuse_pitch() const;
  [[noreturn]] void refuse_type(DType wanted) const;
  [[noreturn]] void refuse_nothing() const;
  [[noreturn]] void refuse_shape(const Shape& wanted) const;
  [[noreturn]] void refuse_rows(std::int64_t begin, std::int64_t end) const;

  Block* block_ = nullptr;  // nullptr: a view
  std::byte* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::kF32;
  std::int64_t pitch_ = 0;  // elements; 0: contiguous
  std::int64_t zero_rows_ = 0;
  Between between_ = Between::kOthers;
};

}  // namespace lockstep::nn
