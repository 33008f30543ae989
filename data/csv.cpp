// csv:FILE: a table with a class for each text.
#include "data/csv.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/labelled_texts.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

namespace fs = std::filesystem;

CsvReader::CsvReader(std::string_view text, char separator, std::string source)
    : rest_(text), separator_(separator), source_(std::move(source)) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // spreadsheets put it first
  if (rest_.starts_with(kByteOrderMark)) rest_.remove_prefix(kByteOrderMark.size());
}

// Takes the text of a field, up to its separator or the end of its line.
std::string CsvReader::field() {
  std::string text;
  if (!rest_.starts_with('"')) {
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
                    "write a quote within a quoted field twice, or close the field");
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
                  "write a quote within a quoted field twice");
  return text;
}

bool CsvReader::next(std::vector<std::string>& fields) {
  while (true) {
    if (rest_.empty()) return false;
    line_ = next_line_;
    fields.clear();
    while (true) {
      fields.push_back(field());
      if (rest_.empty() || rest_.front() == '\n') break;
      rest_.remove_prefix(1);
    }
    if (!rest_.empty()) rest_.remove_prefix(1);
    ++next_line_;
    if (fields.size() > 1 || !fields[0].empty()) return true;
  }
}

namespace {

constexpr const char* kLabel = "label";

struct Columns {
  std::vector<std::string> names;
  std::size_t label = 0;
  std::vector<std::size_t> texts;  // one or two
};

Columns columns_of(std::vector<std::string> names, const std::string& source) {
  Columns columns;
  std::vector<std::string> shown;
  for (std::size_t i = 0; i < names.size(); ++i) {
    names[i] = trim(names[i]);
    shown.push_back(printable(utf8_prefix(names[i], 40)));
    if (names[i] == kLabel)
      columns.label = i;
    else
      columns.texts.push_back(i);
  }
  if (std::ranges::count(names, kLabel) != 1)
    throw IoError(fmt::format("{}: its first line names no column '{}', or several: {}", source, kLabel,
                              utf8_prefix(join(shown, ", "), 200)),
                  "let the first line name the columns: 'label' is the class, and the others, one or two, are texts");
  if (columns.texts.empty() || columns.texts.size() > 2)
    throw IoError(fmt::format("{}: it has {} columns beside '{}'", source, columns.texts.size(), kLabel),
                  "keep one column of texts, or two whose texts are compared");
  columns.names = std::move(names);
  return columns;
}

struct Table {
  Columns columns;
  std::vector<TextRow> rows;
  std::vector<std::string> labels;  // of the rows
};

Table read_table(const std::string& path) {
  const MappedFile file(path);
  const std::string source = printable(path);
  CsvReader reader(file.text(), path.ends_with(".tsv") ? '\t' : ',', source);
  std::vector<std::string> fields;
  if (!reader.next(fields)) throw IoError(source + ": it is empty", "let the first line name the columns");
  Table table = {.columns = columns_of(fields, source), .rows = {}, .labels = {}};
  while (reader.next(fields)) {
    if (fields.size() != table.columns.names.size())
      throw IoError(fmt::format("{}: line {} has {} fields, and the first line {}", source, reader.line(),
                                fields.size(), table.columns.names.size()),
                    "write fields that have commas or ends of lines in double quotes; tabs separate in .tsv files");
    const auto& texts = table.columns.texts;
    table.labels.emplace_back(trim(fields[table.columns.label]));
    if (table.labels.back().empty())
      throw IoError(fmt::format("{}: line {} has no class", source, reader.line()), "give each line one");
    table.rows.push_back({.first = std::move(fields[texts[0]]),
                          .second = texts.size() > 1 ? std::move(fields[texts[1]]) : std::string(),
                          .label = 0,
                          .source = fmt::format("{}, line {}", source, reader.line())});
  }
  return table;
}

// As people count: 2 before 10 where all are numbers.
std::vector<std::string> classes_of(const Table& table) {
  std::vector<std::string> classes(table.labels);
  std::ranges::sort(classes);
  const auto same = std::ranges::unique(classes);
  classes.erase(same.begin(), same.end());
  if (std::ranges::all_of(classes, [](const auto& name) { return parse_int(name).has_value(); }))
    std::ranges::sort(classes, {}, [](const auto& name) { return *parse_int(name); });
  return classes;
}

void number_labels(Table& table, const std::vector<std::string>& classes, const std::string& trained_on) {
  std::map<std::string, std::int32_t> numbers;
  for (const auto& name : classes) numbers.emplace(name, static_cast<std::int32_t>(numbers.size()));
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    const auto found = numbers.find(table.labels[i]);
    if (found == numbers.end())
      throw IoError(fmt::format("{}: no text of {} has the class '{}'", table.rows[i].source, trained_on,
                                printable(utf8_prefix(table.labels[i], 40))),
                    "both files have the same classes");
    table.rows[i].label = found->second;
  }
}

// "DIR/val.csv" where `path` is "DIR/train.csv" and that is there; otherwise nothing.
std::string validation_of(const std::string& path) {
  const fs::path given(path);
  std::error_code error;
  if (given.stem() != "train") return {};
  for (const char* name : {"val", "dev", "test"}) {
    const fs::path other = fs::path(given).replace_filename(name + given.extension().string());
    if (fs::exists(other, error)) return other.string();
  }
  return {};
}

DataSplits open_csv(const std::string& path, const OpenOptions& options) {
  Table table = read_table(path);
  TextRows rows = {.name = "csv " + printable(path),
                   .classes = classes_of(table),
                   .pairs = table.columns.texts.size() > 1,
                   .train = {},
                   .validation = {}};
  number_labels(table, rows.classes, printable(path));
  rows.train = std::move(table.rows);
  if (const std::string beside = validation_of(path); !beside.empty()) {
    Table other = read_table(beside);
    if (other.columns.names != table.columns.names)
      throw IoError(fmt::format("{} has other columns than {}", printable(beside), printable(path)),
                    "let both have the same first line");
    number_labels(other, rows.classes, printable(path));
    rows.validation = std::move(other.rows);
  } else {
    hold_out(rows);
  }
  return open_labelled_texts(std::move(rows), options);
}

}  // namespace

const DatasetFamily& csv_family() {
  static const DatasetFamily family = {.name = "csv",
                                       .argument = "FILE",
                                       .about = "texts with a class each",
                                       .remedy = "a table with a column 'label', .csv or .tsv",
                                       .has_tokens = true,
                                       .open = [](const std::string&, const std::string& path,
                                                  const OpenOptions& options) { return open_csv(path, options); },
                                       .files = [](const std::string& path) -> std::vector<std::string> {
                                         const std::string beside = validation_of(path);
                                         return beside.empty() ? std::vector{path} : std::vector{path, beside};
                                       }};
  return family;
}

}  // namespace lockstep::data
