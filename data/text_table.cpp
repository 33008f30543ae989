#include "data/text_table.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "data/table_file.h"
#include "data/word_pieces.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

constexpr const char *kText = "text", *kLabel = "label";
constexpr std::size_t kMostTexts = 2;

// A number, a date, a price, or what tables write where there is none.
bool is_without_words(std::string_view field) {
  static constexpr std::array<std::string_view, 9> kMissing = {"na",   "n/a",   "nan",  "null", "none",
                                                               "true", "false", "<na>", "nat"};
  field = trim(field);
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<unsigned char>(c) >= 0x80;
  };
  return std::ranges::none_of(field, is_letter) || parse_double(field).has_value() ||
         std::ranges::find(kMissing, lower_case(std::string(field))) != kMissing.end();
}

// What is a text, or a number, rather than a column's name.
bool is_like_a_field(const std::string& name) {
  constexpr std::size_t kMostWords = 7;
  return words_of(name).size() > kMostWords || is_without_words(name);
}

struct Columns {
  std::vector<std::string> names;
  std::optional<std::size_t> label;
  std::vector<std::size_t> texts;  // one or two
};

// Finds out which columns are what.
class ColumnChoice {
 public:
  ColumnChoice(std::vector<std::string> names, const TextTableOptions& options, std::string source)
      : names_(std::move(names)), options_(options), source_(std::move(source)) {}

  Columns choose() const {
    Columns columns = {.names = names_, .label = find_label(), .texts = {}};
    if (options_.texts.empty())
      columns.texts = the_others(columns.label);
    else
      columns.texts = asked_for();
    for (const std::size_t i : columns.texts)
      if (columns.label && i == *columns.label)
        throw IoError(fmt::format("{}: the column {} cannot be the class and a text", source_, shown_name(names_[i])),
                      "give --text and --label different columns");
    return columns;
  }

  /// "--text a", or "--text a or --text a,b": what could be meant by the columns `which`.
  std::string how_to_choose(std::vector<std::size_t> which) const {
    static constexpr std::array<std::string_view, 3> kIndices = {"idx", "index", "id"};
    const auto is_index = [&](std::size_t i) {
      return std::ranges::find(kIndices, lower_case(names_[i])) != kIndices.end();
    };
    if (!std::ranges::all_of(which, is_index)) std::erase_if(which, is_index);
    std::vector<std::string> ways;
    const auto way = [&](const std::string& value) { return fmt::format("--text {}", shell_word(value)); };
    for (std::size_t i = 0; i < std::min<std::size_t>(which.size(), 3); ++i) ways.push_back(way(names_[which[i]]));
    if (which.size() > 1) ways.push_back(way(names_[which[0]] + "," + names_[which[1]]));
    return listed(ways, "or");
  }

 private:
  std::size_t named(const std::string& name, const char* flag) const {
    const auto count = std::ranges::count(names_, name);
    if (count == 1) return static_cast<std::size_t>(std::ranges::find(names_, name) - names_.begin());
    const auto near = nearest(name, names_);
    throw IoError(fmt::format("{}: its first line names {} column {}: {}", source_, count == 0 ? "no" : "more than one",
                              shown_name(name), shown_names(names_)),
                  count > 1 ? "give each column a name of its own"
                  : near    ? fmt::format("did you mean {} {}?", flag, shell_word(*near))
                            : fmt::format("give {} one of them, as it is written there", flag));
  }

  std::optional<std::size_t> find_label() const {
    if (!options_.label.empty()) return named(options_.label, "--label");
    const auto count = std::ranges::count(names_, kLabelColumn);
    if (count == 0 && !options_.classes) return std::nullopt;
    if (count == 1) return static_cast<std::size_t>(std::ranges::find(names_, kLabelColumn) - names_.begin());
    std::vector<std::string> ways;
    for (const auto& name : names_)
      if (!name.empty() && ways.size() < 3) ways.push_back("--label " + shell_word(name));
    const std::string only = names_.size() == 1 ? names_[0] : std::string();
    throw IoError(
        fmt::format("{}: its first line names no column '{}', or several: {}", source_, kLabelColumn,
                    shown_names(names_)),
        only.find('\t') != std::string::npos            ? "call a table with tabs between its fields .tsv"
        : only.find_first_of(";|") != std::string::npos ? "separate fields by commas, or by tabs in a .tsv file"
        : count > 1                                     ? "give each column a name of its own"
        : ways.empty()
            ? "let the first line name the columns"
            : fmt::format("say which column is the class, {}; if the first line is a row, put one with the columns' "
                          "names before it",
                          listed(ways, "or")));
  }

  std::vector<std::size_t> the_others(std::optional<std::size_t> label) const {
    std::vector<std::size_t> others, with_name;
    for (std::size_t i = 0; i < names_.size(); ++i) {
      if (i == label) continue;
      others.push_back(i);
      if (!names_[i].empty()) with_name.push_back(i);
    }
    if (with_name.empty())
      throw IoError(fmt::format("{}: it has no column for texts{}", source_,
                                label ? fmt::format(" beside {}", shown_name(names_[*label])) : std::string()),
                    "let the first line name the columns, one or two of which are texts");
    if (with_name.size() < others.size()) {
      const auto nameless = std::ranges::find(others, std::string(), [&](std::size_t i) { return names_[i]; });
      throw IoError(
          fmt::format("{}: its column {} has no name: an index, perhaps, and no text", source_, *nameless + 1),
          fmt::format("say which columns are texts: {}", how_to_choose(with_name)));
    }
    if (others.size() > kMostTexts)
      throw IoError(fmt::format("{}: it has {} columns{}, and one or two can be texts: {}", source_, others.size(),
                                label ? fmt::format(" beside {}", shown_name(names_[*label])) : std::string(),
                                shown_names(names_)),
                    fmt::format("say which are texts: {}", how_to_choose(with_name)));
    for (const std::size_t i : others) {
      if (std::ranges::count(names_, names_[i]) > 1) named(names_[i], "--text");
      if (is_like_a_field(names_[i]))
        throw IoError(
            fmt::format("{}: its first line, which names the columns, seems to be a row: {}", source_,
                        shown_name(names_[i])),
            fmt::format("put a line with names before it; if it is the column's name: {}", how_to_choose({i})));
    }
    return others;
  }

  std::vector<std::size_t> asked_for() const {
    // A column's name may have commas in it.
    if (std::ranges::count(names_, options_.texts) == 1) return {named(options_.texts, "--text")};
    std::vector<std::size_t> chosen;
    for (const auto& name : split(options_.texts, ',')) chosen.push_back(named(std::string(trim(name)), "--text"));
    if (chosen.size() > kMostTexts || (chosen.size() == 2 && chosen[0] == chosen[1]))
      throw UsageError(
          fmt::format("--text {} names {} columns", options_.texts,
                      chosen.size() > kMostTexts ? fmt::to_string(chosen.size()) : "twice the same of two"),
          "give one column of texts, or two whose texts are compared: --text A,B");
    return chosen;
  }

  std::vector<std::string> names_;
  const TextTableOptions& options_;
  std::string source_;
};

// What is seen of a text column while rows are read.
struct Seen {
  bool words = false;
  std::string example;  // of what has none
  std::size_t empty = 0;
};

// Columns that nobody has asked for by name are texts only if they look like it.
void check_words(std::span<const Seen> seen, const Columns& columns, const ColumnChoice& choice,
                 const std::string& source) {
  std::vector<std::size_t> with_words;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (seen[i].words) with_words.push_back(columns.texts[i]);
    names.push_back(columns.names[columns.texts[i]]);
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    if (seen[i].words) continue;
    const std::string all = shell_word(join(names, ","));
    throw IoError(
        fmt::format("{}: the column {} has no words in any row, only numbers and the like: {}", source,
                    shown_name(names[i]), shown_name(seen[i].example)),
        with_words.empty()
            ? fmt::format("name a column of texts: --text COLUMN; --text {} reads it as text all the same", all)
            : fmt::format("leave it out: {}; --text {} reads it as text all the same", choice.how_to_choose(with_words),
                          all));
  }
}

std::string summary_of(const TextTable& table, const Columns& columns, const CsvReader& reader,
                       std::span<const Seen> seen, const std::string& source) {
  std::vector<std::string> unread;
  for (std::size_t i = 0; i < table.names.size(); ++i)
    if ((i != columns.label || table.labels.empty()) && std::ranges::find(columns.texts, i) == columns.texts.end())
      unread.push_back(table.names[i]);
  std::string text = fmt::format("{}: {} row{}", source, table.rows.size(), table.rows.size() == 1 ? "" : "s");
  if (reader.long_rows() > 0)
    text += fmt::format(" ({} of several lines, the longest from line {} to {})", reader.long_rows(),
                        reader.longest_row().first, reader.longest_row().second);
  if (columns.label && !table.labels.empty())
    text += fmt::format(", the class in {}", shown_name(table.names[*columns.label]));
  text += table.texts.size() > 1 ? fmt::format(", pairs of texts in {}", shown_names(table.texts))
                                 : fmt::format(", the text in {}", shown_names(table.texts));
  for (std::size_t i = 0; i < seen.size(); ++i)
    if (seen[i].empty > 0) text += fmt::format(", {} empty in {}", seen[i].empty, shown_name(table.texts[i]));
  if (!unread.empty()) text += fmt::format(", not read: {}", shown_names(unread));
  return text;
}

}  // namespace

TextTable read_text_table(const std::string& path, const TextTableOptions& options) {
  TableFile file(path, options.quotes);
  const std::string& source = file.source();
  std::vector<std::string> fields;
  const ColumnChoice choice(file.names(), options, source);
  const Columns columns = choice.choose();
  TextTable table = {.names = columns.names, .texts = {}, .rows = {}, .labels = {}, .summary = {}};
  for (const std::size_t i : columns.texts) table.texts.push_back(columns.names[i]);
  std::vector<Seen> seen(columns.texts.size());
  while (file.next(fields)) {
    const std::string row = file.place();
    if (options.classes) {
      check_utf8(fields[*columns.label], row);
      table.labels.emplace_back(trim(fields[*columns.label]));
      if (table.labels.back().empty())
        throw IoError(fmt::format("{}: line {} has no class", source, file.reader().line()), "give each line one");
    }
    for (std::size_t i = 0; i < seen.size(); ++i) {
      const std::string& text = fields[columns.texts[i]];
      if (trim(text).empty()) ++seen[i].empty;
      if (seen[i].words) continue;
      seen[i].words = !is_without_words(text);
      if (seen[i].example.empty()) seen[i].example = text;
    }
    table.rows.push_back({.first = std::move(fields[columns.texts[0]]),
                          .second = columns.texts.size() > 1 ? std::move(fields[columns.texts[1]]) : std::string(),
                          .label = 0,
                          .source = row});
  }
  if (options.texts.empty() && !table.rows.empty()) check_words(seen, columns, choice, source);
  table.summary = summary_of(table, columns, file.reader(), seen, source);
  return table;
}

std::vector<SettingSpec> text_table_settings(bool classes) {
  std::vector<SettingSpec> all = {{.name = kText,
                                   .fallback = "",
                                   .help = "the column of texts, or two columns of text pairs",
                                   .placeholder = "COLUMN,…",
                                   .default_text = "all but the class, if they are one or two"},
                                  quotes_setting()};
  if (classes)
    all.push_back({.name = kLabel,
                   .fallback = "",
                   .help = "the column of classes",
                   .placeholder = "COLUMN",
                   .default_text = kLabelColumn});
  return all;
}

TextTableOptions text_table_options(const Settings& settings) {
  const bool classes = settings.has(kLabel);
  return {.texts = settings.word(kText),
          .label = classes ? settings.word(kLabel) : std::string(),
          .quotes = quotes_of(settings),
          .classes = classes};
}

}  // namespace lockstep::data
