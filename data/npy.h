// Arrays in NumPy's format, and tensors of safetensors.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "lockstep/data/open.h"

namespace lockstep::data {

/// A file that numpy.save() wrote (NEP 1): an array of numbers in C's order, little-endian, row by row. Or a tensor of
/// a .safetensors file: the only one, or the one that is named after a colon (data.safetensors:x).
class ArrayFile {
 public:
  enum class Type : std::uint8_t { kF16, kBF16, kF32, kF64, kU8, kI8, kI16, kI32, kI64, kBool };

  /// Throws IoError naming the file and a remedy for what is no such array, and where the file has other bytes than its
  /// header says.
  explicit ArrayFile(const std::string& name);

  const std::string& path() const { return file_.path(); }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  Type type() const { return type_; }
  bool is_integer() const { return type_ > Type::kF64; }
  std::uint64_t rows() const { return static_cast<std::uint64_t>(shape_[0]); }
  /// Numbers of a row: all extents but the first.
  std::size_t row_elements() const { return row_elements_; }

  /// Row `index` < rows(), as f32. Any thread.
  void read_row(std::uint64_t index, std::span<float> out) const;
  /// The same of integers. Throws IoError naming the row for one that is not in 32 bits.
  void read_row(std::uint64_t index, std::span<std::int32_t> out) const;

 private:
  void open_npy(const std::string& start);
  void open_safetensors(const std::string& tensor);
  std::string text_at(std::uint64_t offset, std::uint64_t count) const;
  /// Throws IoError for a shape that has no rows, or not these bytes.
  void settle(std::size_t element_bytes, std::uint64_t data_bytes);
  [[noreturn]] void refuse(const std::string& why, const std::string& remedy) const;
  std::span<const std::byte> row(std::uint64_t index) const;

  RandomAccessFile file_;
  Type type_ = Type::kF32;
  std::vector<std::int64_t> shape_;
  std::size_t row_elements_ = 1, row_bytes_ = 0;
  std::uint64_t begin_ = 0;  // of the data
};

/// npy:X.npy,Y.npy, which also may be tensors of safetensors: a sample and its target for each row of the two. X is (N,
/// F), (N, H, W), which are images of one channel, or (N, H, W, C), with the setting --channels first (N, C, H, W);
/// bytes are divided by 255. Y of integers are classes, of other numbers are targets that are numbers, (N) or (N, …).
/// Rows that is_held_out() are for validation.
DataSplits open_npy(const std::string& argument, const OpenOptions& options);

}  // namespace lockstep::data
