// csv:FILE: a table with a class for each text.
#include "data/csv.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/labelled_texts.h"
#include "data/text_table.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

namespace fs = std::filesystem;

CsvReader::CsvReader(std::string_view text, char separator, std::string source, bool quotes)
    : rest_(text), separator_(separator), source_(std::move(source)), quotes_(quotes) {}

// Takes the text of a field, up to its separator or the end of its line.
std::string CsvReader::field() {
  std::string text;
  if (!quotes_ || !rest_.starts_with('"')) {
    const std::size_t length = std::min(rest_.find_first_of(std::string{separator_, '\n'}), rest_.size());
    text = rest_.substr(0, length);
    rest_.remove_prefix(length);
    if (text.ends_with('\r') && (rest_.empty() || rest_.front() == '\n')) text.pop_back();
    return text;
  }
  rest_.remove_prefix(1);
  while (true) {
    const std::size_t quote = rest_.find('"');
    if (quote == std::string_view::npos)
      throw IoError(fmt::format("{}: the quote that opens in line {} is not closed", source_, line_),
                    "write a quote within a quoted field twice, or close the field; with --quotes no a quote is a "
                    "character like others");
    text += rest_.substr(0, quote);
    next_line_ += std::ranges::count(rest_.substr(0, quote), '\n');
    rest_.remove_prefix(quote + 1);
    if (!rest_.starts_with('"')) break;
    text += '"';
    rest_.remove_prefix(1);
  }
  if (rest_.starts_with("\r\n")) rest_.remove_prefix(1);
  if (!rest_.empty() && rest_.front() != separator_ && rest_.front() != '\n')
    throw IoError(fmt::format("{}: text follows a quoted field in line {}", source_, next_line_),
                  "write a quote within a quoted field twice; with --quotes no a quote is a character like others");
  return text;
}

bool CsvReader::next(std::vector<std::string>& fields) {
  while (true) {
    if (rest_.empty()) return false;
    line_ = next_line_;
    const bool quoted = quotes_ && rest_.front() == '"';  // an empty field in quotes is no empty line
    fields.clear();
    while (true) {
      fields.push_back(field());
      if (rest_.empty() || rest_.front() == '\n') break;
      rest_.remove_prefix(1);
    }
    if (!rest_.empty()) rest_.remove_prefix(1);
    if (next_line_ > line_) {
      ++long_rows_;
      if (next_line_ - line_ > longest_row_.second - longest_row_.first) longest_row_ = {line_, next_line_};
    }
    ++next_line_;
    if (fields.size() > 1 || quoted || !fields[0].empty()) return true;
  }
}

namespace {

// As people count: 2 before 10 where all are numbers.
std::vector<std::string> classes_of(const TextTable& table) {
  std::vector<std::string> classes(table.labels);
  std::ranges::sort(classes);
  const auto same = std::ranges::unique(classes);
  classes.erase(same.begin(), same.end());
  if (std::ranges::all_of(classes, [](const auto& name) { return parse_int(name).has_value(); }))
    std::ranges::sort(classes, {}, [](const auto& name) { return *parse_int(name); });
  return classes;
}

// `trained_on`: the file that has all classes; empty: the weights do.
void number_labels(TextTable& table, const std::vector<std::string>& classes, const std::string& trained_on) {
  std::map<std::string, std::int32_t> numbers;
  for (const auto& name : classes) numbers.emplace(name, static_cast<std::int32_t>(numbers.size()));
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    const auto found = numbers.find(table.labels[i]);
    if (found == numbers.end() && trained_on.empty()) refuse_class(table.rows[i].source, table.labels[i], classes);
    if (found == numbers.end())
      throw IoError(fmt::format("{}: no text of {} has the class '{}'", table.rows[i].source, trained_on,
                                printable(utf8_prefix(table.labels[i], 40))),
                    "both files have the same classes");
    table.rows[i].label = found->second;
  }
}

// "DIR/val.csv" where `path` is "DIR/train.csv", `names` has "val", and it is there; otherwise nothing. Likewise with
// .gz after both.
std::string beside(const std::string& path, std::initializer_list<const char*> names) {
  const fs::path given(path);
  std::error_code error;
  const std::string name = given.filename().string();
  if (given.stem() != "train" && !(name.starts_with("train.") && given.stem().stem() == "train" && is_table(path)))
    return {};
  for (const char* part : names) {
    const fs::path other = fs::path(given).replace_filename(part + name.substr(5));
    if (fs::exists(other, error)) return other.string();
  }
  return {};
}

// What is validated on beside train.csv.
std::string validation_of(const std::string& path) { return beside(path, {"val", "dev", "test"}); }

DataSplits open_csv(const std::string& path, const OpenOptions& options) {
  const TextTableOptions columns = text_table_options(options.settings);
  TextTable table = read_text_table(path, columns);
  log_info("csv {}", table.summary);
  const auto& known = options.parts.class_names;
  TextRows rows = {.name = "csv " + printable(path),
                   .classes = known.empty() ? classes_of(table) : known,
                   .pairs = table.texts.size() > 1,
                   .train = {},
                   .validation = {},
                   .reading = table.summary};
  number_labels(table, rows.classes, known.empty() ? printable(path) : "");
  rows.train = std::move(table.rows);
  const auto rows_of = [&](const std::string& file) {
    TextTable other = read_text_table(file, columns);
    log_info("csv {}", other.summary);
    if (columns.texts.empty() && other.names != table.names)
      throw IoError(fmt::format("{} has other columns than {}", printable(file), printable(path)),
                    "let both have the same first line, or say with --text which columns are texts");
    number_labels(other, rows.classes, printable(path));
    return std::move(other.rows);
  };
  const std::string validation = validation_of(path), test = beside(path, {"test"});
  if (!validation.empty())
    rows.validation = rows_of(validation);
  else if (!options.parts.whole)
    hold_out(rows);
  if (!test.empty() && test != validation) {
    if (options.parts.test)
      rows.test = rows_of(test);
    else
      log_info("{} is left untouched: lockstep eval --split test measures it", printable(test));
  }
  DataSplits splits = open_labelled_texts(std::move(rows), options);
  if (options.parts.test && !test.empty() && test == validation) splits.test = splits.validation;
  return splits;
}

}  // namespace

const DatasetFamily& csv_family() {
  static const DatasetFamily family = {.name = "csv",
                                       .argument = "FILE",
                                       .about = "texts with a class each",
                                       .remedy = "a table with a column of classes, .csv or .tsv",
                                       .settings = text_table_settings(),
                                       .has_tokens = true,
                                       .open = [](const std::string&, const std::string& path,
                                                  const OpenOptions& options) { return open_csv(path, options); },
                                       .files = [](const std::string& path) -> std::vector<std::string> {
                                         const std::string other = validation_of(path);
                                         return other.empty() ? std::vector{path} : std::vector{path, other};
                                       }};
  return family;
}

}  // namespace lockstep::data
