
#include "base/error.h"
#include "base/json.h"
#include "base/signals.h"
#include "base/text.h"
#include "data/vocabulary.h"
#include "inference/continuation.h"
#include "inference/workers.h"
#include "lockstep/base/deadline.h"

namespace lockstep::inference {
namespace {

constexpr const char* kBetween = "---------------\n";

struct Prompt {
  std::string text;
  std::vector<std::int32_t> tokens;  // none: an empty line, which nothing continues
};

/// What all workers look at.
struct SharedTexts {
  std::shared_ptr<const data::Vocabulary> vocabulary;
  std::vector<Prompt> prompts;
  std::uint64_t samples = 1;  // of each prompt
  std::int64_t tokens = kDefaultTokens;
  TokenChoice choice;
};

class TextWorker final : public InferWorker {
 public:
  TextWorker(const InferConfig& config, const nn::LanguageModel& model, std::shared_ptr<const SharedTexts> shared,
             nn::Backend& backend)
      : json_(config.json),
        shared_(std::move(shared)),
        text_(backend, model, dtype_of(config.precision)),
        chooser_(shared_->choice) {}

  void run(std::uint64_t job, const Put& put, Tally& tally) override {
    const Prompt& prompt = shared_->prompts[job / shared_->samples];
    if (!json_ && !put((job > 0 ? kBetween : "") + prompt.text)) return;
    const auto start = Clock::now();
    std::string all;
    const std::int64_t tokens = generate(job, prompt.tokens, tally, [&](std::string_view piece) {
      if (!json_) return put(piece);
      all += piece;
      return stop_signal() == 0;
    });
    if (tokens < 0) return;
    const double ms = 1e3 * seconds_between(start, Clock::now());
    ++tally.results;
    tally.result_ms.push_back(ms);
    if (!json_) {
      put("\n");
      return;
    }
    const JsonObject json = {{"event", "text"}, {"prompt", prompt.text}, {"sample", job % shared_->samples},
                             {"text", all},     {"tokens", tokens},      {"latency_ms", ms}};
    put(json.text() + "\n");
  }

 private:
  /// Returns how many tokens came, or −1 when `tell`, which gets whole characters, wants no more.
  template <class Tell>
  std::int64_t generate(std::uint64_t job, std::span<const std::int32_t> prompt, Tally& tally, const Tell& tell) {
    const data::Vocabulary& vocabulary = *shared_->vocabulary;
    data::Utf8Joiner joiner;
    auto last = Clock::now();
    std::int64_t made = 0;
    if (prompt.empty()) return made;
    text_.begin(prompt, shared_->tokens);
    while (made < shared_->tokens) {
      // Models may have places for more tokens than there are.
      const std::int32_t token = chooser_.choose(text_.logits().first(static_cast<std::size_t>(vocabulary.size())), job,
                                                 static_cast<std::uint64_t>(made));
      const auto now = Clock::now();
      (made == 0 ? tally.first_token_ms : tally.token_ms).push_back(1e3 * seconds_between(last, now));
      last = now;
      ++made;
      ++tally.tokens;
      if (token == vocabulary.end_of_text()) break;
      if (!tell(joiner.add(vocabulary.decode(std::span(&token, 1))))) return -1;
      if (made < shared_->tokens) text_.add(token);
    }
    return tell(joiner.finish()) ? made : -1;
  }

  bool json_;
  std::shared_ptr<const SharedTexts> shared_;
  Continuation text_;
  TokenChooser chooser_;
};

std::shared_ptr<const data::Vocabulary> open_vocabulary(const InferConfig& config, const InferModel& model) {
  const std::int64_t tokens = model.language()->vocabulary();
  const bool characters = model.metadata && model.metadata->characters != nullptr;
  if (config.vocabulary.empty() && !config.merges.empty())
    throw UsageError("--merges without --vocab", "give both: GPT-2's vocab.json and merges.txt");
  if (config.vocabulary.empty()) {
    if (characters) return model.metadata->characters;
    return std::make_shared<const data::TokenNumbers>(static_cast<int>(tokens));
  }
  if (characters)
    throw UsageError(fmt::format("--vocab for {}, which was trained on {} characters", config.weights, tokens),
                     "leave --vocab and --merges out: the file says its characters");
  auto pairs = std::make_shared<const data::BytePairs>(config.vocabulary, config.merges);
  if (pairs->size() > tokens)
    throw UsageError(fmt::format("{} has {} tokens, and the model {}", config.vocabulary, pairs->size(), tokens),
                     "give the vocabulary that the model was trained with");
  return pairs;
}

std::vector<Prompt> open_prompts(const InferConfig& config, const data::Vocabulary& vocabulary) {
  std::vector<Prompt> prompts;
  for (PromptText& prompt : read_prompts(config)) {
    if (prompt.second)
      throw UsageError(
          fmt::format("{}: its rows are pairs of texts, and {} continues one", config.input, config.model.name),
          "say which column is the text: --text COLUMN");
    auto tokens = vocabulary.encode(prompt.text, prompt.source);
    if (tokens.empty() && vocabulary.end_of_text()) tokens = {*vocabulary.end_of_text()};
    if (tokens.empty() && config.prompt)
      throw UsageError("--prompt: an empty prompt: there is nothing to continue", "give a character, or more");
    if (tokens.empty() && !config.lines)
      throw IoError(fmt::format("{}: it is empty: there is nothing to continue", prompt.source),
                    "write a prompt into it");
    prompts.push_back({std::move(prompt.text), std::move(tokens)});
  }
  return prompts;
}

}  // namespace

InferTask text_task(const InferConfig& config, const InferModel& model) {
  const auto shared = std::make_shared<SharedTexts>();
  shared->vocabulary = open_vocabulary(config, model);
  shared->prompts = open_prompts(config, *shared->vocabulary);
  shared->samples = static_cast<std::uint64_t>(config.samples.value_or(1));
  shared->tokens = config.tokens.value_or(kDefaultTokens);
  shared->choice = {.temperature = config.temperature.value_or(1.0),
                    .top_k = config.top_k.value_or(0),
                    .seed = config.seed.value_or(kDefaultSeed)};
  return {.kind = InferReport::Kind::kTexts,
          .jobs = shared->prompts.size() * shared->samples,
          .doing = "generating",
          .make_worker = [&config, &model, shared](nn::Backend& stream, std::size_t device) {
            return std::make_unique<TextWorker>(config, *model.language(device), shared, stream);
          }};
}

}  // namespace lockstep::inference
