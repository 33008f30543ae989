// Tables as text: fields with commas or tabs between them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep::data {

/// Reads the rows of a table (RFC 4180): fields are separated by `separator` and may stand in double quotes, within
/// which "" is one quote, and separators and ends of lines are text. Without `quotes` a quote is a character like
/// others. Lines end with LF or CRLF; the last may lack it. Empty lines are none.
class CsvReader {
 public:
  /// `text` must outlive it; `source` is for errors.
  CsvReader(std::string_view text, char separator, std::string source, bool quotes = true);

  /// The next row; false: there is none. Throws IoError naming source and line for a quote that is not closed, and for
  /// text beside a quoted field.
  bool next(std::vector<std::string>& fields);
  /// Where the row of the last next() begins, from 1.
  std::int64_t line() const { return line_; }
  /// Rows so far that have ends of lines in quotes, and the first and the last line of the longest.
  std::int64_t long_rows() const { return long_rows_; }
  std::pair<std::int64_t, std::int64_t> longest_row() const { return longest_row_; }

 private:
  std::string field();

  std::string_view rest_;
  char separator_;
  std::string source_;
  bool quotes_;
  std::int64_t line_ = 0, next_line_ = 1;
  std::int64_t long_rows_ = 0;
  std::pair<std::int64_t, std::int64_t> longest_row_ = {0, 0};
};

}  // namespace lockstep::data
