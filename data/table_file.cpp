#include "data/table_file.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "data/basic_tokenizer.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

// ".tsv" of "DIR/T.TSV.gz".
std::string table_suffix(const std::string& path) {
  fs::path name = fs::path(path).filename();
  if (lower_case(name.extension().string()) == ".gz") name = name.stem();
  return lower_case(name.extension().string());
}

bool is_in_quotes(std::string_view field) { return field.size() >= 2 && field.front() == '"' && field.back() == '"'; }

}  // namespace

CsvReader::CsvReader(std::string_view text, char separator, std::string source, bool quotes)
    : rest_(text), separator_(separator), source_(std::move(source)), quotes_(quotes) {}

// Takes the text of a field, up to its separator or the end of its line.
void CsvReader::take_field(std::string& text) {
  if (!quotes_ || !rest_.starts_with('"')) {
    const char ends[] = {separator_, '\n'};
    const std::size_t length = std::min(rest_.find_first_of({ends, 2}), rest_.size());
    text.assign(rest_.substr(0, length));
    rest_.remove_prefix(length);
    if (text.ends_with('\r') && (rest_.empty() || rest_.front() == '\n')) text.pop_back();
    return;
  }
  text.clear();
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
}

bool CsvReader::next(std::vector<std::string>& fields) {
  while (true) {
    if (rest_.empty()) return false;
    line_ = next_line_;
    const bool quoted = quotes_ && rest_.front() == '"';  // an empty field in quotes is no empty line
    std::size_t count = 0;
    while (true) {
      if (count == fields.size()) fields.emplace_back();  // the others' memory is used again
      take_field(fields[count++]);
      if (rest_.empty() || rest_.front() == '\n') break;
      rest_.remove_prefix(1);
    }
    fields.resize(count);
    if (!rest_.empty()) rest_.remove_prefix(1);
    if (next_line_ > line_) {
      ++long_rows_;
      if (next_line_ - line_ > longest_row_.second - longest_row_.first) longest_row_ = {line_, next_line_};
    }
    ++next_line_;
    if (fields.size() > 1 || quoted || !fields[0].empty()) return true;
  }
}

std::string csv_row(std::span<const std::string> fields, char separator) {
  const char special[] = {separator, '"', '\n', '\r'};
  std::string row;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (i > 0) row += separator;
    if (fields[i].find_first_of({special, sizeof special}) == std::string::npos) {
      row += fields[i];
      continue;
    }
    row += '"';
    for (const char c : fields[i]) row.append(c == '"' ? 2 : 1, c);
    row += '"';
  }
  return row;
}

bool is_table(const std::string& path) {
  const std::string suffix = table_suffix(path);
  return suffix == ".csv" || suffix == ".tsv";
}

std::string table_beside(const std::string& path, std::span<const char* const> parts) {
  const fs::path given(path);
  std::error_code error;
  const std::string name = given.filename().string();
  if (given.stem() != "train" && !(name.starts_with("train.") && given.stem().stem() == "train" && is_table(path)))
    return {};
  for (const char* part : parts) {
    const fs::path other = fs::path(given).replace_filename(part + name.substr(5));
    if (fs::exists(other, error)) return other.string();
  }
  return {};
}

TablesBeside tables_beside(const std::string& path, bool wants_test) {
  TablesBeside beside{.validation = table_beside(path, kValidationParts), .test = table_beside(path, kTestParts)};
  if (beside.test.empty()) return beside;
  beside.test_validates = wants_test && beside.test == beside.validation;
  if (!wants_test && beside.test != beside.validation)
    log_info("{} is left untouched: lockstep eval --split test measures it", printable(beside.test));
  if (!wants_test || beside.test_validates) beside.test.clear();
  return beside;
}

std::string shown_name(const std::string& name) {
  return name.empty() ? "''" : fmt::format("'{}'", printable(utf8_prefix(name, 40)));
}

std::string shown_names(std::span<const std::string> names, const char* before_last) {
  constexpr std::size_t kMost = 10;
  std::vector<std::string> all;
  for (const auto& name : names.first(std::min(names.size(), kMost))) all.push_back(shown_name(name));
  if (names.size() > kMost) all.push_back(fmt::format("{} more", names.size() - kMost));
  return listed(all, before_last);
}

SettingSpec quotes_setting() {
  return {.name = kQuotes,
          .fallback = "",
          .help = "fields may stand in double quotes",
          .placeholder = "yes|no",
          .default_text = "yes, of .tsv files no",
          .choices = {"yes", "no"}};
}

std::optional<bool> quotes_of(const Settings& settings) {
  const std::string& quotes = settings.word(kQuotes);
  return quotes.empty() ? std::nullopt : std::optional(quotes == "yes");
}

namespace {

char separator_of(const std::string& path, std::string_view text, bool finds) {
  if (table_suffix(path) == ".tsv") return '\t';
  const std::string_view first = text.substr(0, text.find('\n'));
  if (!finds || first.find(',') != std::string_view::npos) return ',';
  for (const char other : {';', '\t'})
    if (first.find(other) != std::string_view::npos) return other;
  return ',';
}

}  // namespace

TableFile::TableFile(const std::string& path, std::optional<bool> quotes, bool finds_separator)
    : TableFile(std::make_unique<const TextFile>(path), path, quotes, finds_separator) {}

TableFile::TableFile(std::unique_ptr<const TextFile> text, const std::string& path, std::optional<bool> quotes,
                     bool finds_separator)
    : file_(std::move(text)),
      source_(printable(path)),
      separator_(separator_of(path, file_->text(), finds_separator)),
      quotes_(quotes.value_or(table_suffix(path) != ".tsv")),
      reader_(file_->text(), separator_, source_, quotes_) {
  if (file_->text().find('\n') == std::string_view::npos && file_->text().find('\r') != std::string_view::npos)
    throw IoError(source_ + ": its lines end with CR alone", convert_with("tr '\\r' '\\n'", path, "lf"));
  if (!reader_.next(names_)) throw IoError(source_ + ": it is empty", "let the first line name the columns");
  if (!quotes_ && std::ranges::any_of(names_, is_in_quotes))
    throw IoError(fmt::format("{}: its first line has names in double quotes, and {}", source_,
                              !quotes ? "fields of .tsv files are taken as they are" : "fields are taken as they are"),
                  "give --quotes yes: quotes are then no part of a field");
  for (auto& name : names_) {
    check_utf8(name, source_ + ", line 1");
    name = trim(name);
  }
}

bool TableFile::next(std::vector<std::string>& fields) {
  if (!reader_.next(fields)) {
    if (in_quotes_ > 0)
      log_warn(
          "{}: {} of {} rows have a field in double quotes, and the quotes are read as part of it; with --quotes yes "
          "they are not",
          source_, in_quotes_, rows_);
    in_quotes_ = 0;
    return false;
  }
  if (fields.size() != names_.size())
    throw IoError(fmt::format("{}: line {} has {} fields, and the first line {}", source_, reader_.line(),
                              fields.size(), names_.size()),
                  quotes_ ? "write fields that have commas or ends of lines in double quotes; tabs separate in .tsv "
                            "files"
                          : "write no tab within a field; where fields with tabs or ends of lines stand in double "
                            "quotes, give --quotes yes");
  ++rows_;
  if (!quotes_ && std::ranges::any_of(fields, is_in_quotes)) ++in_quotes_;
  return true;
}

std::string TableFile::place() const { return fmt::format("{}, line {}", source_, reader_.line()); }

void TableFile::rewind() {
  reader_ = CsvReader(file_->text(), separator_, source_, quotes_);
  std::vector<std::string> first_line;
  reader_.next(first_line);
  rows_ = in_quotes_ = 0;
}

}  // namespace lockstep::data
