// Tables as text: fields with commas or tabs between them, and a first line that names the columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/text_file.h"
#include "lockstep/base/settings.h"

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
  void take_field(std::string& field);

  std::string_view rest_;
  char separator_;
  std::string source_;
  bool quotes_;
  std::int64_t line_ = 0, next_line_ = 1;
  std::int64_t long_rows_ = 0;
  std::pair<std::int64_t, std::int64_t> longest_row_ = {0, 0};
};

/// A row as CsvReader reads it, without its end: in quotes are fields that have to be.
std::string csv_row(std::span<const std::string> fields, char separator = ',');

/// Whether the name is that of a table: .csv or .tsv, in any case, also with .gz after it.
bool is_table(const std::string& path);

/// "DIR/val.csv" where `path` is "DIR/train.csv", `parts` has "val", and it is there; otherwise nothing. Likewise with
/// .gz after both.
std::string table_beside(const std::string& path, std::span<const char* const> parts);
inline constexpr const char* kValidationParts[] = {"val", "dev", "test"};
inline constexpr const char* kTestParts[] = {"test"};

/// What is read beside "DIR/train.csv", where it is there.
struct TablesBeside {
  std::string validation;       // val, dev or test
  std::string test;             // where it is wanted, and does not validate
  bool test_validates = false;  // and is wanted as the test part, too
};
/// A line says which test part is left untouched.
TablesBeside tables_beside(const std::string& path, bool wants_test);

/// As people count: 2 before 10 where `parse` makes numbers of all; "" is first then.
template <class Number>
std::vector<std::string> in_counting_order(const std::set<std::string>& words,
                                           std::optional<Number> (*parse)(std::string_view)) {
  std::vector<std::string> all(words.begin(), words.end());
  if (std::ranges::all_of(all, [&](const auto& word) { return word.empty() || parse(word).has_value(); }))
    std::ranges::stable_sort(
        all, {}, [&](const auto& word) { return parse(word).value_or(std::numeric_limits<Number>::lowest()); });
  return all;
}

/// "'a', 'b' and 3 more".
std::string shown_names(std::span<const std::string> names, const char* before_last = "and");
std::string shown_name(const std::string& name);

/// --quotes, of all tables.
inline constexpr const char* kQuotes = "quotes";
SettingSpec quotes_setting();
std::optional<bool> quotes_of(const Settings& settings);

/// The table in a file. Its first line names its columns.
class TableFile {
 public:
  /// Tabs are between fields where it is called .tsv, else commas; with `finds_separator` semicolons or tabs too, where
  /// its first line has those and no comma. `quotes`: whether fields may stand in double quotes; default: but in .tsv
  /// files. Throws IoError naming the file and a remedy, as TextFile does, and where it is empty.
  TableFile(const std::string& path, std::optional<bool> quotes, bool finds_separator = false);
  /// The same of a text that comes from `path`, which need not be a file.
  TableFile(std::unique_ptr<const TextFile> text, const std::string& path, std::optional<bool> quotes,
            bool finds_separator = false);

  const std::string& source() const { return source_; }
  /// Without spaces around them; UTF-8.
  const std::vector<std::string>& names() const { return names_; }
  /// The next row, of as many fields as there are names; false: there is none. Throws IoError naming file and line. At
  /// the end warns of fields that are in quotes where these are taken as they are.
  bool next(std::vector<std::string>& fields);
  /// "t.csv, line 3": of the last row.
  std::string place() const;
  void rewind();

  char separator() const { return separator_; }
  const CsvReader& reader() const { return reader_; }

 private:
  std::unique_ptr<const TextFile> file_;
  std::string source_;
  char separator_;
  bool quotes_;
  CsvReader reader_;
  std::vector<std::string> names_;
  std::size_t rows_ = 0, in_quotes_ = 0;
};

}  // namespace lockstep::data
