// Tables of numbers and categories: what their columns are, and how fields become a model's inputs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/table_file.h"
#include "lockstep/base/settings.h"

namespace lockstep::data {

/// How the fields of a column become numbers.
struct TableColumn {
  std::string name;
  bool categorical = false;
  /// Of numbers: x becomes (x − mean) / deviation, and a missing one 0.
  double mean = 0, deviation = 1;
  /// Of a category: categories[i] has the code i + 1, all others, which training has not seen, 0. A missing field is
  /// the category "", where there is one. Of the target: the classes, whose codes begin with 0.
  std::vector<std::string> categories = {};

  /// Of numbers: between what a table has and what a model sees.
  double standardised(double number) const { return (number - mean) / deviation; }
  double number_of(double standardised) const { return mean + deviation * standardised; }

  bool operator==(const TableColumn&) const = default;
};

/// What a model knows of the tables that it takes. Weights files have it.
struct TableSchema {
  std::vector<TableColumn> columns;  // that are read
  TableColumn target;

  /// How many columns are numbers.
  std::int64_t numbers() const;
  /// Of each categorical column: how many codes.
  std::vector<std::int64_t> categories() const;
  bool predicts_classes() const { return target.categorical; }
  /// Of all of it.
  std::string sha256() const;
  bool operator==(const TableSchema&) const = default;
};

/// Fields of tables with these columns, whatever their order, as inputs: one thread at a time.
class TableEncoder {
 public:
  /// `schema` must outlive it.
  explicit TableEncoder(const TableSchema& schema);

  /// The following rows are `file`'s, which must be there as long as they are read. It has all columns, and the target
  /// where that `is_wanted`. Throws IoError naming those that it lacks, or that two columns have.
  void begin(const TableFile& file, bool target_is_wanted);
  /// Columns of the table that are not read.
  std::vector<std::string> unread() const;

  /// `numbers` (schema.numbers()) and `codes` (categorical columns): a column's codes follow those of the columns
  /// before it. Throws IoError for what is no number in a column of numbers.
  void encode(std::span<const std::string> fields, std::span<float> numbers, std::span<std::int32_t> codes);
  /// The class, or standardised number, of a row. Throws IoError where it has none, or one that is not known.
  std::int32_t label(std::span<const std::string> fields) const;
  float number(std::span<const std::string> fields) const;

  /// By column of the schema: how many fields so far were categories that training has not seen.
  const std::vector<std::uint64_t>& unseen() const { return unseen_; }

 private:
  struct Reading {
    std::size_t field = 0;
    std::int32_t first_code = 0;
    std::unordered_map<std::string, std::int32_t> codes = {};
  };

  const TableSchema& schema_;
  const TableFile* file_ = nullptr;
  std::vector<Reading> columns_;
  Reading target_;
  bool has_target_ = false;
  std::vector<std::uint64_t> unseen_;
};

/// What tables write where a value is missing: nothing, NA, N/A, nan, null, none, <NA>, NaT or ?, in any case.
bool is_missing(std::string_view field);

inline constexpr const char *kTarget = "target", *kIgnore = "ignore", *kNumeric = "numeric",
                            *kCategorical = "categorical";

struct FoundSchema {
  TableSchema schema;
  std::string summary;  // "the target 'y' is a number, 2 columns of numbers: 'a' (3 missing) and 'b', …"
};
/// Finds out what the columns of a table are, of which `files` are parts, with the settings above: one whose fields are
/// all numbers, or missing, is numeric, others are categories; settings overrule that. A target with only two
/// different values is a class. `holds_out`: rows that is_held_out() count neither in statistics nor as categories.
/// Warns of columns that are probably not meant so. Reads all rows, once or twice. Throws IoError naming file, line and
/// remedy, UsageError for settings.
FoundSchema find_schema(std::span<const std::unique_ptr<TableFile>> files, const Settings& settings, bool holds_out);

}  // namespace lockstep::data
