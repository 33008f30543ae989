// Tables with columns of texts and, where they are for training or evaluation, of a class.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/labelled_texts.h"
#include "lockstep/base/settings.h"

namespace lockstep::data {

struct TextTableOptions {
  std::string texts = {};           // "COLUMN" or "COLUMN,COLUMN"; empty: all but the class, if they are one or two
  std::string label = {};           // the class's column; empty: kLabelColumn
  std::optional<bool> quotes = {};  // whether fields may stand in double quotes; default: but in .tsv files
  bool classes = true;              // each row has one; else the class's column is not read
};
inline constexpr const char* kLabelColumn = "label";

struct TextTable {
  std::vector<std::string> names;   // of all columns
  std::vector<std::string> texts;   // of those that are texts: one, or two, of which rows are pairs
  std::vector<TextRow> rows;        // without their classes' numbers
  std::vector<std::string> labels;  // the rows' classes, by name
  std::string summary;              // "csv t.csv: 60 rows, the class in 'label', the text in 'review', not read: 'id'"
};

/// Reads the table `path`: with tabs between fields where it is called .tsv, else commas; a TextFile. Its first line
/// names its columns. Throws IoError naming the file, the line and a remedy; also for columns that are taken without
/// having been asked for by name (`texts`) and have no name, or no words in any row.
TextTable read_text_table(const std::string& path, const TextTableOptions& options);

/// --text, --quotes and, where rows have `classes`, --label.
std::vector<SettingSpec> text_table_settings(bool classes = true);
/// Of those settings, all of which are there.
TextTableOptions text_table_options(const Settings& settings);

}  // namespace lockstep::data
