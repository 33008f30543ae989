#include "data/table.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "data/file_list.h"
#include "data/table_file.h"
#include "data/table_schema.h"
#include "lockstep/data/families.h"

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCategories = "categories";  // the further input

/// Rows as samples.
struct Rows {
  std::vector<float> numbers;       // (size, F)
  std::vector<std::int32_t> codes;  // (size, K)
  std::vector<std::int32_t> labels;
  std::vector<float> targets;
  std::uint64_t size = 0;
};

class TableRows final : public Dataset {
 public:
  TableRows(Info info, Rows rows)
      : Dataset(std::move(info)),
        rows_(std::move(rows)),
        codes_each_(further_inputs().empty() ? 0 : further_elements(0)) {}

  void read_sample(std::uint64_t index, const Sample& sample) const override {
    LOCKSTEP_ASSERT(index < rows_.size && sample.x.size() == sample_elements());
    std::copy_n(rows_.numbers.begin() + offset(index, sample_elements()), sample_elements(), sample.x.begin());
    if (codes_each_ > 0)
      std::copy_n(rows_.codes.begin() + offset(index, codes_each_), codes_each_, sample.further[0].integers.begin());
    if (has_numeric_targets())
      sample.targets[0] = rows_.targets[index];
    else
      sample.labels[0] = rows_.labels[index];
  }

 private:
  static std::ptrdiff_t offset(std::uint64_t index, std::size_t each) {
    return static_cast<std::ptrdiff_t>(index * each);
  }

  Rows rows_;
  std::size_t codes_each_;
};

/// The files of one part.
std::vector<std::string> files_of(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return {path};
  std::vector<std::string> files, others;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with('.')) continue;
    (is_table(name) ? files : others).push_back(entry.path().string());
  }
  if (error) throw IoError(fmt::format("{}: {}", printable(path), error.message()));
  if (files.empty())
    throw IoError(fmt::format("{}: it has no table", printable(path)), "name a .csv or .tsv file, or a folder of them");
  std::ranges::sort(files);
  const auto train = std::ranges::find_if(
      files, [](const std::string& file) { return fs::path(file).filename().string().starts_with("train."); });
  if (train != files.end()) {
    const std::string file = *train;
    std::erase_if(files, [&](const std::string& other) {
      return other == file || other == table_beside(file, kValidationParts) || other == table_beside(file, kTestParts);
    });
    others.insert(others.end(), files.begin(), files.end());
    files = {file};
  }
  if (!others.empty())
    log_info("{}: {} of its entries {} not read: {}", printable(path), others.size(), others.size() == 1 ? "is" : "are",
             shown_names(others));
  return files;
}

/// Opens the parts of table:PATH.
class TableParts {
 public:
  TableParts(const std::string& path, const OpenOptions& options)
      : path_(path), options_(options), quotes_(quotes_of(options.settings)) {}

  DataSplits open() {
    const auto names = files_of(path_);
    const TablesBeside beside = tables_beside(names.size() == 1 ? names[0] : std::string(), options_.parts.test);
    auto files = open_files(names);
    const bool holds_out = beside.validation.empty() && !options_.parts.whole;
    take_schema(files, holds_out);
    Rows train, held_out;
    read(files, holds_out ? &held_out : nullptr, train);
    DataSplits splits;
    const std::string name = "table " + printable(path_);
    if (beside.validation.empty() && options_.parts.whole) {
      splits.whole = part(name, std::move(train));
    } else {
      splits.train = part(name + " train", std::move(train));
      splits.validation = beside.validation.empty() ? part(name + " validation", std::move(held_out))
                                                    : read_file(name + " validation", beside.validation);
    }
    if (!beside.test.empty()) splits.test = read_file(name + " test", beside.test);
    if (beside.test_validates) splits.test = splits.validation;
    return splits;
  }

 private:
  std::vector<std::unique_ptr<TableFile>> open_files(const std::vector<std::string>& names) const {
    std::vector<std::unique_ptr<TableFile>> files;
    for (const std::string& name : names)
      files.push_back(std::make_unique<TableFile>(name, quotes_, /*finds_separator=*/true));
    return files;
  }

  void take_schema(std::vector<std::unique_ptr<TableFile>>& files, bool holds_out) {
    if (options_.table != nullptr && !options_.table->target.name.empty()) {
      for (const char* flag : {kIgnore, kNumeric, kCategorical, kTarget}) {
        const std::string& given = options_.settings.word(flag);
        if (!given.empty() && !(flag == kTarget && given == options_.table->target.name))
          throw UsageError(fmt::format("--{} {} with weights that say what their columns are", flag, given),
                           fmt::format("leave --{} out", flag));
      }
      schema_ = options_.table;
    } else {
      auto [schema, summary] = data::find_schema(files, options_.settings, holds_out);
      if (options_.table != nullptr) {  // for another target
        schema.columns = options_.table->columns;
        if (std::ranges::find(schema.columns, schema.target.name, &TableColumn::name) != schema.columns.end())
          throw UsageError(
              fmt::format("the weights predict from the column {}, the target", shown_name(schema.target.name)),
              "train a new model, or give another --target");
      }
      reading_ = std::move(summary);
      schema_ = std::make_shared<const TableSchema>(std::move(schema));
      for (const auto& file : files) file->rewind();
    }
    if (options_.classes > 0 && !schema_->predicts_classes())
      throw UsageError(fmt::format("--classes {} for {}, a number", options_.classes, shown_name(schema_->target.name)),
                       fmt::format("leave --classes out, or say --categorical {}", schema_->target.name));
    if (options_.classes > 0 && std::cmp_less(options_.classes, schema_->target.categories.size()))
      throw UsageError(fmt::format("--classes {} for {}, which has {}", options_.classes,
                                   shown_name(schema_->target.name), schema_->target.categories.size()),
                       "leave --classes out");
  }

  /// Rows that are held out go to `held_out`, if there is one.
  void read(std::vector<std::unique_ptr<TableFile>>& files, Rows* held_out, Rows& rows) {
    TableEncoder encoder(*schema_);
    const auto numbers = static_cast<std::size_t>(schema_->numbers()), codes = schema_->categories().size();
    std::vector<std::string> fields, unread;
    std::uint64_t row = 0;
    for (const auto& file : files) {
      encoder.begin(*file, /*target_is_wanted=*/true);
      unread = encoder.unread();
      for (; file->next(fields); ++row) {
        Rows& to = held_out != nullptr && is_held_out(row) ? *held_out : rows;
        to.numbers.resize(to.numbers.size() + numbers);
        to.codes.resize(to.codes.size() + codes);
        encoder.encode(fields, std::span(to.numbers).last(numbers), std::span(to.codes).last(codes));
        if (schema_->predicts_classes())
          to.labels.push_back(encoder.label(fields));
        else
          to.targets.push_back(encoder.number(fields));
        ++to.size;
      }
    }
    if (row == 0) throw IoError(fmt::format("{}: it has no row", files[0]->source()), "add rows");
    if (held_out != nullptr && (held_out->size == 0 || rows.size == 0))
      throw IoError(fmt::format("{}: too few rows, {}: a tenth is for validation", files[0]->source(), row),
                    "add rows");
    log_reading(files, encoder, row, unread);
  }

  void log_reading(const std::vector<std::unique_ptr<TableFile>>& files, const TableEncoder& encoder,
                   std::uint64_t rows, const std::vector<std::string>& unread) {
    std::string text = fmt::format("{}{}: {} row{}", files[0]->source(),
                                   files.size() > 1 ? fmt::format(" and {} more", files.size() - 1) : std::string(),
                                   rows, rows == 1 ? "" : "s");
    if (!reading_.empty()) text += ", " + std::exchange(reading_, {});
    std::vector<std::string> unseen;
    for (std::size_t i = 0; i < schema_->columns.size(); ++i)
      if (encoder.unseen()[i] > 0)
        unseen.push_back(fmt::format("{} in {}", encoder.unseen()[i], shown_name(schema_->columns[i].name)));
    if (!unseen.empty()) text += fmt::format(", categories that training has not seen: {}", listed(unseen));
    if (!unread.empty()) text += fmt::format("; not read: {}", shown_names(unread));
    log_info("table {}", text);
    if (summary_.empty()) summary_ = text;
  }

  std::shared_ptr<const Dataset> read_file(const std::string& name, const std::string& file) {
    auto files = open_files({file});
    Rows rows;
    read(files, nullptr, rows);
    return part(name, std::move(rows));
  }

  std::shared_ptr<const Dataset> part(const std::string& name, Rows rows) const {
    const auto categories = schema_->categories();
    Dataset::Info info{.name = name,
                       .size = rows.size,
                       .dims = {schema_->numbers()},
                       .reading = summary_,
                       .table = schema_,
                       .categories = categories};
    if (!categories.empty())
      info.further_inputs = {{.name = kCategories, .dims = {std::ssize(categories)}, .integers = true}};
    if (schema_->predicts_classes()) {
      const int found = static_cast<int>(schema_->target.categories.size());
      info.classes = std::max(options_.classes, found);
      info.class_names = schema_->target.categories;
      info.class_counts.resize(static_cast<std::size_t>(info.classes));
      for (const std::int32_t label : rows.labels) ++info.class_counts[static_cast<std::size_t>(label)];
    } else {
      info.target_dims = {1};
      info.numeric_targets = true;
      const auto [least, most] = std::ranges::minmax_element(rows.targets);
      info.target_range = {*least, *most};
    }
    return std::make_shared<TableRows>(std::move(info), std::move(rows));
  }

  const std::string& path_;
  const OpenOptions& options_;
  std::optional<bool> quotes_;
  std::shared_ptr<const TableSchema> schema_;
  std::string reading_;  // what its columns are, until a line has said so
  std::string summary_;  // of the first part
};

}  // namespace

DataSplits open_table(const std::string& path, const OpenOptions& options) { return TableParts(path, options).open(); }

std::vector<SettingSpec> table_settings() {
  const auto columns = [](const char* name, const char* help) {
    return SettingSpec{.name = name, .fallback = "", .help = help, .placeholder = "COLUMN,…", .default_text = "none"};
  };
  return {{.name = kTarget,
           .fallback = "",
           .help = "the column to predict: a number, or a class",
           .placeholder = "COLUMN",
           .default_text = kTarget},
          columns(kIgnore, "columns of the table not to read"),
          columns(kNumeric, "columns that are numbers, also a target of two values"),
          columns(kCategorical, "columns that are categories, whatever they look like; a target: classes"),
          quotes_setting()};
}

const DatasetFamily& table_family() {
  static const DatasetFamily family = {.name = "table",
                                       .argument = "FILE",
                                       .about = "numbers and categories, .csv or .tsv",
                                       .remedy = "a table with a line of names, .csv or .tsv, or a folder of them",
                                       .settings = table_settings(),
                                       .open = [](const std::string&, const std::string& path,
                                                  const OpenOptions& options) { return open_table(path, options); },
                                       .files = [](const std::string& path) -> std::vector<std::string> {
                                         std::error_code error;
                                         return fs::is_directory(path, error) ? std::vector<std::string>()
                                                                              : std::vector{path};
                                       }};
  return family;
}

}  // namespace lockstep::data
