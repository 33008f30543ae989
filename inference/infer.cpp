#include "inference/infer.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/text.h"
#include "inference/model.h"
#include "inference/workers.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/session/session.h"
#include "session/device_choice.h"
#include "session/memory.h"
#include "session/opening.h"
#include "session/saved_file.h"

namespace lockstep::inference {
namespace {

void refuse(const char* flag, bool given, const char* what) {
  if (given) throw UsageError(fmt::format("--{} with {}", flag, what), fmt::format("leave --{} out", flag));
}

// Of texts that are continued.
void refuse_writing_flags(const InferConfig& config, const char* what) {
  refuse("tokens", config.tokens.has_value(), what);
  refuse("samples", config.samples.has_value(), what);
  refuse("temperature", config.temperature.has_value(), what);
  refuse("top-k", config.top_k.has_value(), what);
  refuse("merges", !config.merges.empty(), what);
}

void refuse_text_flags(const InferConfig& config, const char* what) {
  refuse_writing_flags(config, what);
  refuse("prompt", config.prompt.has_value(), what);
  refuse("lines", config.lines, what);
  refuse("vocab", !config.vocabulary.empty(), what);
  refuse("cased", config.cased.has_value(), what);
}

void refuse_image_flags(const InferConfig& config, const char* what) {
  refuse("top", config.top.has_value(), what);
  refuse("class-names", !config.class_names.empty(), what);
  refuse("image-size", config.image_size.has_value(), what);
}

/// Inputs that were opened before the model was.
struct Inputs {
  std::optional<RandomInput> random;
  std::shared_ptr<const ImageFiles> images;
};

InferTask open_task(const InferConfig& config, const InferDevices& devices, const InferModel& model, Inputs inputs) {
  if (inputs.random) {
    refuse_text_flags(config, "synthetic inputs");
    refuse_image_flags(config, "synthetic inputs");
    return random_task(config, model, devices, *inputs.random);
  }
  if (model.metadata && model.metadata->table != nullptr) {
    refuse_text_flags(config, "a model of tables");
    refuse("image-size", config.image_size.has_value(), "a model of tables");
    refuse("seed", config.seed.has_value() && !config.non_strict, "a model of tables");
    return table_task(config, model);
  }
  if (model.reads_texts()) {
    refuse_writing_flags(config, "a model that reads texts");
    refuse("image-size", config.image_size.has_value(), "a model of text");
    refuse("batch", config.batch.value_or(1) > 1, "a model of text, which reads its texts one by one");
    return read_task(config, model);
  }
  if (model.language() != nullptr) {
    refuse_image_flags(config, "a model of text");
    refuse("cased", config.cased.has_value(), "a model that continues texts");
    refuse("batch", config.batch.value_or(1) > 1, "a model of text, which continues its prompts one by one");
    return text_task(config, model);
  }
  refuse_text_flags(config, "a model of images");
  refuse("seed", config.seed.has_value() && !config.non_strict, "a model of images");
  return image_task(config, model, std::move(inputs.images));
}

int streams_of(const InferConfig& config, const session::Session& session, std::uint64_t jobs) {
  if (config.threads > 0) return config.threads;
  const auto devices = static_cast<int>(session.devices.size());
  const int most = session.device.kind == DeviceKind::kCpu ? std::max(session.cores, devices) : devices;
  return static_cast<int>(std::min<std::uint64_t>(jobs, static_cast<std::uint64_t>(most)));
}

/// Only flags can ask for more than there is: without them, images and texts come one at a time.
void check_memory(const InferConfig& config, const InferDevices& devices, const session::Session& session,
                  const nn::ModelSpec& spec, const Inputs& inputs) {
  std::int64_t batch = config.batch.value_or(1);
  std::uint64_t count = 0;  // of inputs
  if (inputs.random) {
    const nn::ModelFamily& family = nn::model_family(spec.name);
    // random_task() refuses it.
    if (family.takes_tokens && !family.takes_images && inputs.random->sample.size() != 1) return;
    if (const auto most = nn::most_tokens(spec); most && inputs.random->sample[0] > *most)
      throw UsageError(fmt::format("--input {} for a model of {} positions", config.input, *most),
                       fmt::format("give --input random:{}x{}", inputs.random->batch, *most));
    count = inputs.random->count;
    batch = static_cast<std::int64_t>(inputs_together(config, *inputs.random));
  } else if (inputs.images != nullptr) {
    count = inputs.images->size();
    batch = std::min(batch, static_cast<std::int64_t>(count));
  } else {
    return;
  }
  // Those that compute something: others take no memory for it, unless they warm up.
  const std::uint64_t jobs = (count - 1) / static_cast<std::uint64_t>(batch) + 1;
  auto streams = static_cast<std::uint64_t>(std::max(config.threads, static_cast<int>(devices.size())));
  if (config.warmup == 0) streams = std::min(streams, jobs);
  const std::int64_t samples = inputs.random ? batch * inputs.random->batch : batch;
  const auto needs =
      estimate_memory(spec, devices[0], samples, dtype_of(config.precision), static_cast<int>(streams), devices.size());
  const bool is_cpu = session.device.kind == DeviceKind::kCpu;  // whose memory is one
  for (std::size_t i = 0; i < (is_cpu ? 1 : devices.size()); ++i)
    session::check_memory(*session.group, devices[i], needs);
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw IoError("cannot write to standard output: " + errno_text(errno), "is the disk full, or the reader gone?");
}

/// The file takes the place of another as a whole: not of one that is read.
void check_output(const InferConfig& config) {
  std::vector<std::string> read = {config.weights, config.vocabulary, config.merges, config.class_names,
                                   config.config_file};
  for (const std::string& input : split(config.input, ',')) read.push_back(input);
  for (const std::string& file : read)
    if (!file.empty() && is_same_file(file, config.output))
      throw UsageError(fmt::format("--output {} is {}, which is read", config.output, file), "give another file");
}

/// The same command shall run on other numbers of inputs.
void warn_of_unused(const InferConfig& config, const InferTask& task, int streams, std::size_t devices) {
  if (std::cmp_greater_equal(streams, devices)) return;
  const bool one = task.jobs == 1;
  const char* const unit = task.batch > 1 ? (one ? "batch of inputs" : "batches of inputs") : one ? "input" : "inputs";
  log_warn("--device {} names {} devices, and there {} {} {}: the others stay unused", config.device, devices,
           one ? "is" : "are", task.jobs, unit);
}

void run(const InferConfig& config, session::Session& session) {
  std::optional<AtomicFile> output;
  if (!config.output.empty()) {
    check_output(config);
    output.emplace(config.output);
  }
  Inputs inputs;
  if (config.input.starts_with(kRandomInput)) inputs.random = parse_random_input(config.input);
  const InferDevices devices(config, session);
  const auto check = [&](const nn::ModelSpec& spec) {
    if (inputs.random && !spec.categories.empty())
      throw UsageError(fmt::format("--input {} for a model of tables with categories", config.input),
                       "give it a table: --input FILE.csv");
    if (!inputs.random && !config.prompt && spec.sample_shape.size() == 3)
      inputs.images = std::make_shared<const ImageFiles>(config.input);
    check_memory(config, devices, session, spec, inputs);
  };
  const InferModel model = open_model(config, devices.backends(),
                                      inputs.random ? std::optional(inputs.random->sample) : std::nullopt, check);
  const InferTask task = open_task(config, devices, model, std::move(inputs));
  const StreamsOptions options = {.streams = streams_of(config, session, task.jobs),
                                  .jobs = task.jobs,
                                  .warmup = config.warmup,
                                  .doing = task.doing,
                                  .print = [&](std::string_view text) {
                                    if (output)
                                      output->write(std::as_bytes(std::span(text)));
                                    else
                                      print(text);
                                  }};
  warn_of_unused(config, task, options.streams, devices.size());
  StreamsResult result = run_streams(devices.backends(), options, task.make_worker);
  const auto begun = Clock::now();
  if (output) output->commit();
  const std::uint64_t corrupt = result.tally.corrupt, images = corrupt + result.tally.results;
  const InferReport report{.kind = task.kind,
                           .device = devices.describe(),
                           .streams = options.streams,
                           .batch = task.batch,
                           .wall_s = result.wall_s,
                           .tally = std::move(result.tally)};
  if (!config.quiet) {
    if (config.json)
      std::printf("%s\n", json_of(report).c_str());
    else
      log_info("{}", text_of(report));
    if (output && !config.json) log_info("{}", describe(session::saved_file(config.output, begun)));
  }
  if (corrupt > 0)
    throw IoError(fmt::format("{} of {} image{} could not be read", corrupt, images, images == 1 ? "" : "s"),
                  "the warnings above name them; all others are done");
}

}  // namespace

void validate(const InferConfig& config) {
  if (config.model.name.empty()) throw UsageError("no model was named", "name one of " + join(nn::model_names(), ", "));
  nn::check_model_name(config.model.name);
  check_usage(config.input.empty() != !config.prompt.has_value(), "infer needs one input",
              "give --input FILE, DIR or random:SHAPE, or for text --prompt TEXT, and not both");
  if (config.weights.empty() && !config.input.starts_with(kRandomInput))
    throw UsageError("infer without weights",
                     "give --weights FILE; only synthetic inputs (--input random:…) go without");
  const session::DeviceRequest device = session::parse_device(config.device);
  session::check_named_once(config.device, device, "name each device once; --threads T makes T streams");
  if (config.threads > 0 && std::cmp_less(config.threads, device.indices.size()))
    throw UsageError(fmt::format("--threads {} with --device {}: {} devices, and {} stream{}", config.threads,
                                 config.device, device.indices.size(), config.threads, config.threads == 1 ? "" : "s"),
                     fmt::format("give each device a stream: --threads {}, or name fewer", device.indices.size()));
  session::check_log_level(config.log_level);
  InferConfig same = config;  // options are bound to what they can change
  infer_options(same).check();
}

int infer(const InferConfig& config) {
  watch_for_stops();
  validate(config);
  session::Session session = open_alone(
      config, "infer", "start it by itself: --threads T makes T streams, --device cuda:0,1 takes several devices");
  run(config, session);
  session.shutdown();
  return 0;
}

}  // namespace lockstep::inference
