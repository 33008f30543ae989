#include "inference/export.h"

#include <fmt/format.h>

#include <limits>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/text.h"
#include "checkpoint/model_metadata.h"
#include "inference/model.h"
#include "inference/workers.h"
#include "session/opening.h"
#include "session/saved_file.h"

namespace lockstep::inference {
namespace {

constexpr const char* kEnding = ".onnx";

void check(const ExportConfig& config) {
  nn::check_model_name(config.model.name);
  check_usage(!config.weights.empty(), "export without weights", "give --weights FILE");
  check_usage(!config.output.empty(), "export without a file to write", "give --output FILE.onnx");
  if (!config.output.ends_with(kEnding))
    throw UsageError(fmt::format("--output {}: its name does not end in {}", config.output, kEnding),
                     "name it so: programs know the format by that");
  session::check_log_level(config.log_level);
}

// Of another program's file what inference assumes.
checkpoint::ModelMetadata metadata_for(const ExportConfig& config, const InferModel& model) {
  checkpoint::ModelMetadata metadata;
  if (model.metadata) metadata = *model.metadata;
  metadata.spec = model.spec;
  const auto& dims = model.spec.sample_shape;
  const bool images = dims.size() == 3 && (dims[2] == 1 || dims[2] == 3);
  if (images && (!model.metadata || metadata.image != nullptr))
    metadata.image = std::make_shared<const data::ImageForm>(image_form_of(config, model));
  metadata.class_names = class_names_of(config, model);
  return metadata;
}

}  // namespace

std::vector<nn::OnnxInput> onnx_inputs_of(const nn::ModelSpec& spec) {
  const nn::ModelFamily& family = nn::model_family(spec.name);
  if (family.takes_tokens && spec.sample_shape.size() == 1) {
    const nn::Shape tokens = {1, nn::most_tokens(spec).value_or(std::numeric_limits<std::int32_t>::max())};
    const auto of_tokens = [&](const char* name) {
      return nn::OnnxInput{.name = name, .shape = tokens, .dtype = DType::kI32, .any_length = true};
    };
    if (!family.word_pieces) return {of_tokens("input")};
    return {of_tokens("input"), of_tokens("token_types"), {.name = "lengths", .shape = {1}, .dtype = DType::kI32}};
  }
  nn::Shape samples = {1};
  for (const std::int64_t extent : spec.sample_shape) samples = samples.with_last(extent);
  std::vector<nn::OnnxInput> inputs = {{.shape = samples}};
  if (!spec.categories.empty())
    inputs.push_back({.name = "categories", .shape = {1, std::ssize(spec.categories)}, .dtype = DType::kI32});
  return inputs;
}

int export_onnx(const ExportConfig& config) {
  watch_for_stops();
  check(config);
  ExportConfig on_cpu = config;
  on_cpu.device = "cpu";
  session::Session session = open_alone(on_cpu, "export", "start it by itself");
  nn::Backend* const backend = session.backend.get();
  const InferModel model = open_model(
      on_cpu, {&backend, 1}, std::nullopt, [](const nn::ModelSpec&) {}, /*fused=*/false);
  throw_if_stopped("exporting");
  nn::OnnxOptions options;
  options.metadata = checkpoint::metadata_of(metadata_for(config, model));
  options.metadata.erase("format");  // of the file of weights
  const auto begun = Clock::now();
  const nn::OnnxReport report =
      nn::export_onnx(*backend, *model.modules.front(), onnx_inputs_of(model.spec), config.output, options);
  log_info("{}, {} nodes{}", describe(session::saved_file(config.output, begun)), report.nodes,
           report.data_bytes == 0
               ? std::string()
               : fmt::format(", and {}.data: {}", config.output, human_bytes(static_cast<double>(report.data_bytes))));
  session.shutdown();
  return 0;
}

}  // namespace lockstep::inference
