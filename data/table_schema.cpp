#include "data/table_schema.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "data/basic_tokenizer.h"
#include "data/file_list.h"

namespace lockstep::data {
namespace {

constexpr std::size_t kMostCodes = std::size_t{1} << 24;
constexpr double kMostDeviations = 1e15;  // whose squares f32 still has
constexpr std::size_t kTwoWords = 2;      // that make a target of numbers a class
constexpr std::size_t kFewWords = 20;     // that might be meant as classes

/// NaN: it is missing. Nothing: it is no number.
std::optional<double> number_of(std::string_view field) {
  if (const auto number = parse_double(field); number && std::isfinite(*number)) return number;
  if (is_missing(field)) return std::nan("");
  return std::nullopt;
}

[[noreturn]] void refuse_twin(const std::string& source, const std::string& name) {
  throw IoError(fmt::format("{}: its first line names more than one column {}", source, shown_name(name)),
                "give each column a name of its own");
}

/// "0.5" of "0,5".
std::string with_point(std::string word) {
  std::ranges::replace(word, ',', '.');
  return word;
}

std::string word_of(std::string_view field) { return is_missing(field) ? std::string() : std::string(trim(field)); }

}  // namespace

bool is_missing(std::string_view field) {
  static constexpr std::array<std::string_view, 8> kMissing = {"", "na", "n/a", "nan", "null", "none", "<na>", "nat"};
  field = trim(field);
  if (field.size() > 4) return false;
  return field == "?" || std::ranges::find(kMissing, lower_case(std::string(field))) != kMissing.end();
}

std::int64_t TableSchema::numbers() const { return std::ranges::count(columns, false, &TableColumn::categorical); }

std::vector<std::int64_t> TableSchema::categories() const {
  std::vector<std::int64_t> counts;
  for (const TableColumn& column : columns)
    if (column.categorical) counts.push_back(std::ssize(column.categories) + 1);
  return counts;
}

std::string TableSchema::sha256() const {
  Sha256 hash;
  const auto add = [&](const TableColumn& column) {
    std::string text = fmt::format("{}\n{} {} {}\n", column.name, column.categorical, column.mean, column.deviation);
    for (const std::string& category : column.categories) text += fmt::format("{} {}", category.size(), category);
    hash.update(text);
  };
  for (const TableColumn& column : columns) add(column);
  add(target);
  return hash.finish();
}

TableEncoder::TableEncoder(const TableSchema& schema) : schema_(schema), unseen_(schema.columns.size()) {
  const auto numbered = [](const TableColumn& column, std::int32_t first) {
    Reading reading{.first_code = first};
    for (const std::string& category : column.categories)
      reading.codes.emplace(category, static_cast<std::int32_t>(reading.codes.size()));
    return reading;
  };
  std::int32_t next = 0;
  for (const TableColumn& column : schema_.columns) {
    columns_.push_back(numbered(column, next));
    if (column.categorical) next += static_cast<std::int32_t>(column.categories.size()) + 1;
  }
  target_ = numbered(schema_.target, 0);
}

void TableEncoder::begin(const TableFile& file, bool target_is_wanted) {
  file_ = &file;
  const auto& names = file.names();
  std::vector<std::string> lacking;
  const auto find = [&](const TableColumn& column, Reading& reading) {
    const auto count = std::ranges::count(names, column.name);
    if (count > 1) refuse_twin(file.source(), column.name);
    if (count == 0) return lacking.push_back(column.name);
    reading.field = static_cast<std::size_t>(std::ranges::find(names, column.name) - names.begin());
  };
  for (std::size_t i = 0; i < columns_.size(); ++i) find(schema_.columns[i], columns_[i]);
  has_target_ = target_is_wanted;
  if (target_is_wanted) find(schema_.target, target_);
  if (!lacking.empty())
    throw IoError(fmt::format("{}: it lacks the column{} {}, which the model was trained with; it has {}",
                              file.source(), lacking.size() == 1 ? "" : "s", shown_names(lacking), shown_names(names)),
                  "add them; a field may be empty where the value is not known");
}

std::vector<std::string> TableEncoder::unread() const {
  std::vector<std::string> all;
  const auto& names = file_->names();
  for (std::size_t i = 0; i < names.size(); ++i)
    if (!(has_target_ && target_.field == i) && std::ranges::find(columns_, i, &Reading::field) == columns_.end())
      all.push_back(names[i]);
  return all;
}

void TableEncoder::encode(std::span<const std::string> fields, std::span<float> numbers,
                          std::span<std::int32_t> codes) {
  std::size_t number = 0, code = 0;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const TableColumn& column = schema_.columns[i];
    const Reading& reading = columns_[i];
    const std::string& field = fields[reading.field];
    if (column.categorical) {
      const auto found = reading.codes.find(word_of(field));
      if (found == reading.codes.end()) ++unseen_[i];
      codes[code++] = reading.first_code + (found == reading.codes.end() ? 0 : found->second + 1);
      continue;
    }
    const auto value = number_of(field);
    if (!value)
      throw IoError(fmt::format("{}: {} is no number, as all of {} were in training", file_->place(), shown_name(field),
                                shown_name(column.name)),
                    "write a number, or nothing where it is not known");
    const double standardised = std::isnan(*value) ? 0.0 : column.standardised(*value);
    if (std::abs(standardised) > kMostDeviations)
      throw IoError(fmt::format("{}: {} is {:.0e} standard deviations from the mean of {} in training", file_->place(),
                                shown_name(field), std::abs(standardised), shown_name(column.name)),
                    "check its unit, or leave the field empty");
    numbers[number++] = static_cast<float>(standardised);
  }
}

std::int32_t TableEncoder::label(std::span<const std::string> fields) const {
  const std::string word(trim(fields[target_.field]));
  const auto found = target_.codes.find(word);
  if (found == target_.codes.end()) {
    if (is_missing(word))
      throw IoError(fmt::format("{}: it has no {}, the target", file_->place(), shown_name(schema_.target.name)),
                    "give each row one, or take the row out");
    refuse_class(file_->place(), word, schema_.target.categories);
  }
  return found->second;
}

float TableEncoder::number(std::span<const std::string> fields) const {
  const std::string& field = fields[target_.field];
  const auto value = number_of(field);
  if (!value || std::isnan(*value))
    throw IoError(fmt::format("{}: {} is no number for the target {}", file_->place(), shown_name(field),
                              shown_name(schema_.target.name)),
                  "give each row one, or take the row out");
  return static_cast<float>(schema_.target.standardised(*value));
}

namespace {

/// --numeric A,B: columns by name, of which one may have commas itself.
std::vector<std::string> columns_named(const Settings& settings, const char* flag,
                                       const std::vector<std::string>& names) {
  const std::string& given = settings.word(flag);
  if (given.empty()) return {};
  if (std::ranges::find(names, given) != names.end()) return {given};
  std::vector<std::string> all;
  for (const auto& part : split(given, ',')) {
    const std::string name(trim(part));
    if (std::ranges::find(names, name) == names.end()) {
      const auto near = nearest(name, names);
      throw UsageError(
          fmt::format("--{} {}: the table has no column {}, but {}", flag, given, shown_name(name), shown_names(names)),
          near ? fmt::format("did you mean {}?", shown_name(*near)) : "give names as the first line has them");
    }
    all.push_back(name);
  }
  return all;
}

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

/// What is seen of a column while rows are read.
struct Profile {
  std::string name;
  bool is_target = false;
  bool said = false;  // its kind, by a setting
  bool categorical = false;
  std::string first_word = {}, place = {};  // what made it a category, and where that is
  std::uint64_t rows = 0, missing = 0, numbers = 0;
  double mean = 0, squares = 0;      // of the training part (Welford, 1962)
  std::set<std::string> words = {};  // categories of the training part, and all classes of the target
  std::set<std::string> few = {};    // words of a target of numbers, up to kFewWords + 1

  void add_number(double value) {
    ++numbers;
    const double delta = value - mean;
    mean += delta / static_cast<double>(numbers);
    squares += delta * (value - mean);
  }
};

/// Finds out what the columns of a table are.
class SchemaReader {
 public:
  SchemaReader(std::span<const std::unique_ptr<TableFile>> files, const Settings& settings, bool holds_out)
      : files_(files), holds_out_(holds_out) {
    const auto& names = files_[0]->names();
    check_names(names);
    const std::string target = target_of(settings, names);
    const auto ignored = columns_named(settings, kIgnore, names), numeric = columns_named(settings, kNumeric, names),
               categorical = columns_named(settings, kCategorical, names);
    for (const auto& name : numeric)
      if (has(categorical, name)) refuse_both(name, kNumeric, kCategorical);
    for (const auto& name : ignored) {
      if (has(numeric, name)) refuse_both(name, kIgnore, kNumeric);
      if (has(categorical, name)) refuse_both(name, kIgnore, kCategorical);
      if (name == target) refuse_both(name, kIgnore, kTarget);
    }
    for (const auto& name : names) {
      if (name.empty() || has(ignored, name)) continue;
      profiles_.push_back({.name = name,
                           .is_target = name == target,
                           .said = has(numeric, name) || has(categorical, name),
                           .categorical = has(categorical, name)});
    }
    if (profiles_.size() < 2)
      throw IoError(fmt::format("{}: it has no column beside {}", files_[0]->source(), shown_name(target)),
                    "add columns to predict it from");
  }

  TableSchema read() {
    while (pass()) {
    }
    TableSchema schema;
    std::size_t codes = 0;
    for (Profile& profile : profiles_) {
      TableColumn column = column_of(profile, files_[0]->source());
      if (profile.is_target) {
        check_classes(profile);
        schema.target = std::move(column);
        continue;
      }
      if (profile.missing == profile.rows) {
        log_warn("{}: the column {} is empty, and not read", files_[0]->source(), shown_name(profile.name));
        continue;
      }
      warn_of(profile, column);
      codes += column.categorical ? column.categories.size() + 1 : 0;
      schema.columns.push_back(std::move(column));
    }
    if (codes > kMostCodes)
      throw IoError(fmt::format("{}: its columns have {} categories together", files_[0]->source(), codes),
                    "leave columns out that name rows: --ignore COLUMN");
    if (schema.columns.empty())
      throw IoError(
          fmt::format("{}: all columns beside {} are empty", files_[0]->source(), shown_name(schema.target.name)),
          "add columns to predict it from");
    return schema;
  }

  /// ", the target 'y' a number, 3 columns of numbers, …"
  std::string summary(const TableSchema& schema) const {
    const auto& target = *std::ranges::find(profiles_, true, &Profile::is_target);
    std::string text = fmt::format("the target {} is ", shown_name(target.name));
    text += schema.predicts_classes() ? fmt::format("one of {} classes", schema.target.categories.size())
                                      : std::string("a number");
    if (!schema.predicts_classes() && !target.said && target.few.size() <= kFewWords)
      text +=
          fmt::format(" of {} values (--{} {} takes them as classes)", target.few.size(), kCategorical, target.name);
    std::vector<std::string> numbers, categories;
    for (const TableColumn& column : schema.columns) {
      const auto& profile = *std::ranges::find(profiles_, column.name, &Profile::name);
      if (column.categorical)
        categories.push_back(fmt::format("{} ({})", shown_name(column.name), column.categories.size()));
      else
        numbers.push_back(shown_name(column.name) +
                          (profile.missing > 0 ? fmt::format(" ({} missing)", profile.missing) : std::string()));
    }
    const auto add = [&](std::vector<std::string>& names, const char* what) {
      constexpr std::size_t kMost = 10;
      if (names.empty()) return;
      text += fmt::format(", {} column{} of {}: ", names.size(), names.size() == 1 ? "" : "s", what);
      if (names.size() > kMost) {
        const std::size_t more = names.size() - kMost;
        names.resize(kMost);
        names.push_back(fmt::format("{} more", more));
      }
      text += listed(names);
    };
    add(numbers, "numbers");
    add(categories, "categories");
    return text;
  }

 private:
  void check_names(const std::vector<std::string>& names) const {
    if (std::ranges::all_of(names, [](const auto& name) { return number_of(name).has_value(); }))
      throw IoError(fmt::format("{}: its first line, which names the columns, seems to be a row: {}",
                                files_[0]->source(), shown_names(names)),
                    "put a line with names before it");
    for (const auto& name : names)
      if (!name.empty() && std::ranges::count(names, name) > 1) refuse_twin(files_[0]->source(), name);
    for (const auto& file : files_)
      if (file->names() != names)
        throw IoError(fmt::format("{} has other columns than {}", file->source(), files_[0]->source()),
                      "let all tables of a folder have the same first line");
  }

  std::string target_of(const Settings& settings, const std::vector<std::string>& names) const {
    const auto given = columns_named(settings, kTarget, names);
    if (given.size() > 1)
      throw UsageError(fmt::format("--target {} names {} columns", settings.word(kTarget), given.size()),
                       "give one; leave others out with --ignore");
    if (!given.empty()) return given[0];
    if (has(names, kTarget)) return kTarget;
    throw UsageError(fmt::format("{}: nobody says which column is to be predicted: {}", files_[0]->source(),
                                 shown_names(names, "or")),
                     "give --target COLUMN");
  }

  [[noreturn]] static void refuse_both(const std::string& name, const char* one, const char* other) {
    throw UsageError(fmt::format("--{} and --{} both name the column {}", one, other, shown_name(name)),
                     "take it out of one of them");
  }

  /// One look at all rows. True: a column turned out as categories after some of its words had gone by as numbers.
  bool pass() {
    for (Profile& profile : profiles_)
      profile = {.name = profile.name,
                 .is_target = profile.is_target,
                 .said = profile.said,
                 .categorical = profile.categorical,
                 .first_word = profile.first_word,
                 .place = profile.place};
    bool again = false;
    std::uint64_t row = 0;
    std::vector<std::string> fields;
    std::vector<std::size_t> places;
    for (const Profile& profile : profiles_)
      places.push_back(
          static_cast<std::size_t>(std::ranges::find(files_[0]->names(), profile.name) - files_[0]->names().begin()));
    for (const auto& file : files_) {
      file->rewind();
      for (; file->next(fields); ++row) {
        const bool trained_on = !holds_out_ || !is_held_out(row);
        for (std::size_t i = 0; i < profiles_.size(); ++i)
          again = look_at(profiles_[i], fields[places[i]], trained_on, *file) || again;
      }
    }
    if (row == 0) throw IoError(fmt::format("{}: it has no row", files_[0]->source()), "add rows");
    return again;
  }

  static bool look_at(Profile& profile, const std::string& field, bool trained_on, const TableFile& file) {
    ++profile.rows;
    if (is_missing(field)) {
      if (profile.is_target)
        throw IoError(fmt::format("{}: it has no {}, the target", file.place(), shown_name(profile.name)),
                      "give each row one, or take the row out");
      ++profile.missing;
      return false;
    }
    bool turned = false;
    if (!profile.categorical) {
      const auto value = number_of(field);
      if (value) {
        if (trained_on) profile.add_number(*value);
        if (profile.is_target && profile.few.size() <= kFewWords) profile.few.emplace(trim(field));
        return false;
      }
      if (profile.said)
        throw IoError(fmt::format("{}: {} is no number, and --numeric names {}", file.place(), shown_name(field),
                                  shown_name(profile.name)),
                      "write numbers there, or leave --numeric out");
      check_utf8(field, file.place());
      profile.categorical = true;
      profile.first_word = trim(field);
      profile.place = file.place();
      turned = profile.rows - profile.missing > 1;  // as a number
    }
    if (trained_on || profile.is_target) {
      if (profile.words.emplace(trim(field)).second) check_utf8(field, file.place());
    }
    return turned;
  }

  static TableColumn column_of(Profile& profile, const std::string& source) {
    TableColumn column{.name = profile.name, .categorical = profile.categorical};
    if (profile.is_target && !profile.categorical && !profile.said && profile.few.size() <= kTwoWords) {
      column.categorical = true;
      column.categories = in_counting_order(profile.few, parse_double);
    } else if (profile.categorical) {
      if (profile.missing > 0) profile.words.emplace();
      column.categories = in_counting_order(profile.words, parse_double);
    } else {
      column.mean = profile.mean;
      const double variance = profile.numbers > 0 ? profile.squares / static_cast<double>(profile.numbers) : 0;
      column.deviation = variance > 0 ? std::sqrt(variance) : 1;
      if (!std::isfinite(variance))
        throw IoError(fmt::format("{}: the numbers of {} are too large for a standard deviation", source,
                                  shown_name(profile.name)),
                      "scale them down, or leave the column out with --ignore");
    }
    return column;
  }

  /// Whether words are nearly all numbers, of which there are several.
  static bool are_mostly_numbers(const Profile& profile) {
    constexpr std::size_t kSeveral = 10;
    std::size_t numbers = 0;
    for (const auto& word : profile.words) numbers += number_of(word) && !word.empty() ? 1 : 0;
    return !profile.said && numbers * 10 >= profile.words.size() * 9 && profile.words.size() >= kSeveral;
  }

  /// One word would make classes of all numbers.
  static void check_classes(const Profile& profile) {
    if (profile.categorical && are_mostly_numbers(profile))
      throw IoError(fmt::format("{}: {} is no number, as most of the target {} are", profile.place,
                                shown_name(profile.first_word), shown_name(profile.name)),
                    fmt::format("correct it, or say --categorical {}: all of them are classes then", profile.name));
  }

  void warn_of(const Profile& profile, const TableColumn& column) const {
    constexpr std::uint64_t kEnoughRows = 50;
    const std::string& source = files_[0]->source();
    if (!column.categorical) {
      if (profile.squares == 0)
        log_warn("{}: all numbers of {} are the same: no information", source, shown_name(column.name));
      return;
    }
    const std::uint64_t values = profile.rows - profile.missing;
    if (are_mostly_numbers(profile))
      log_warn(
          "{}: {} is read as categories, for {} has {}, which is no number, where most are → correct it, or say "
          "--categorical {}",
          source, shown_name(column.name), profile.place, shown_name(profile.first_word), column.name);
    else if (!profile.said && number_of(with_point(profile.first_word)))
      log_warn("{}: {} is read as categories, for {} has {}: numbers have a decimal point", source,
               shown_name(column.name), profile.place, shown_name(profile.first_word));
    else if (!profile.said && values >= kEnoughRows && profile.words.size() > values / 2)
      log_warn("{}: {} has {} categories in {} rows: is it a name or a text? → --ignore {} leaves it out", source,
               shown_name(column.name), profile.words.size(), profile.rows, column.name);
  }

  std::span<const std::unique_ptr<TableFile>> files_;
  bool holds_out_;
  std::vector<Profile> profiles_;
};

}  // namespace

FoundSchema find_schema(std::span<const std::unique_ptr<TableFile>> files, const Settings& settings, bool holds_out) {
  SchemaReader reader(files, settings, holds_out);
  TableSchema schema = reader.read();
  std::string summary = reader.summary(schema);
  return {.schema = std::move(schema), .summary = std::move(summary)};
}

}  // namespace lockstep::data
