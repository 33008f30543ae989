#include "cli/infer_command.h"

#include <cstdio>

#include "cli/model_options.h"
#include "cli/values.h"
#include "data/image_views.h"
#include "trainer/applicability.h"
#include "trainer/infer/infer.h"

namespace lockstep::cli {
namespace {

constexpr std::int64_t kMostCount = std::int64_t{1} << 40;

using trainer::InferConfig;

Setter optional_text(std::optional<std::string>& target) {
  return [&target](const std::string& text) -> std::optional<Complaint> {
    target = text;
    return std::nullopt;
  };
}

void add_model(OptionTable& table, InferConfig& config) {
  add_model_name(table, config.model);
  table.group("Model");
  add_weight_file(table, {config.weights, config.non_strict, config.keep_prefix},
                  "its weights, which say the model's sizes, classes and characters where lockstep train has saved "
                  "them");
  add_model_sizes(table, config.model,
                  {.hidden = "the weights'",
                   .layers = "the weights'",
                   .heads = "the weights', of gpt2 width / 64",
                   .width = "the weights'",
                   .context = "the weights'"});
}

void add_input(OptionTable& table, InferConfig& config) {
  table.group("Input");
  table.add({.name = "input",
             .kind = OptionKind::kList,
             .placeholder = "FILE|DIR|random:SHAPE|-",
             .help = "image files with commas between, or a directory of them; a file with a prompt, or - for standard "
                     "input; random:NxCxHxW or random:NxF: made up, with ,LEN behind it so many of them",
             .set = text(config.input)});
  table.add({.name = "prompt",
             .placeholder = "TEXT",
             .help = "gpt, lstm: what to go on with, instead of --input",
             .set = optional_text(config.prompt)});
  table.exclusive({"input", "prompt"});
  table.add({.name = "lines",
             .kind = OptionKind::kFlag,
             .help = "gpt, lstm: each line of the input is a prompt",
             .set = boolean(config.lines)});
  table.group("Images");
  table.add({.name = "top",
             .placeholder = "K",
             .help = "how many of the likeliest classes are told",
             .default_text = fmt::to_string(trainer::kDefaultTop),
             .set = integer(config.top, 1, 1 << 24)});
  table.add({.name = "class-names",
             .placeholder = "FILE",
             .help = "names of the classes, one a line",
             .default_text = "what the weights say, or numbers",
             .set = text(config.class_names)});
  table.add({.name = "image-size",
             .placeholder = "N",
             .help = "ResNets, cnn: height and width of what the model sees, in pixels",
             .default_text = "what the weights say, or 224, of resnet18-cifar 32",
             .set = integer(config.image_size, 1, data::kMostImageSize)});
}

void add_text(OptionTable& table, InferConfig& config) {
  table.group("Text");
  table.add({.name = "tokens",
             .synonyms = {"max-new-tokens"},
             .placeholder = "N",
             .help = "most tokens to generate",
             .default_text = fmt::to_string(trainer::kDefaultTokens),
             .set = integer(config.tokens, 1, kMostCount)});
  table.add({.name = "samples",
             .placeholder = "N",
             .help = "texts for each prompt",
             .default_text = "1",
             .set = integer(config.samples, 1, kMostCount)});
  table.add({.name = "temperature",
             .placeholder = "X",
             .help = "logits are divided by it; 0: always the likeliest token",
             .default_text = "1",
             .set = number(config.temperature, {})});
  table.add({.name = "top-k",
             .placeholder = "K",
             .help = "draw from the K likeliest tokens; 0: from all",
             .default_text = "0",
             .set = integer(config.top_k, 0, kMost)});
  table.add({.name = "vocab",
             .placeholder = "FILE",
             .help = "GPT-2's vocab.json, for models of its tokens",
             .set = text(config.vocabulary)});
  table.add({.name = "merges", .placeholder = "FILE", .help = "GPT-2's merges.txt", .set = text(config.merges)});
  table.add({.name = "seed",
             .placeholder = "N",
             .help = "of drawn tokens and made-up inputs: the same seed gives the same, on any number of streams",
             .default_text = fmt::to_string(trainer::kDefaultSeed),
             .set = integer(config.seed, 0, kMost)});
}

void add_streams(OptionTable& table, InferConfig& config) {
  table.group("Streams and device");
  table.add({.name = "threads",
             .placeholder = "T",
             .help = "streams that work side by side over one copy of the weights; on the CPU each computes on a core",
             .default_text = "a core each, on a GPU 1, but not more than inputs",
             .set = integer(config.threads, 1, 4096)});
  table.add({.name = "device",
             .placeholder = "auto|cpu|cuda|cuda:3|cuda:free",
             .help = "what to compute on: the CPU, or of the GPUs that CUDA_VISIBLE_DEVICES leaves the first, the one "
                     "with that number, or the one with most free memory",
             .default_text = config.device,
             .set = text(config.device)});
  table.add(
      {.name = "precision",
       .placeholder = "f32|bf16",
       .help = "what GPUs compute in",
       .default_text = name_of(config.precision),
       .set = choice(config.precision, {{"f32", trainer::Precision::kF32}, {"bf16", trainer::Precision::kBF16}})});
  table.add({.name = "tf32",
             .kind = OptionKind::kFlag,
             .help = "GPUs multiply f32 with 10 bits of mantissa, which is several times faster",
             .set = boolean(config.tf32)});
}

void add_report(OptionTable& table, InferConfig& config) {
  table.group("Reports");
  table.add({.name = "json",
             .kind = OptionKind::kFlag,
             .help = "results and report as JSON, an object a line",
             .set = boolean(config.json)});
  table.add({.name = "warmup",
             .placeholder = "N",
             .help = "runs of the first input by each stream before anything is measured",
             .default_text = fmt::to_string(config.warmup),
             .set = integer(config.warmup, 0, kMostCount)});
  table.add({.name = "log-level",
             .placeholder = "debug|info|warn|error",
             .help = "what goes to stderr",
             .default_text = config.log_level,
             .set = text(config.log_level)});
  table.add({.name = "quiet",
             .kind = OptionKind::kFlag,
             .help = "no report, only results, warnings and errors",
             .set = boolean(config.quiet)});
  add_config_option(table);
}

}  // namespace

OptionTable infer_options(InferConfig& config) {
  OptionTable table(
      "infer",
      "Runs MODEL on images, text or made-up inputs: prints the likeliest classes, goes on with a text, or "
      "tells the size of the result.");
  add_model(table, config);
  add_input(table, config);
  add_text(table, config);
  add_streams(table, config);
  add_report(table, config);
  table.applicability([&config](const std::string& name, bool typed) -> std::optional<Complaint> {
    const auto found = trainer::inapplicable(config, name);
    if (!found) return std::nullopt;
    // A file or an environment that serves lockstep train too has these for that.
    if (!typed && name == "seed") return config.seed.reset(), std::nullopt;
    if (!typed && name == "image-size") return config.image_size.reset(), std::nullopt;
    return Complaint{found->why, found->remedy};
  });
  return table;
}

int infer_command(const Sources& sources, const ForeignFlags& foreign) {
  InferConfig config;
  const OptionTable table = infer_options(config);
  if (parse_options(table, sources, foreign).help) {
    std::fputs(table.help().c_str(), stdout);
    return 0;
  }
  return trainer::infer(config);
}

}  // namespace lockstep::cli
