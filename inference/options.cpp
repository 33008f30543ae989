#include "base/error.h"
#include "inference/export.h"
#include "inference/infer.h"

#include "checkpoint/model_options.h"
#include "data/resample.h"
#include "data/table_file.h"
#include "data/text_table.h"
#include "lockstep/nn/models/models.h"
#include "options/sources.h"
#include "options/values.h"
#include "session/opening.h"

namespace lockstep::inference {
namespace {

using options::Applies;
using options::boolean;
using options::integer;
using options::kMost;
using options::number;
using options::OptionKind;
using options::OptionTable;
using options::text;

constexpr std::int64_t kMostCount = std::int64_t{1} << 40;

Applies applies_to(std::string what, const InferConfig& config, bool (*takes)(const InferConfig& config),
                   std::string (*instead)(const InferConfig& config)) {
  return {.to = std::move(what), .unless = [&config, takes, instead]() -> std::optional<std::string> {
            if (takes(config)) return std::nullopt;
            return instead(config);
          }};
}

const nn::ModelFamily* family_of(const InferConfig& config) { return nn::find_model_family(config.model.name); }
bool is_random(const InferConfig& config) { return config.input.starts_with(kRandomInput); }
/// Of an unknown model nobody can say what it takes: others complain of it.
bool takes_prompts(const InferConfig& config) {
  return (family_of(config) == nullptr || family_of(config)->takes_tokens) && !is_random(config);
}
bool continues_texts(const InferConfig& config) {
  return takes_prompts(config) && (family_of(config) == nullptr || !family_of(config)->word_pieces);
}
bool reads_texts(const InferConfig& config) {
  return takes_prompts(config) && (family_of(config) == nullptr || family_of(config)->word_pieces);
}
bool names_classes(const InferConfig& config) {
  const nn::ModelFamily* const family = family_of(config);
  return (family == nullptr || family->takes_images || family->takes_categories || family->word_pieces) &&
         !is_random(config);
}
bool takes_images(const InferConfig& config) {
  return (family_of(config) == nullptr || family_of(config)->takes_images) && !is_random(config);
}
bool takes_image_sizes(const InferConfig& config) {
  const nn::ModelFamily* const family = family_of(config);
  return takes_images(config) && (family == nullptr || (!family->takes_tokens && !family->takes_vectors));
}
bool takes_tables(const InferConfig& config) {
  return (family_of(config) == nullptr || family_of(config)->takes_vectors) && !is_random(config);
}
bool draws_tokens(const InferConfig& config) { return continues_texts(config) && config.temperature.value_or(1) > 0; }
std::string instead(const InferConfig& config) {
  return is_random(config) ? "this run has --input " + config.input : "the model is " + config.model.name;
}
std::string no_draws(const InferConfig& config) {
  return continues_texts(config) ? std::string("the temperature is 0") : instead(config);
}

Applies to_prompts(const InferConfig& config) {
  return applies_to(
      fmt::format("texts, which {} take", nn::models_that([](const auto& family) { return family.takes_tokens; })),
      config, takes_prompts, instead);
}

Applies to_texts(const InferConfig& config) {
  return applies_to(fmt::format("texts that {} continue", nn::models_that([](const auto& family) {
                                  return family.takes_tokens && !family.word_pieces;
                                })),
                    config, continues_texts, instead);
}

Applies to_classes(const InferConfig& config) {
  return applies_to(fmt::format("images and rows that are classified, and texts that {} read",
                                nn::models_that([](const auto& family) { return family.word_pieces; })),
                    config, names_classes, instead);
}

void add_model(OptionTable& table, InferConfig& config) {
  checkpoint::add_model_name(table, config.model);
  table.group("Model");
  checkpoint::add_weight_file(
      table, config,
      "its weights; a file that lockstep train saved also has the model's sizes, classes and characters");
  checkpoint::add_model_structure(table, config.model, "the weights'");
}

// How tables are read: lockstep train has the same for its data.
void add_table_settings(OptionTable& table, InferConfig& config) {
  const auto is_read = [](const InferConfig& c) {
    return takes_prompts(c) && !c.prompt && c.lines && data::is_table(c.input);
  };
  // The columns of other tables are those of the weights.
  const auto has_quotes = [](const InferConfig& c) {
    return (data::is_table(c.input) || c.input == "-") &&
           (takes_tables(c) || (takes_prompts(c) && !c.prompt && c.lines));
  };
  const auto reason = [](const InferConfig& c) {
    return !takes_prompts(c) ? instead(c)
           : c.prompt        ? std::string("this run has --prompt")
           : !c.lines        ? std::string("this run has no --lines")
                             : "this run has --input " + c.input;
  };
  for (const auto& spec : data::text_table_settings(/*classes=*/false)) {
    const bool quotes = spec.name == data::kQuotes;
    Applies applies = applies_to(quotes ? "tables (.csv, .tsv)" : "tables (.csv, .tsv) that are read with --lines",
                                 config, quotes ? +has_quotes : +is_read, reason);
    applies.forget = [&config] { config.table = {}; };
    table.add({.name = spec.name,
               .placeholder = spec.placeholder,
               .help = spec.help,
               .default_text = spec.default_text,
               .value = options::setting(config.table, spec),
               .applies = std::move(applies)});
  }
}

void add_class_names(OptionTable& table, InferConfig& config) {
  table.add({.name = "class-names",
             .placeholder = "FILE",
             .help = "names of the classes, one per line",
             .default_text = "the weights', or numbers",
             .value = text(config.class_names),
             .applies = to_classes(config)});
}

void add_image_size(OptionTable& table, InferConfig& config) {
  const std::string sized = fmt::format("images that {} classify", nn::models_that([](const auto& family) {
                                          return family.takes_images && !family.takes_tokens && !family.takes_vectors;
                                        }));
  Applies sizes = applies_to(sized, config, takes_image_sizes, instead);
  sizes.forget = [&config] { config.image_size.reset(); };  // lockstep train has one for its data
  table.add({.name = "image-size",
             .placeholder = "N",
             .help = "height and width of the model's input, in pixels",
             .default_text = "the weights', or the model's usual size",
             .value = integer(config.image_size, 1, data::kMostImageSize),
             .applies = sizes});
}

void add_input(OptionTable& table, InferConfig& config) {
  table.group("Input");
  table.add({.name = "input",
             .kind = OptionKind::kList,
             .placeholder = "FILE|DIR|random:SHAPE|-",
             .help = "image files separated by commas, or a directory of them; a table (.csv, .tsv); a file with a "
                     "prompt, a directory of "
                     ".txt files, or - for standard input; random:NxCxHxW or random:NxF: synthetic, followed by ,LEN "
                     "for LEN of them",
             .value = text(config.input)});
  table.add({.name = "prompt",
             .placeholder = "TEXT",
             .help = "text to continue or to read, instead of --input",
             .value = text(config.prompt),
             .applies = to_prompts(config)});
  table.exclusive({"input", "prompt"});
  table.add({.name = "lines",
             .kind = OptionKind::kFlag,
             .help = "each line of the input (row of a .csv or .tsv table) is a prompt, or a text to read, with a "
                     "result of its own",
             .value = boolean(config.lines),
             .applies = applies_to(
                 "texts that are read from --input", config,
                 [](const InferConfig& c) { return takes_prompts(c) && !c.prompt; },
                 [](const InferConfig& c) { return c.prompt ? std::string("this run has --prompt") : instead(c); })});
  add_table_settings(table, config);
  table.group("Images and classes");
  table.add({.name = "top",
             .placeholder = "K",
             .help = "how many of the likeliest classes, or masked tokens, to print",
             .default_text = fmt::to_string(kDefaultTop),
             .value = integer(config.top, 1, 1 << 24),
             .applies = to_classes(config)});
  add_class_names(table, config);
  add_image_size(table, config);
}

void add_text(OptionTable& table, InferConfig& config) {
  table.group("Text");
  table.add({.name = "tokens",
             .synonyms = {"max-new-tokens"},
             .placeholder = "N",
             .help = "most tokens to generate",
             .default_text = fmt::to_string(kDefaultTokens),
             .value = integer(config.tokens, 1, kMostCount),
             .applies = to_texts(config)});
  table.add({.name = "samples",
             .placeholder = "N",
             .help = "texts for each prompt",
             .default_text = "1",
             .value = integer(config.samples, 1, kMostCount),
             .applies = to_texts(config)});
  table.add({.name = "temperature",
             .placeholder = "X",
             .help = "logits are divided by it; 0: always the likeliest token",
             .default_text = "1",
             .value = number(config.temperature, {}),
             .applies = to_texts(config)});
  options::Binding top_k = integer(config.top_k, 0, kMost);
  top_k.asked = [&config] { return config.top_k.value_or(0) > 0; };
  table.add({.name = "top-k",
             .placeholder = "K",
             .help = "draw from the K likeliest tokens; 0: from all",
             .default_text = "0",
             .value = std::move(top_k),
             .applies = applies_to("tokens that are drawn", config, draws_tokens, no_draws)});
  table.add({.name = "vocab",
             .placeholder = "FILE",
             .help = "GPT-2's vocab.json, with merges.txt beside it, or tokenizer.json, for models of its tokens; the "
                     "vocab.txt of a BERT",
             .value = text(config.vocabulary),
             .applies = to_prompts(config)});
  options::Binding cased = boolean(config.cased);
  cased.asked = [&config] { return config.cased.has_value(); };
  table.add({.name = "cased",
             .placeholder = "yes|no",
             .help = "whether texts keep capital letters and accents",
             .default_text = "as the weights, the vocabulary or a tokenizer_config.json beside it say",
             .value = std::move(cased),
             .applies = applies_to(
                 fmt::format("texts that {} read", nn::models_that([](const auto& f) { return f.word_pieces; })),
                 config, reads_texts, instead)});
  table.add({.name = "merges",
             .placeholder = "FILE",
             .help = "GPT-2's merges.txt, if it lies elsewhere",
             .value = text(config.merges),
             .applies = to_texts(config)});
  Applies drawn = applies_to(
      "tokens that are drawn, synthetic inputs and parameters that the weights lack", config,
      [](const InferConfig& c) { return is_random(c) || draws_tokens(c) || c.non_strict || family_of(c) == nullptr; },
      no_draws);
  drawn.forget = [&config] { config.seed.reset(); };  // lockstep train has one
  table.add({.name = "seed",
             .placeholder = "N",
             .help = "seed of drawn tokens and synthetic inputs: the same on any number of streams",
             .default_text = fmt::to_string(kDefaultSeed),
             .value = integer(config.seed, 0, kMost),
             .applies = drawn});
}

void add_streams(OptionTable& table, InferConfig& config) {
  table.group("Streams and device");
  table.add({.name = "threads",
             .placeholder = "T",
             .help = "concurrent streams of all devices together; those of a device share one copy of its weights; on "
                     "the CPU each computes on one core",
             .default_text = "one per core or per GPU, but not more than inputs",
             .value = integer(config.threads, 1, 4096, /*unset=*/0)});
  options::Binding batch = integer(config.batch, 1, kMostCount);
  batch.asked = [&config] { return config.batch.value_or(1) > 1; };
  Applies together = applies_to(
      "images, rows and synthetic inputs: texts are taken one by one", config,
      [](const InferConfig& c) { return is_random(c) || takes_images(c) || takes_tables(c); }, instead);
  together.forget = [&config] { config.batch.reset(); };  // lockstep train has one
  table.add({.name = "batch",
             .synonyms = {"batch-size", "b"},
             .placeholder = "B",
             .help = "images, rows or synthetic inputs per batch of a stream",
             .default_text = "1, of rows 256",
             .value = std::move(batch),
             .applies = std::move(together)});
  table.add({.name = "device",
             .placeholder = "auto|cpu|cpu:0,1|cuda|cuda:3|cuda:0,1|cuda:free",
             .help = "device to compute on; cuda: the first GPU; cuda:0,1: these GPUs; cuda:free: the GPU with most "
                     "free memory; numbers count the GPUs in CUDA_VISIBLE_DEVICES; several devices each hold a copy of "
                     "the weights and share the streams",
             .default_text = config.device,
             .value = text(config.device)});
  table.add({.name = "precision",
             .placeholder = "f32|bf16|int8w",
             .help = "type to compute in; bf16: weights and activations (on the CPU with AVX-512); int8w: int8 "
                     "weights, on the CPU, for models of text with attention; sums stay f32",
             .default_text = "f32",
             .value = options::choice(
                 config.precision,
                 {{"f32", InferPrecision::kF32}, {"bf16", InferPrecision::kBF16}, {"int8w", InferPrecision::kInt8W}})});
  table.add(session::tf32_option(config.tf32, config.device));
}

void add_report(OptionTable& table, InferConfig& config) {
  table.group("Reports");
  table.add({.name = "output",
             .synonyms = {"o"},
             .placeholder = "FILE",
             .help = "file for the results: it is there once all are done",
             .default_text = "stdout",
             .value = text(config.output)});
  table.add({.name = "json",
             .kind = OptionKind::kFlag,
             .help = "results and report as JSON, an object per line",
             .value = boolean(config.json)});
  table.add({.name = "warmup",
             .placeholder = "N",
             .help = "unmeasured runs of the first input by each stream, before all others",
             .default_text = fmt::to_string(config.warmup),
             .value = integer(config.warmup, 0, kMostCount)});
  table.add(session::log_level_option(config.log_level, "least level of messages on stderr"));
  table.add({.name = "quiet",
             .kind = OptionKind::kFlag,
             .help = "no report, only results, warnings and errors",
             .value = boolean(config.quiet)});
  options::add_config_option(table, config.config_file);
}

}  // namespace

OptionTable infer_options(InferConfig& config) {
  OptionTable table("infer",
                    "Runs MODEL on images, text or synthetic inputs, and prints the likeliest classes, the continued "
                    "text, or the size of the result.");
  add_model(table, config);
  add_input(table, config);
  add_text(table, config);
  add_streams(table, config);
  add_report(table, config);
  return table;
}

OptionTable export_onnx_options(ExportConfig& config) {
  OptionTable table("export onnx",
                    "Writes MODEL with its weights as an ONNX file (opset 17, f32) for onnxruntime and other programs. "
                    "The number of samples is free, and so is the length of texts, up to what the model takes.");
  add_model(table, config);
  table.group("File");
  table.add({.name = "output",
             .placeholder = "FILE.onnx",
             .help = "where to; weights of more than 2 GB are in FILE.onnx.data, which belongs beside it",
             .value = text(config.output)});
  add_class_names(table, config);
  add_image_size(table, config);
  table.group("Reports");
  table.add(session::log_level_option(config.log_level, "least level of messages on stderr"));
  options::add_config_option(table);
  return table;
}

}  // namespace lockstep::inference
