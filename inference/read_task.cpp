// Texts that a model reads as a whole: their classes, or the tokens that are masked in them.
#include <algorithm>
#include <array>
#include <optional>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "base/text.h"
#include "checkpoint/model_metadata.h"
#include "data/labelled_texts.h"
#include "data/table_file.h"
#include "data/text_file.h"
#include "data/text_table.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"
#include "lockstep/nn/ops/transfer.h"

namespace lockstep::inference {
namespace {

constexpr std::string_view kMask = "[MASK]";

struct ReadText {
  std::string text;
  data::EncodedText encoded;
};

/// What all workers look at.
struct SharedReads {
  std::shared_ptr<const data::WordPieces> pieces;
  std::vector<std::string> class_names;
  std::vector<ReadText> texts;
  std::size_t most = 0;  // tokens of a sample
  int top = kDefaultTop;
  bool masked = false;
};

class ReadWorker final : public InferWorker {
 public:
  ReadWorker(const InferConfig& config, nn::Module& module, std::int64_t classes,
             std::shared_ptr<const SharedReads> shared, nn::Backend& backend)
      : config_(config),
        module_(module),
        classes_(static_cast<std::size_t>(classes)),
        shared_(std::move(shared)),
        backend_(backend),
        tape_(backend) {
    tape_.set_recording(false);
    tape_.set_activations(dtype_of(config.precision));
  }

  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    const auto start = Clock::now();
    const ReadText& read = shared_->texts[job];
    const data::EncodedText& text = read.encoded;
    tokens_.resize(std::min(shared_->most, text.tokens()));
    types_.resize(tokens_.size());
    data::write_sample(*shared_->pieces, text, tokens_, types_);
    positions_.clear();
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      if (shared_->masked && tokens_[i] == shared_->pieces->mask()) positions_.push_back(static_cast<std::int32_t>(i));
    if (!shared_->masked || !positions_.empty()) compute();
    const double ms = 1e3 * seconds_between(start, Clock::now());
    ++tally.results;
    tally.result_ms.push_back(ms);
    put(shared_->masked ? masks_text(read.text, ms) : classes_text(read.text, ms));
  }

 private:
  nn::Var input(std::vector<std::int32_t>& values, const nn::Shape& shape) {
    nn::Tensor tensor = backend_.empty(shape, DType::kI32);
    backend_.upload(std::as_bytes(std::span(values)), tensor);
    return tape_.input(tensor);
  }

  // Fills logits_: of the text, or of each mask.
  void compute() {
    const auto length = static_cast<std::int64_t>(tokens_.size());
    std::vector<std::int32_t> lengths = {static_cast<std::int32_t>(length)};
    nn::Vars inputs = {input(tokens_, {1, length}), input(types_, {1, length}), input(lengths, {1})};
    if (shared_->masked)
      inputs = {inputs[0], inputs[1], inputs[2], input(positions_, {1, static_cast<std::int64_t>(positions_.size())})};
    logits_ = nn::values_of(backend_, module_.forward_all(tape_, inputs)[0].value());
    tape_.reset();
  }

  std::span<const Ranked> ranked(std::size_t row) {
    auto logits = std::span<const float>(logits_).subspan(row * classes_, classes_);
    // Models may have places for more tokens than there are.
    if (shared_->masked) logits = logits.first(static_cast<std::size_t>(shared_->pieces->size()));
    return ranking_.of(logits, shared_->top);
  }

  std::string name_of(std::int32_t i) const {
    if (shared_->masked) return shared_->pieces->pieces()[static_cast<std::size_t>(i)];
    const auto at = static_cast<std::size_t>(i);
    return at < shared_->class_names.size() ? shared_->class_names[at] : fmt::format("class {}", i);
  }

  std::vector<JsonText> json_of(std::span<const Ranked> ranked, const char* what) const {
    std::vector<JsonText> all;
    for (const auto& [number, probability] : ranked)
      all.emplace_back(JsonObject{{what, number}, {"name", name_of(number)}, {"probability", probability}});
    return all;
  }
  std::string line_of(std::span<const Ranked> ranked) const {
    std::string line;
    for (const auto& [number, probability] : ranked)
      line += fmt::format("{} {} {:.2f} %", line.empty() ? "" : ",", printable(name_of(number)), 100 * probability);
    return line;
  }
  // Texts may be long: their beginning is enough to know them by.
  static std::string shown(const std::string& text) { return cut_columns(text, 60); }

  std::string classes_text(const std::string& text, double ms) {
    const auto classes = ranked(0);
    if (!config_.json) return shown(text) + ":" + line_of(classes) + "\n";
    return JsonObject{{"event", "text"}, {"input", text}, {"classes", json_of(classes, "class")}, {"latency_ms", ms}}
               .text() +
           "\n";
  }

  std::string masks_text(const std::string& text, double ms) {
    std::vector<JsonText> masks;
    std::string lines = shown(text) + "\n";
    for (std::size_t i = 0; i < positions_.size(); ++i) {
      const auto tokens = ranked(i);
      if (config_.json)
        masks.emplace_back(JsonObject{{"position", positions_[i]}, {"tokens", json_of(tokens, "token")}});
      else
        lines += fmt::format("  {} {}:{}\n", kMask, i + 1, line_of(tokens));
    }
    if (!config_.json) return lines;
    return JsonObject{{"event", "text"}, {"input", text}, {"masks", masks}, {"latency_ms", ms}}.text() + "\n";
  }

  const InferConfig& config_;
  nn::Module& module_;
  std::size_t classes_;  // columns of its logits
  std::shared_ptr<const SharedReads> shared_;
  nn::Backend& backend_;
  nn::Tape tape_;
  Ranking ranking_;
  std::vector<std::int32_t> tokens_, types_, positions_;
  std::vector<float> logits_;
};

std::shared_ptr<const data::WordPieces> open_pieces(const InferConfig& config, const InferModel& model) {
  auto pieces = checkpoint::open_word_pieces(config.vocabulary, config.cased, model.metadata, config.weights);
  if (pieces == nullptr)
    throw UsageError(fmt::format("{} does not say which word pieces its tokens are", config.weights),
                     "give the vocabulary that it was trained with: --vocab vocab.txt");
  if (!config.vocabulary.empty() && !config.quiet)
    log_info("{}: {} word pieces, texts are read {}", config.vocabulary, pieces->size(), pieces->reads());
  const std::int64_t tokens = model.spec.vocabulary > 0 ? model.spec.vocabulary : model.spec.classes;
  if (pieces->size() > tokens)
    throw UsageError(fmt::format("{} has {} word pieces, and the model {}", config.vocabulary, pieces->size(), tokens),
                     "give the vocabulary that the model was trained with");
  return pieces;
}

/// Of a table whose second column of two is no text, but what the model is asked for.
void refuse_classes_as_texts(const InferConfig& config, const std::vector<PromptText>& prompts,
                             const std::vector<std::string>& classes) {
  const auto is_class = [&](const std::string& text) {
    return std::ranges::find(classes, trim(text)) != classes.end();
  };
  if (!config.table.has("text") && prompts.front().second &&
      std::ranges::any_of(std::array{false, true}, [&](bool second) {
        return std::ranges::all_of(prompts, [&](const auto& row) { return is_class(second ? *row.second : row.text); });
      }))
    throw UsageError(
        fmt::format("{}: in each row, one text of the pair is a class of {}", config.input, config.weights),
        "say which column is the text: --text COLUMN");
}

}  // namespace

InferTask read_task(const InferConfig& config, const InferModel& model) {
  const auto shared = std::make_shared<SharedReads>();
  shared->pieces = open_pieces(config, model);
  shared->masked = model.spec.vocabulary == 0;
  shared->most = static_cast<std::size_t>(model.spec.settings.integer("context"));
  constexpr std::size_t kLeast = 5;  // two texts of a token each
  if (shared->most < kLeast)
    throw UsageError(fmt::format("{} takes {} tokens, [CLS] and [SEP] included", config.weights, shared->most),
                     fmt::format("use a model with a --context of {} or more", kLeast));
  shared->top = config.top.value_or(kDefaultTop);
  shared->class_names = class_names_of(config, model);
  std::size_t cut = 0;
  data::UnknownTokens unknown(*shared->pieces);
  if (!config.prompt && !config.lines && data::is_table(config.input))
    throw UsageError(fmt::format("{} is a table, and would be read as one text", config.input),
                     fmt::format("give --lines to read each row as a text; --input - <{} reads it as one text",
                                 data::shell_word(config.input)));
  auto prompts = read_prompts(config);
  refuse_classes_as_texts(config, prompts, shared->class_names);
  for (PromptText& prompt : prompts) {
    ReadText read;
    if (shared->masked) {
      if (prompt.second)
        throw UsageError(
            fmt::format("{}: its rows are pairs of texts, and {} predicts tokens of one", config.input, config.weights),
            "say which column is the text: --text COLUMN");
      read.encoded.first = shared->pieces->encode(prompt.text, prompt.source);
      // An empty line has an empty result.
      if (!(config.lines && read.encoded.first.empty()) &&
          std::ranges::find(read.encoded.first, shared->pieces->mask()) == read.encoded.first.end())
        throw UsageError(
            fmt::format("{}: {} predicts masked tokens, and none is masked", prompt.source, config.weights),
            "write [MASK] in their places");
      if (read.encoded.tokens() > shared->most)
        throw UsageError(
            fmt::format("{}: {} tokens, and the model takes {}", prompt.source, read.encoded.tokens(), shared->most),
            "give a shorter text");
    } else {
      if (const std::size_t tab = prompt.text.find('\t'); !prompt.of_table && tab != std::string::npos) {
        prompt.second = prompt.text.substr(tab + 1);
        prompt.text.resize(tab);
      }
      read.encoded.first = shared->pieces->encode(prompt.text, prompt.source);
      read.encoded.pair = prompt.second.has_value();
      if (read.encoded.pair) read.encoded.second = shared->pieces->encode(*prompt.second, prompt.source);
    }
    unknown.add(read.encoded.first);
    unknown.add(read.encoded.second);
    if (read.encoded.tokens() > shared->most) ++cut;
    read.text = std::move(prompt.text);
    if (prompt.second) read.text += "\t" + *prompt.second;
    if (!prompt.file.empty()) read.text = std::move(prompt.file);
    shared->texts.push_back(std::move(read));
  }
  if (const auto warning = unknown.warning(config.prompt ? "--prompt" : config.input)) log_warn("{}", *warning);
  if (cut > 0)
    log_warn("{} of {} texts have more than the {} tokens that the model takes, and are cut", cut, shared->texts.size(),
             shared->most);
  return {.kind = InferReport::Kind::kReadTexts,
          .jobs = shared->texts.size(),
          .doing = "reading",
          .make_worker = [&config, &model, shared](nn::Backend& stream, std::size_t device) {
            return std::make_unique<ReadWorker>(config, *model.modules[device], model.spec.classes, shared, stream);
          }};
}

}  // namespace lockstep::inference
