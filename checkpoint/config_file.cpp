// The config.json that Hugging Face's packages write beside weights.
#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json_value.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/model_metadata.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr int kDeepestConfig = 12;

class ConfigReader {
 public:
  ConfigReader(const std::string& path, const nn::ModelConfig& given)
      : path_(path), given_(given), family_(nn::model_family(given.name)) {}

  Settings read(std::string_view text) {
    try {
      const Json json = parse_json(text, kDeepestConfig);
      if (!json.is_object()) refuse("it is no object");
      check(json);
      take(json);
    } catch (const JsonError& error) {
      refuse(fmt::format("it {}", error.what()));
    }
    if (!taken_.empty()) log_info("{} says {}", path_, join(taken_, ", "));
    return settings_;
  }

 private:
  [[noreturn]] void refuse(const std::string& problem) const {
    throw IoError(fmt::format("{}: {}", path_, problem), "look at the file, or move the weights to another directory");
  }

  /// "rope_parameters.rope_theta" is a member of a member. nullptr: it is not there.
  static const Json* find(const Json& json, std::string_view name) {
    const Json* at = &json;
    for (const std::string& part : split(std::string(name), '.')) {
      if (!at->is_object() || !at->contains(part)) return nullptr;
      at = &(*at)[part];
    }
    return at;
  }

  void check(const Json& json) const {
    for (const auto& [name, values] : family_.config.wanted) {
      const Json* const value = find(json, name);
      if (value == nullptr) continue;
      const std::string text = value->dump();
      if (std::ranges::find(values, text) == values.end())
        refuse(fmt::format("\"{}\" is {}, and {} has {}", name, printable(text), given_.name, listed(values, "or")));
    }
  }

  void take(const Json& json) {
    const auto specs = family_.settings_of(given_.name);
    for (const auto& [name, setting] : family_.config.settings) {
      const Json* const value = find(json, name);
      if (value == nullptr || value->is_null() || given_.settings.has(setting) || settings_.has(setting)) continue;
      const SettingSpec* const spec = find_setting(specs, setting);
      LOCKSTEP_ASSERT(spec != nullptr, "no setting {}", setting);
      const SettingValue made = value_of(*value, *spec, name);
      if (const auto complaint = complaint_about(*spec, made))
        refuse(fmt::format("\"{}\" is {}: {}", name, printable(value->dump()), complaint->what));
      settings_.set(setting, made);
      taken_.push_back(fmt::format("{} {}", setting, value->dump()));
    }
  }

  SettingValue value_of(const Json& value, const SettingSpec& spec, const std::string& name) const {
    const auto& kind = spec.fallback.any();
    if (std::holds_alternative<double>(kind) && value.is_number()) return value.get<double>();
    if (std::holds_alternative<bool>(kind) && value.is_boolean()) return value.get<bool>();
    if (const auto whole = whole_number(value, std::uint64_t{1} << 40);
        whole && std::holds_alternative<std::int64_t>(kind))
      return static_cast<std::int64_t>(*whole);
    refuse(fmt::format("\"{}\" is {}, which is of another type", name, printable(value.dump())));
  }

  const std::string& path_;
  const nn::ModelConfig& given_;
  const nn::ModelFamily& family_;
  Settings settings_;
  std::vector<std::string> taken_;
};

}  // namespace

Settings read_config_file(std::string_view text, const std::string& source, const nn::ModelConfig& given) {
  return ConfigReader(source, given).read(text);
}

nn::ModelSpec spec_of_file(const nn::ModelConfig& given, const std::vector<nn::HostTensor>& tensors,
                           const std::string& path) {
  Settings settings = given.settings;
  const std::string config = (fs::path(path).parent_path() / "config.json").string();
  std::error_code unreadable;  // then it says so where it is read
  if (const auto* family = nn::find_model_family(given.name);
      family != nullptr && !family->config.settings.empty() &&
      fs::status(config, unreadable).type() != fs::file_type::not_found)
    for (const auto& [name, value] : read_config_file(MappedFile(config).text(), config, given))
      settings.set(name, value);
  return nn::spec_of_tensors(given.name, settings, tensors);
}

}  // namespace lockstep::checkpoint
