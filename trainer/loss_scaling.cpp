#include "trainer/carried_state.h"

#include <cmath>
#include <cstring>
#include <span>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agree.h"
#include "trainer/resume.h"

namespace lockstep::trainer {
namespace {

constexpr const char* kTensor = "grad_scaler";
constexpr std::int64_t kNumbers = 3;  // scale, good steps, skipped steps: f32, in which they are on the device too

nn::GradScaler::State read_scaler(const checkpoint::Resumed& resumed) {
  const std::string file = fmt::format("{}/{}", resumed.path, checkpoint::kScalerFile);
  for (const nn::HostTensor& tensor : nn::read_safetensors(file)) {
    if (tensor.name != kTensor || tensor.dtype != DType::kF32 || tensor.shape != std::vector<std::int64_t>{kNumbers})
      continue;
    float numbers[kNumbers] = {};
    std::memcpy(numbers, tensor.bytes.data(), sizeof numbers);
    const bool counts = numbers[1] >= 0 && numbers[1] <= 0x1p24f && numbers[2] >= 0 && numbers[2] <= 0x1p24f;
    if (!counts || !std::isfinite(numbers[0]) || !(static_cast<double>(numbers[0]) >= nn::GradScaler::kLeastScale))
      break;
    return {.scale = numbers[0],
            .good_steps = static_cast<std::int64_t>(numbers[1]),
            .skipped_steps = static_cast<std::int64_t>(numbers[2])};
  }
  throw IoError(fmt::format("{}: it has no scale of losses", file), "");
}

}  // namespace

bool is_loss_scale(const std::string& text) {
  if (text.empty() || text == kDynamic) return true;
  const auto number = parse_double(text);
  return number && *number >= nn::GradScaler::kLeastScale && std::isfinite(static_cast<float>(*number));
}

std::unique_ptr<nn::GradScaler> make_grad_scaler(const TrainConfig& config, nn::Backend& backend) {
  if (config.precision != Precision::kFp16) return nullptr;
  nn::GradScaler::Options options;
  if (!config.loss_scale.empty() && config.loss_scale != kDynamic) {
    options.initial_scale = *parse_double(config.loss_scale);
    options.dynamic = false;
  }
  return std::make_unique<nn::GradScaler>(backend, options);
}

std::optional<LossScaling> scaling_of(const nn::GradScaler* scaler) {
  if (scaler == nullptr) return std::nullopt;
  const auto state = scaler->state();
  return LossScaling{.scale = static_cast<double>(state.scale),
                     .next_scale = static_cast<double>(state.scale),
                     .good_steps = state.good_steps,
                     .skipped_steps = state.skipped_steps};
}

std::vector<nn::HostTensor> scaler_tensors(const nn::GradScaler* scaler) {
  if (scaler == nullptr) return {};
  const auto state = scaler->state();
  const float numbers[kNumbers] = {state.scale, static_cast<float>(state.good_steps),
                                   static_cast<float>(state.skipped_steps)};
  nn::HostTensor tensor{.name = kTensor, .shape = {kNumbers}, .bytes = {}};
  const auto bytes = std::as_bytes(std::span(numbers));
  tensor.bytes.assign(bytes.begin(), bytes.end());
  return {std::move(tensor)};
}

void resume_scaler(const checkpoint::Resumed& resumed, nn::GradScaler& scaler, comm::ProcessGroup& group) {
  if (!resumed.manifest.files.contains(checkpoint::kScalerFile)) {
    if (group.rank() == 0)
      log_info("checkpoint {} is of a run that scaled no losses: the scale begins at {}", resumed.path,
               scaler.state().scale);
    return;
  }
  float numbers[kNumbers] = {};
  comm::run_collectively(group, [&] {
    if (group.rank() != resumed.reader) return;
    run_on_checkpoint(resumed.path, [&] {
      const auto state = read_scaler(resumed);
      numbers[0] = state.scale;
      numbers[1] = static_cast<float>(state.good_steps);
      numbers[2] = static_cast<float>(state.skipped_steps);
    });
  });
  group.broadcast(std::span<float>(numbers), resumed.reader);
  // A constant scale is a setting of this run, whatever that one had come to.
  scaler.set_state({.scale = scaler.options().dynamic ? numbers[0] : scaler.state().scale,
                    .good_steps = static_cast<std::int64_t>(numbers[1]),
                    .skipped_steps = static_cast<std::int64_t>(numbers[2])});
}

}  // namespace lockstep::trainer
