#include "trainer/saved_weights.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/status_report.h"
#include "data/vocabulary.h"
#include "data/word_pieces.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "trainer/build.h"

namespace lockstep::trainer {

namespace fs = std::filesystem;

TrainConfig with_saved_file(TrainConfig config) {
  if (!config.save.ends_with('/')) return config;
  config.save += "model.safetensors";
  config.save_directory = true;
  return config;
}

namespace {

using NamedTexts = std::vector<std::pair<std::string, std::string>>;

constexpr const char *kConfig = "config.json", *kTokenizerConfig = "tokenizer_config.json", *kPieces = "vocab.txt";

/// What byte pairs were read from, as it is now: it may be gone when the run ends.
NamedTexts byte_pair_files(const TrainConfig& config) {
  NamedTexts all;
  if (!config.save_directory || config.vocabulary.empty() || nn::model_family(config.model.name).word_pieces)
    return all;
  bool configured = false, whole = false;
  for (const auto& [name, path] : data::BytePairs::files_of(config.vocabulary, config.merges)) {
    all.emplace_back(name, MappedFile(path).text());
    configured = configured || name == kTokenizerConfig;
    whole = whole || name == "tokenizer.json";
  }
  // Otherwise its class would be guessed by the model's.
  if (!configured)
    all.emplace_back(kTokenizerConfig,
                     JsonObject{{"tokenizer_class", whole ? "PreTrainedTokenizerFast" : "GPT2Tokenizer"}}.text());
  return all;
}

/// The names that are written beside the weights.
std::vector<std::string> names_beside(const TrainConfig& config) {
  std::vector<std::string> names = {kConfig};
  if (nn::model_family(config.model.name).word_pieces) names.insert(names.end(), {kPieces, kTokenizerConfig});
  for (const auto& [name, text] : byte_pair_files(config)) names.push_back(name);
  return names;
}

/// A tokenizer of another kind that is there already would be read instead.
void check_other_tokenizers(const fs::path& directory, const std::vector<std::string>& written) {
  if (written.size() < 2) return;
  for (const char* const name :
       {"tokenizer.json", "vocab.json", "merges.txt", kPieces, "tokenizer.model", "added_tokens.json"}) {
    std::error_code unreadable;
    if (std::ranges::find(written, name) == written.end() && fs::exists(directory / name, unreadable))
      throw UsageError(fmt::format("--save {}/: there is a {} already, which would count beside this run's vocabulary",
                                   directory.string(), name),
                       "remove it, or give another directory");
  }
}

}  // namespace

bool keeps_best_weights(const TrainConfig& config) { return !config.save.empty() && !config.save_best.empty(); }

void check_saved_place(const TrainConfig& config) {
  if (config.save_directory) {
    const fs::path directory = fs::path(config.save).parent_path();
    std::error_code failed;
    fs::create_directories(directory, failed);
    if (failed)
      throw IoError(fmt::format("--save {}/: {}", directory.string(), failed.message()), "give another directory");
    const auto names = names_beside(config);
    check_other_tokenizers(directory, names);
    for (const std::string& name : names) static_cast<void>(AtomicFile((directory / name).string()));
  }
  // A run of hours must not find out at its end that its result has no place to go.
  static_cast<void>(AtomicFile(config.save));
}

SavedWeights::SavedWeights(const TrainConfig& config, const nn::Module& model, nn::MovingAverage* average,
                           const data::Dataset& dataset)
    : config_(config), model_(model), average_(average), dataset_(dataset), byte_pairs_(byte_pair_files(config)) {}

/// What from_pretrained() reads besides: of words, what they are cut by.
void SavedWeights::write_beside(const checkpoint::ModelMetadata& metadata) const {
  const fs::path directory = fs::path(config_.save).parent_path();
  const auto write = [&](const char* name, std::string_view text) {
    write_whole_file((directory / name).string(), text);
  };
  write(kConfig, nn::model_family(config_.model.name).config.text(metadata.spec, metadata.class_names));
  if (const auto& pieces = metadata.word_pieces) {
    std::string text;
    for (const std::string& piece : pieces->pieces()) text += piece + '\n';
    write(kPieces, text);
    const data::TextRules& rules = pieces->words().rules();
    using Marks = data::TextRules::Marks;
    const std::optional<bool> strips =
        rules.marks == Marks::kLeftOutUnlessHeld ? std::nullopt : std::optional(rules.marks == Marks::kLeftOut);
    write(kTokenizerConfig, JsonObject{{"tokenizer_class", "BertTokenizer"},
                                       {"do_lower_case", rules.lower_case},
                                       {"strip_accents", strips},
                                       {"tokenize_chinese_chars", rules.split_ideographs}}
                                .text());
  }
  for (const auto& [name, text] : byte_pairs_) write(name.c_str(), text);
}

session::SavedFile SavedWeights::write(const std::optional<BestEvaluation>& best) const {
  const auto begun = Clock::now();
  // With a moving average, it: what was evaluated last.
  std::optional<nn::MovingAverage::InPlace> in_place;
  if (average_ != nullptr) in_place.emplace(*average_);
  auto metadata = model_metadata_of(config_, dataset_);
  metadata.best = best;
  report_status({.kind = StatusReport::Kind::kSaving, .text = config_.save});
  nn::write_weights(config_.save, nn::state_of(model_), checkpoint::metadata_of(metadata));
  if (config_.save_directory) write_beside(metadata);
  report_status({.kind = StatusReport::Kind::kSaved});
  return session::saved_file(config_.save, begun);
}

bool SavedWeights::has(const BestEvaluation& best) const {
  try {
    const auto there = checkpoint::read_model_metadata(config_.save);
    return there && there->best && there->best->metric == best.metric && there->best->step >= best.step;
  } catch (const IoError&) {
    return false;  // there is none, or it is another one
  }
}

std::optional<session::SavedFile> SavedWeights::save_best(const BestEvaluation& best) {
  try {
    const session::SavedFile saved = write(best);
    failure_.clear();
    return saved;
  } catch (const IoError& error) {
    failure_ = error.what();
    remedy_ = error.remedy();
    log_warn("the best weights so far, of step {}, are not saved: {} → {}; training continues", best.step, failure_,
             remedy_);
    return std::nullopt;
  }
}

std::optional<session::SavedFile> SavedWeights::finish(const std::optional<BestEvaluation>& best) {
  if (config_.save.empty()) return std::nullopt;
  const bool keeps_best = keeps_best_weights(config_) && best;
  if (keeps_best && !failure_.empty())
    throw IoError(
        fmt::format("training is complete, but its best weights, of step {}, are lost: {}", best->step, failure_),
        remedy_);
  if (keeps_best) return std::nullopt;
  try {
    return write({});
  } catch (const IoError& error) {
    throw IoError(fmt::format("training is complete, but its weights are lost: {}", error.what()), error.remedy());
  }
}

void resume_best(const TrainConfig& config, const checkpoint::CheckpointManifest& manifest, const SavedWeights& saved,
                 comm::ProcessGroup& group, BestWatch& best) {
  best.restore(manifest.evaluations);
  const std::optional<BestEvaluation> known = best.history().best;
  if (!keeps_best_weights(config) || !known) return;
  const bool lost = group.rank() == 0 && !saved.has(*known);
  if (group.all_gather_numbers(lost ? 1 : 0).front() == 0) return;
  if (group.rank() == 0)
    log_warn("--save-best: {} does not have the best weights, of step {}: the next evaluation is taken for the best",
             config.save, known->step);
  best.forget_best();
}

}  // namespace lockstep::trainer
