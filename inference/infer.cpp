#include "inference/infer.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "base/log.h"
#include "base/stop.h"
#include "base/text.h"
#include "inference/workers.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/world.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/session/session.h"
#include "session/device_request.h"
#include "session/memory.h"
#include "session/opening.h"

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
}

void refuse_image_flags(const InferConfig& config, const char* what) {
  refuse("top", config.top.has_value(), what);
  refuse("class-names", !config.class_names.empty(), what);
  refuse("image-size", config.image_size.has_value(), what);
}

/// A world of one, with the device that `config` asks for.
session::Session open_alone(const InferConfig& config) {
  session::SessionOptions options;
  options.device = config.device;
  options.precision = config.precision;
  options.tf32 = config.tf32;
  options.threads = 1;  // streams have their own
  options.quiet = config.quiet;
  options.log_level = config.log_level;
  session::SessionChecks checks;
  checks.before = [] {
    const auto world = comm::discover_world(env);
    if (world.size > 1)
      throw UsageError(fmt::format("lockstep infer as one of {} ranks: each would do all of it", world.size),
                       "start it by itself: --threads T makes T streams");
  };
  return session::open_session(options, checks);
}

InferTask open_task(const InferConfig& config, const InferModel& model, const std::optional<RandomInput>& random) {
  if (random) {
    refuse_text_flags(config, "synthetic inputs");
    refuse_image_flags(config, "synthetic inputs");
    return random_task(config, model, *random);
  }
  if (model.reads_texts()) {
    refuse_writing_flags(config, "a model that reads texts");
    refuse("image-size", config.image_size.has_value(), "a model of text");
    return read_task(config, model);
  }
  if (model.language() != nullptr) {
    refuse_image_flags(config, "a model of text");
    return text_task(config, model);
  }
  refuse_text_flags(config, "a model of images");
  refuse("seed", config.seed.has_value() && !config.non_strict, "a model of images");
  return image_task(config, model);
}

int streams_of(const InferConfig& config, const session::Session& session, std::uint64_t jobs) {
  if (config.threads > 0) return config.threads;
  const int most = session.device.kind == DeviceKind::kCpu ? session.cores : 1;
  return static_cast<int>(std::min<std::uint64_t>(jobs, static_cast<std::uint64_t>(std::max(1, most))));
}

void run(const InferConfig& config, session::Session& session) {
  std::optional<RandomInput> random;
  if (config.input.starts_with(kRandomInput)) random = parse_random_input(config.input);
  // Images and texts come one at a time: only flags can ask for more than there is.
  const auto check = [&](const nn::ModelSpec& spec) {
    if (!random) return;
    // random_task() refuses what the model does not take.
    const nn::ModelFamily& family = nn::model_family(spec.name);
    if (family.takes_tokens && !family.takes_images && random->sample.size() != 1) return;
    if (const auto most = nn::most_tokens(spec); most && random->sample[0] > *most) return;
    session::check_memory(*session.group, *session.backend,
                          estimate_memory(spec, *session.backend, random->batch, dtype_of(config.precision),
                                          std::max(1, config.threads)));
  };
  const InferModel model =
      open_model(config, *session.backend, random ? std::optional(random->sample) : std::nullopt, check);
  const InferTask task = open_task(config, model, random);
  const StreamsOptions options = {.streams = streams_of(config, session, task.jobs),
                                  .jobs = task.jobs,
                                  .warmup = config.warmup,
                                  .doing = task.doing};
  StreamsResult result = run_streams(*session.backend, options, task.make_worker);
  const std::uint64_t corrupt = result.tally.corrupt;
  const InferReport report{.kind = task.kind,
                           .device = session.device,
                           .streams = options.streams,
                           .wall_s = result.wall_s,
                           .tally = std::move(result.tally)};
  if (!config.quiet) {
    if (config.json)
      std::printf("%s\n", json_of(report).c_str());
    else
      log_info("{}", text_of(report));
  }
  if (corrupt > 0)
    throw IoError(fmt::format("{} of {} image{} could not be read", corrupt, task.jobs, task.jobs == 1 ? "" : "s"),
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
  session::check_cpu_numbers(config.device, device);
  if (device.indices.size() > 1)
    throw UsageError(fmt::format("--device {}: infer computes on one device", config.device),
                     "name one of them; --threads T makes T streams on it");
  session::check_log_level(config.log_level);
  InferConfig same = config;  // options are bound to what they can change
  infer_options(same).check();
}

int infer(const InferConfig& config) {
  install_stop_handlers();
  validate(config);
  session::Session session = open_alone(config);
  run(config, session);
  session.shutdown();
  return 0;
}

}  // namespace lockstep::inference
