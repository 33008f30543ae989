#include "simulate/step_profile.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/file.h"
#include "base/json_value.h"
#include "base/statistics.h"

namespace lockstep::simulate {
namespace {

constexpr const char* kKind = "step profile";
constexpr std::uint64_t kFormat = 1;
constexpr std::uint64_t kMostRanks = 1 << 20, kMostElements = std::uint64_t{1} << 40;
constexpr double kMostMs = 1e9;
constexpr std::size_t kMostGradients = 1 << 20;

}  // namespace

std::uint64_t StepProfile::gradient_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& each : gradients) bytes += each.slot.count * size_of(each.slot.dtype);
  return bytes;
}

void StepProfile::scale_to(double wanted_ms) {
  const double factor = wanted_ms / median(step_ms);
  for (auto& each : gradients) each.ready_ms *= factor;
  backward_ms *= factor;
  update_ms *= factor;
  for (double& ms : step_ms) ms *= factor;
}

std::vector<std::size_t> StepProfile::ready_order() const {
  std::vector<std::size_t> order(gradients.size());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});  // those that are ready at once: the last one first
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return gradients[i].ready_ms; });
  return order;
}

std::string text_of(const StepProfile& p) {
  std::vector<JsonText> gradients;
  for (const auto& each : p.gradients)
    gradients.emplace_back(JsonObject{{"name", each.slot.name},
                                      {"count", each.slot.count},
                                      {"dtype", name_of(each.slot.dtype)},
                                      {"rows", each.slot.rows},
                                      {"ready_ms", each.ready_ms}});
  const JsonObject json = {{"kind", kKind},
                           {"format", kFormat},
                           {"model", p.model},
                           {"batch", p.batch},
                           {"precision", p.precision},
                           {"device", p.device},
                           {"threads", p.threads},
                           {"ranks", p.ranks},
                           {"cores", p.cores},
                           {"version", p.version},
                           {"backward_ms", p.backward_ms},
                           {"update_ms", p.update_ms},
                           {"copy_bytes_per_s", p.copy_bytes_per_s},
                           {"flops_per_step", p.flops_per_step},
                           {"memory_bytes", p.memory_bytes},
                           {"slot_alignment", p.arena_alignment},
                           {"gradients", gradients},
                           {"step_ms", p.step_ms}};
  return json.text() + "\n";
}

StepProfile parse_profile(std::string_view text, const std::string& name) {
  const JsonMembers file(text, 3, name, "give a file of lockstep bench step MODEL --profile-out FILE");
  if (!file.has("kind", kKind)) file.refuse("this is no profile of a step");
  if (file.whole("format", 0, UINT32_MAX) != kFormat) file.refuse("it was written by another version");
  StepProfile p;
  p.model = file.text("model");
  p.precision = file.text("precision");
  p.device = file.text("device");
  p.version = file.text("version");
  p.batch = static_cast<std::int64_t>(file.whole("batch", 1, std::uint64_t{1} << 24));
  p.threads = static_cast<int>(file.whole("threads", 1, kMostRanks));
  p.ranks = static_cast<int>(file.whole("ranks", 1, kMostRanks));
  if (file.has("cores")) p.cores = static_cast<int>(file.whole("cores", 0, kMostRanks));
  p.backward_ms = file.number("backward_ms", 0, kMostMs);
  p.update_ms = file.number("update_ms", 0, kMostMs);
  p.copy_bytes_per_s = file.number("copy_bytes_per_s", 0, 1e15);
  p.flops_per_step = file.number("flops_per_step", 0, 1e24);
  p.memory_bytes = file.whole("memory_bytes", 0, UINT64_MAX);
  p.arena_alignment = file.whole("slot_alignment", 1, 1 << 20);
  for (const JsonMembers& one : file.objects("gradients", kMostGradients)) {
    StepProfile::Gradient gradient;
    gradient.slot.name = one.text("name");
    gradient.slot.count = one.whole("count", 0, kMostElements);
    const std::string dtype = one.text("dtype");
    if (dtype != name_of(DType::kF32) && dtype != name_of(DType::kF64)) one.refuse("a 'dtype' is neither f32 nor f64");
    gradient.slot.dtype = dtype == name_of(DType::kF64) ? DType::kF64 : DType::kF32;
    gradient.slot.rows = one.whole("rows", 1, kMostElements);
    gradient.ready_ms = one.number("ready_ms", 0, kMostMs);
    p.gradients.push_back(std::move(gradient));
  }
  p.step_ms = file.numbers("step_ms", 1 << 24, 0, kMostMs);
  if (p.backward_ms <= 0 || std::ranges::any_of(p.step_ms, [](double ms) { return ms <= 0; }))
    file.refuse("a step takes no time");
  return p;
}

StepProfile read_profile(const std::string& path) { return parse_profile(MappedFile(path).text(), path); }

}  // namespace lockstep::simulate
