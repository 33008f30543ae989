// csv:FILE: a table with a class for each text.
#include <map>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/labelled_texts.h"
#include "data/table_file.h"
#include "data/text_table.h"
#include "lockstep/data/families.h"

namespace lockstep::data {

namespace {

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

DataSplits open_csv(const std::string& path, const OpenOptions& options) {
  const TextTableOptions columns = text_table_options(options.settings);
  TextTable table = read_text_table(path, columns);
  log_info("csv {}", table.summary);
  const auto& known = options.parts.class_names;
  TextRows rows = {
      .name = "csv " + printable(path),
      .classes = known.empty() ? in_counting_order({table.labels.begin(), table.labels.end()}, parse_int) : known,
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
  const TablesBeside beside = tables_beside(path, options.parts.test);
  if (!beside.validation.empty())
    rows.validation = rows_of(beside.validation);
  else if (!options.parts.whole)
    hold_out(rows);
  if (!beside.test.empty()) rows.test = rows_of(beside.test);
  DataSplits splits = open_labelled_texts(std::move(rows), options);
  if (beside.test_validates) splits.test = splits.validation;
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
                                         const std::string other = table_beside(path, kValidationParts);
                                         return other.empty() ? std::vector{path} : std::vector{path, other};
                                       }};
  return family;
}

}  // namespace lockstep::data
