#include "checkpoint/model_metadata.h"

#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/json_value.h"
#include "base/version.h"
#include "data/resample.h"
#include "lockstep/nn/io/weights.h"

namespace lockstep::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr const char* kKey = "lockstep";
constexpr const char* kTextRules = "text_rules";
constexpr std::int64_t kMostSize = 1 << 24;  // of a layer, as the flags have it

constexpr std::int64_t kMostElements = std::int64_t{1} << 30;
constexpr std::size_t kMostColumns = 1 << 20;

/// What a file says of a setting: sizes of the model. Switches are there where they differ from the usual.
bool is_said(const SettingSpec& setting) { return setting.role == SettingSpec::Role::kStructure; }

Json json_of(const nn::ModelSpec& spec) {
  Json json = {{"name", spec.name}, {"sample", spec.sample_shape}, {"classes", spec.classes}};
  const nn::ModelFamily* const family = nn::find_model_family(spec.name);
  if (family == nullptr) return json;  // whoever builds it says so
  if (spec.vocabulary > 0) json["vocabulary"] = spec.vocabulary;
  if (!spec.categories.empty()) json["categories"] = spec.categories;
  const nn::ModelSpec whole = nn::complete(spec);
  for (const auto& setting : family->settings) {
    if (!is_said(setting)) continue;
    const SettingValue& value = *whole.settings.find(setting.name);
    if (!std::holds_alternative<bool>(value.any()) || value != setting.fallback)
      std::visit([&](const auto& plain) { json[setting.name] = plain; }, value.any());
  }
  return json;
}

Json json_of(const data::ImageForm& form) {
  return {{"height", form.height},           {"width", form.width},           {"channels", form.channels},
          {"mean", form.normalisation.mean}, {"std", form.normalisation.std}, {"cropped", form.cropped}};
}

Json json_of(const data::TableColumn& column) {
  if (column.categorical) return {{"name", column.name}, {"categories", column.categories}};
  return {{"name", column.name}, {"mean", column.mean}, {"deviation", column.deviation}};
}

Json json_of(const data::TableSchema& schema) {
  Json columns = Json::array();
  for (const auto& column : schema.columns) columns.push_back(json_of(column));
  return {{"columns", columns}, {"target", json_of(schema.target)}};
}

Json json_of(const data::WordPieceRules& rules) {
  Json json = {{"lower_case", rules.lower_case.value()}};
  if (rules.strip_marks) json["strip_marks"] = *rules.strip_marks;
  if (!rules.split_ideographs) json["split_ideographs"] = false;
  if (!rules.added.empty()) json["added"] = rules.added;
  return json;
}

/// Reads metadata; nothing in it is trusted.
class MetadataReader {
 public:
  explicit MetadataReader(const std::string& source) : source_(source) {}

  ModelMetadata read(const std::string& text) const {
    try {
      return metadata_from(parse_json(text, /*deepest=*/5));
    } catch (const JsonError& error) {
      refuse(fmt::format("it {}", error.what()));
    } catch (const Json::exception&) {
      refuse("something is missing, or of another type");
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw IoError(
        fmt::format("{}: its description of its model (\"{}\" in its metadata) cannot be used: {}", source_, kKey, why),
        "check where it came from");
  }

  std::uint64_t whole(const Json& value, const char* name, std::uint64_t least, std::uint64_t most) const {
    const auto number = whole_number(value, most);
    if (!number || *number < least)
      refuse(fmt::format("'{}' has what is no whole number from {} to {}", name, least, most));
    return *number;
  }

  std::int64_t size(const Json& json, const char* name, std::int64_t most = kMostSize) const {
    return static_cast<std::int64_t>(whole(json.at(name), name, 1, static_cast<std::uint64_t>(most)));
  }

  std::vector<std::int64_t> sizes(const Json& list, const char* name, std::size_t most_of_them,
                                  std::uint64_t least = 1) const {
    if (!list.is_array() || list.empty() || list.size() > most_of_them)
      refuse(fmt::format("'{}' is no list of 1 to {} numbers", name, most_of_them));
    std::vector<std::int64_t> numbers;
    for (const Json& value : list) numbers.push_back(static_cast<std::int64_t>(whole(value, name, least, kMostSize)));
    return numbers;
  }

  /// Nothing: a switch that is not there.
  std::optional<SettingValue> setting_from(const Json& json, const SettingSpec& setting) const {
    const char* const name = setting.name.c_str();
    const auto& kind = setting.fallback.any();
    if (std::holds_alternative<bool>(kind))
      return json.contains(name) ? std::optional<SettingValue>(json.at(name).get<bool>()) : std::nullopt;
    if (std::holds_alternative<std::int64_t>(kind))
      return static_cast<std::int64_t>(
          whole(json.at(name), name, setting.low < 1 ? 0 : 1, static_cast<std::uint64_t>(kMostSize)));
    if (std::holds_alternative<std::vector<std::int64_t>>(kind)) {
      const Json& list = json.at(name);
      if (list.is_array() && list.empty()) return std::vector<std::int64_t>();
      return sizes(list, name, setting.most_many);
    }
    if (std::holds_alternative<std::string>(kind)) return json.at(name).get<std::string>();
    return json.at(name).get<double>();
  }

  nn::ModelSpec spec_from(const Json& json) const {
    nn::ModelSpec spec{.name = json.at("name").get<std::string>(),
                       .sample_shape = sizes(json.at("sample"), "sample", 3, /*least=*/0),
                       .classes = size(json, "classes")};
    if (json.contains("vocabulary")) spec.vocabulary = size(json, "vocabulary");
    if (json.contains("categories")) spec.categories = sizes(json.at("categories"), "categories", kMostColumns);
    std::int64_t elements = 1;
    for (const std::int64_t dim : spec.sample_shape) {
      // Of a table that has categories alone; all other models have numbers.
      if (dim == 0 && spec.categories.empty()) refuse("samples have no numbers");
      if (elements > kMostElements / std::max<std::int64_t>(dim, 1)) refuse("a sample has more than 2^30 numbers");
      elements *= dim;
    }
    const nn::ModelFamily* const family = nn::find_model_family(spec.name);
    if (family == nullptr) return spec;  // whoever builds it says so
    for (const auto& setting : family->settings) {
      if (!is_said(setting)) continue;
      const auto value = setting_from(json, setting);
      if (!value) continue;
      if (const auto complaint = complaint_about(setting, *value))
        refuse(fmt::format("'{}': {}", setting.name, complaint->what));
      spec.settings.set(setting.name, *value);
    }
    return spec;
  }

  std::shared_ptr<const data::ImageForm> image_from(const Json& json) const {
    data::ImageForm form;
    form.height = static_cast<int>(size(json, "height", data::kMostImageSize));
    form.width = static_cast<int>(size(json, "width", data::kMostImageSize));
    form.channels = static_cast<int>(size(json, "channels", 3));
    form.normalisation = {json.at("mean").get<std::array<float, 3>>(), json.at("std").get<std::array<float, 3>>()};
    form.cropped = json.at("cropped").get<bool>();
    if (form.channels == 2) refuse("images of 2 channels");
    if (form.cropped && form.height != form.width) refuse("images are not cropped to a square");
    for (std::size_t c = 0; c < 3; ++c)
      if (!std::isfinite(form.normalisation.mean[c]) || !std::isfinite(form.normalisation.std[c]) ||
          form.normalisation.std[c] == 0)
        refuse("the normalisation of pixels is invalid");
    return std::make_shared<const data::ImageForm>(form);
  }

  data::TableColumn column_from(const Json& json) const {
    data::TableColumn column{.name = json.at("name").get<std::string>()};
    if (const auto found = json.find("categories"); found != json.end()) {
      column.categorical = true;
      column.categories = found->get<std::vector<std::string>>();
      return column;
    }
    column.mean = json.at("mean").get<double>();
    column.deviation = json.at("deviation").get<double>();
    if (!std::isfinite(column.mean) || !std::isfinite(column.deviation) || column.deviation <= 0)
      refuse("the statistics of a column are invalid");
    return column;
  }

  std::shared_ptr<const data::TableSchema> table_from(const Json& json, const nn::ModelSpec& spec) const {
    data::TableSchema schema{.columns = {}, .target = column_from(json.at("target"))};
    const Json& columns = json.at("columns");
    if (!columns.is_array() || columns.size() > kMostColumns) refuse("'columns' is no list of columns");
    for (const Json& column : columns) schema.columns.push_back(column_from(column));
    if (spec.sample_shape != std::vector{schema.numbers()} || spec.categories != schema.categories())
      refuse("its columns do not fit its model");
    if (schema.predicts_classes() ? std::cmp_greater(schema.target.categories.size(), spec.classes) : spec.classes != 1)
      refuse("its target does not fit its model");
    return std::make_shared<const data::TableSchema>(std::move(schema));
  }

  /// Versions before it was there went by the vocabulary alone.
  static data::WordPieceRules rules_from(const Json& metadata) {
    data::WordPieceRules rules;
    const auto found = metadata.find(kTextRules);
    if (found == metadata.end()) return rules;
    rules.lower_case = found->at("lower_case").get<bool>();
    if (const auto strip = found->find("strip_marks"); strip != found->end()) rules.strip_marks = strip->get<bool>();
    rules.split_ideographs = found->value("split_ideographs", true);
    rules.added = found->value("added", std::vector<std::string>{});
    return rules;
  }

  ModelMetadata metadata_from(const Json& json) const {
    ModelMetadata metadata{.spec = spec_from(json.at("model")),
                           .tokens = json.at("tokens").get<bool>(),
                           .class_names = json.value("class_names", std::vector<std::string>{}),
                           .characters = nullptr,
                           .word_pieces = nullptr,
                           .image = nullptr,
                           .data = json.value("data", std::string()),
                           .seed = 0};
    if (const auto found = json.find("seed"); found != json.end())
      metadata.seed = whole(*found, "seed", 0, std::numeric_limits<std::uint64_t>::max());
    if (metadata.class_names.size() > static_cast<std::size_t>(metadata.spec.classes))
      refuse(fmt::format("{} names of {} classes", metadata.class_names.size(), metadata.spec.classes));
    if (const auto found = json.find("characters"); found != json.end()) {
      const auto characters = std::make_shared<data::Characters>(found->get<std::string>(), source_);
      if (characters->size() != metadata.spec.classes)
        refuse(fmt::format("{} characters of {}", characters->size(), metadata.spec.classes));
      metadata.characters = characters;
    }
    if (const auto found = json.find("word_pieces"); found != json.end()) {
      const std::int64_t tokens = metadata.spec.vocabulary > 0 ? metadata.spec.vocabulary : metadata.spec.classes;
      auto pieces =
          std::make_shared<const data::WordPieces>(found->get<std::vector<std::string>>(), source_, rules_from(json));
      if (pieces->size() != tokens) refuse(fmt::format("{} word pieces of {}", pieces->size(), tokens));
      metadata.word_pieces = std::move(pieces);
    }
    if (const auto found = json.find("image"); found != json.end()) {
      metadata.image = image_from(*found);
      if (metadata.image->dims() != metadata.spec.sample_shape) refuse("its images do not fit its model");
    }
    if (const auto found = json.find("table"); found != json.end()) metadata.table = table_from(*found, metadata.spec);
    if (const auto found = json.find("best"); found != json.end())
      metadata.best = {.metric = found->at("metric").get<std::string>(),
                       .value = found->at("value").get<double>(),
                       .step = static_cast<std::int64_t>(whole(found->at("step"), "step", 0, std::uint64_t{1} << 62))};
    return metadata;
  }

  const std::string& source_;
};

}  // namespace

std::map<std::string, std::string> metadata_of(const ModelMetadata& metadata) {
  Json json = {{"model", json_of(metadata.spec)},
               {"tokens", metadata.tokens},
               {"data", metadata.data},
               {"seed", metadata.seed},
               {"version", version()}};
  if (!metadata.class_names.empty()) json["class_names"] = metadata.class_names;
  if (metadata.characters != nullptr) json["characters"] = metadata.characters->text();
  if (metadata.word_pieces != nullptr) {
    json["word_pieces"] = metadata.word_pieces->pieces();
    json[kTextRules] = json_of(metadata.word_pieces->rules());
  }
  if (metadata.image != nullptr) json["image"] = json_of(*metadata.image);
  if (metadata.table != nullptr) json["table"] = json_of(*metadata.table);
  if (const auto& best = metadata.best)
    json["best"] = {{"metric", best->metric}, {"value", best->value}, {"step", best->step}};
  // Folders may be called what is no UTF-8.
  return {{"format", "pt"}, {kKey, json.dump(-1, ' ', false, Json::error_handler_t::replace)}};
}

std::optional<ModelMetadata> find_model_metadata(const std::map<std::string, std::string>& metadata,
                                                 const std::string& source) {
  const auto found = metadata.find(kKey);
  if (found == metadata.end()) return std::nullopt;
  return MetadataReader(source).read(found->second);
}

void apply_sizes(nn::ModelConfig& model, const nn::ModelSpec& spec, const std::optional<std::string>& source) {
  for (const auto& setting : nn::model_family(spec.name).settings) {
    const SettingValue* const said = spec.settings.find(setting.name);
    const SettingValue* const given = model.settings.find(setting.name);
    if (said == nullptr) continue;
    // How long samples are is no size of the model, but it may take no longer ones than so.
    if (setting.role == SettingSpec::Role::kTokens && given == nullptr && *said != setting.fallback)
      model.settings.set(setting.name, *said);
    if (setting.role != SettingSpec::Role::kStructure) continue;
    if (given != nullptr && source && *given != *said)
      throw UsageError(fmt::format("--{} {}, but {} holds a model with {}", setting.name, to_string(*given), *source,
                                   to_string(*said)),
                       fmt::format("leave --{} out: the file says it", setting.name));
    if (given == nullptr) model.settings.set(setting.name, *said);
  }
}

namespace {

/// As given, or as the model's data had them.
void apply_tokens(nn::ModelConfig& model, const ModelMetadata& metadata) {
  const std::string& name = nn::model_family(metadata.spec.name).tokens_setting;
  if (metadata.tokens && !name.empty() && !model.settings.has(name))
    model.settings.set(name, metadata.spec.sample_shape[0]);
}

}  // namespace

std::optional<ModelMetadata> read_model_metadata(const std::string& path) {
  return find_model_metadata(nn::read_weights_metadata(path), path);
}

std::shared_ptr<const data::WordPieces> open_word_pieces(const std::string& vocabulary, std::optional<bool> cased,
                                                         const std::optional<ModelMetadata>& metadata,
                                                         const std::string& weights) {
  auto given = vocabulary.empty() ? nullptr : data::WordPieces::read(vocabulary, cased);
  const auto pieces = metadata ? metadata->word_pieces : nullptr;
  if (pieces == nullptr) return given;
  if (given != nullptr && given->pieces() != pieces->pieces())
    throw UsageError(fmt::format("{} has other word pieces than {} was trained with", vocabulary, weights),
                     "leave --vocab out: the weights have theirs");
  if (cased && *cased != pieces->cased())
    throw UsageError(
        fmt::format("--cased {}, but the texts of {} were read {}", *cased ? "yes" : "no", weights, pieces->reads()),
        "leave --cased out: the file says it");
  return pieces;
}

void apply_metadata(nn::ModelConfig& model, const ModelMetadata& metadata, const std::string& source) {
  if (!model.name.empty() && model.name != metadata.spec.name)
    throw UsageError(fmt::format("{} holds a {}, not a {}", source, metadata.spec.name, model.name),
                     fmt::format("name the model {}", metadata.spec.name));
  apply_sizes(model, metadata.spec, source);
  apply_tokens(model, metadata);
}

}  // namespace lockstep::checkpoint
