#include "checkpoint/manifest.h"

#include "base/error.h"
#include "base/hash.h"
#include "base/json_value.h"
#include "base/version.h"

namespace lockstep::checkpoint {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kFormat = "lockstep checkpoint 1";
constexpr const char* kFormatInParts = "lockstep checkpoint 2";  // the same, with kMoments
constexpr const char* kMoments = "moments";
constexpr const char *kBest = "best", *kKept = "kept", *kRate = "lowered_rate", *kSince = "evaluations_since";
constexpr const char* kDigest = "sha256";
constexpr int kIndent = 1;
constexpr int kDeepest = 4;

std::string text_of(const OrderedJson& json) {
  return json.dump(kIndent, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace);
}

std::string digest_of(const OrderedJson& json) {
  Sha256 hash;
  hash.update(text_of(json));
  return hash.finish();
}

OrderedJson json_of(const Facts& facts) {
  OrderedJson json = OrderedJson::object();
  for (const auto& [name, value] : facts) json[name] = value;
  return json;
}

OrderedJson json_of(const BestEvaluation& evaluation) {
  return {{"metric", evaluation.metric}, {"value", evaluation.value}, {"step", evaluation.step}};
}

class ManifestReader {
 public:
  explicit ManifestReader(const std::string& source) : source_(source) {}

  CheckpointManifest read(const std::string& text) const {
    try {
      return manifest_from(parse(text));
    } catch (const OrderedJson::exception&) {
      refuse("something is missing, or of another type");
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw IoError(fmt::format("{} cannot be used: {}", source_, why), "use another checkpoint");
  }

  OrderedJson parse(const std::string& text) const {
    try {
      OrderedJson json = parse_ordered_json(text, kDeepest);
      if (!json.is_object()) refuse("it is no JSON object");
      const std::string said = json.at(kDigest).get<std::string>();
      json.erase(kDigest);
      if (digest_of(json) != said) refuse("it has been changed: its SHA-256 is another");
      return json;
    } catch (const JsonError& error) {
      refuse(fmt::format("it has been cut or changed: it {}", error.what()));
    }
  }

  template <class Key>
  std::int64_t count(const OrderedJson& json, Key key) const {
    const auto number = whole_number(json.at(key), std::uint64_t{1} << 62);
    if (!number) refuse(fmt::format("'{}' is no count", key));
    return static_cast<std::int64_t>(*number);
  }

  Facts facts_from(const OrderedJson& json) const {
    if (!json.is_object()) refuse("its description of the run is no list of names and values");
    Facts facts;
    for (const auto& [name, value] : json.items()) facts.emplace_back(name, value.get<std::string>());
    return facts;
  }

  /// One for each file, under the files' names, and in their order.
  std::vector<std::map<std::string, CheckpointManifest::Slice>> parts_from(const OrderedJson& json) const {
    if (!json.is_object() || json.empty()) refuse("its moments are no list of files");
    std::vector<std::map<std::string, CheckpointManifest::Slice>> parts;
    for (const auto& [file, slices] : json.items()) {
      if (file != part_file(parts.size(), json.size()) || !slices.is_object())
        refuse(fmt::format("its moments are not in files as {}", part_file(parts.size(), json.size())));
      auto& part = parts.emplace_back();
      for (const auto& [name, bounds] : slices.items()) {
        if (!bounds.is_array() || bounds.size() != 2) refuse(fmt::format("'{}' has an invalid slice", name));
        part[name] = {.begin = count(bounds, std::size_t{0}), .count = count(bounds, std::size_t{1})};
      }
    }
    return parts;
  }

  BestEvaluation best_from(const OrderedJson& json) const {
    return {.metric = json.at("metric").get<std::string>(),
            .value = json.at("value").get<double>(),
            .step = count(json, "step")};
  }

  EvaluationHistory history_from(const OrderedJson& json) const {
    EvaluationHistory history;
    if (json.contains(kKept))
      for (const auto& evaluation : json.at(kKept)) history.kept.push_back(best_from(evaluation));
    if (json.contains(kBest)) {
      history.best = best_from(json.at(kBest));
      history.since_best = count(json.at(kBest), kSince);
    }
    if (json.contains(kRate)) {
      const OrderedJson& rate = json.at(kRate);
      history.least_loss = rate.at("least_loss").get<double>();
      history.since_least = count(rate, kSince);
      history.reductions = count(rate, "reductions");
    }
    return history;
  }

  CheckpointManifest manifest_from(const OrderedJson& json) const {
    const auto format = json.at("format").get<std::string>();
    const bool in_parts = format == kFormatInParts;
    if (format != kFormat && !in_parts)
      refuse(fmt::format("its format is '{}', and this version reads '{}' and '{}'", format, kFormat, kFormatInParts));
    CheckpointManifest manifest{
        .step = count(json, "step"),
        .position = {.epoch = static_cast<std::uint64_t>(count(json, "epoch")),
                     .cursor = static_cast<std::uint64_t>(count(json, "cursor"))},
        .optimizer_steps = count(json, "optimizer_steps"),
        .total_steps = count(json, "total_steps"),
        .world_size = static_cast<int>(std::min<std::int64_t>(count(json, "world_size"), 1 << 30)),
        .identity = facts_from(json.at("run")),
        .settings = facts_from(json.at("settings")),
        .data = json.contains("data") ? facts_from(json.at("data")) : Facts(),
        .buckets = {.order = json.at("bucket_order").get<std::vector<std::string>>(),
                    .bucket_bytes =
                        json.contains("bucket_bytes") ? static_cast<std::uint64_t>(count(json, "bucket_bytes")) : 0},
        .evaluations = history_from(json),
        .files = {},
        .parts = {},
    };
    for (const auto& [name, value] : json.at("files").items())
      manifest.files[name] = {.bytes = static_cast<std::uint64_t>(count(value, "bytes")),
                              .sha256 = value.at(kDigest).get<std::string>()};
    if (in_parts) manifest.parts = parts_from(json.at(kMoments));
    return manifest;
  }

  const std::string& source_;
};

}  // namespace

const std::string* find_fact(const Facts& facts, std::string_view name) {
  const auto found = std::ranges::find(facts, name, &Facts::value_type::first);
  return found == facts.end() ? nullptr : &found->second;
}

std::string part_file(std::size_t part, std::size_t parts) {
  return fmt::format("optimizer-{:05}-of-{:05}.safetensors", part, parts);
}

std::string encode(const CheckpointManifest& manifest) {
  OrderedJson json = {{"format", manifest.parts.empty() ? kFormat : kFormatInParts},
                      {"written_by", fmt::format("lockstep {} {}", version(), git_revision())},
                      {"step", manifest.step},
                      {"total_steps", manifest.total_steps},
                      {"epoch", manifest.position.epoch},
                      {"cursor", manifest.position.cursor},
                      {"optimizer_steps", manifest.optimizer_steps},
                      {"world_size", manifest.world_size},
                      {"run", json_of(manifest.identity)},
                      {"settings", json_of(manifest.settings)},
                      {"bucket_order", manifest.buckets.order},
                      {"files", OrderedJson::object()}};
  if (!manifest.data.empty()) json["data"] = json_of(manifest.data);
  if (manifest.buckets.bucket_bytes > 0) json["bucket_bytes"] = manifest.buckets.bucket_bytes;
  const EvaluationHistory& history = manifest.evaluations;
  if (history.best) {
    json[kBest] = json_of(*history.best);
    json[kBest][kSince] = history.since_best;
  }
  for (const BestEvaluation& evaluation : history.kept) json[kKept].push_back(json_of(evaluation));
  if (history.least_loss)
    json[kRate] = {
        {"least_loss", *history.least_loss}, {kSince, history.since_least}, {"reductions", history.reductions}};
  for (const auto& [name, file] : manifest.files) json["files"][name] = {{"bytes", file.bytes}, {kDigest, file.sha256}};
  for (std::size_t part = 0; part < manifest.parts.size(); ++part) {
    OrderedJson& slices = json[kMoments][part_file(part, manifest.parts.size())] = OrderedJson::object();
    for (const auto& [name, slice] : manifest.parts[part]) slices[name] = {slice.begin, slice.count};
  }
  json = parse_ordered_json(text_of(json), kDeepest);  // what is hashed is what will be read, replaced bytes included
  json[kDigest] = digest_of(json);
  return text_of(json) + "\n";
}

CheckpointManifest decode_checkpoint_manifest(const std::string& text, const std::string& source) {
  return ManifestReader(source).read(text);
}

}  // namespace lockstep::checkpoint
