// Arrays in NumPy's format.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "lockstep/data/open.h"

namespace lockstep::data {

/// A file that numpy.save() wrote (NEP 1): an array of numbers in C's order, little-endian, row by row.
class NpyFile {
 public:
  enum class Type : std::uint8_t { kF16, kF32, kF64, kU8, kI8, kI16, kI32, kI64, kBool };

  /// Throws IoError naming the file and a remedy for what is no such array, and where the file has other bytes than its
  /// header says.
  explicit NpyFile(const std::string& path);

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
  std::span<const std::byte> row(std::uint64_t index) const;

  RandomAccessFile file_;
  Type type_ = Type::kF32;
  std::vector<std::int64_t> shape_;
  std::size_t row_elements_ = 1, row_bytes_ = 0;
  std::uint64_t begin_ = 0;  // of the data
};

/// npy:X.npy,Y.npy: a sample and its target for each row of the two. X is (N, F), (N, H, W), which are images of one
/// channel, or (N, H, W, C), with the setting --channels first (N, C, H, W); bytes are divided by 255. Y of integers
/// are classes, of other numbers are targets that are numbers, (N) or (N, …). Rows that is_held_out() are for
/// validation.
DataSplits open_npy(const std::string& argument, const OpenOptions& options);

}  // namespace lockstep::data
