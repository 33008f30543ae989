// What bench step prints.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/json.h"
#include "base/text.h"
#include "bench/step.h"
#include "trainer/progress_text.h"

namespace lockstep::bench {
namespace {

JsonObject json_of(const Timeline& timeline) {
  std::vector<JsonText> buckets;
  for (const auto& bucket : timeline.buckets)
    buckets.emplace_back(JsonObject{{"bytes", bucket.bytes},
                                    {"ready_ms", rounded(bucket.ready_ms)},
                                    {"start_ms", rounded(bucket.start_ms)},
                                    {"end_ms", rounded(bucket.end_ms)}});
  return {{"clock", timeline.clock},
          {"last_ready_ms", rounded(timeline.last_ready_ms)},
          {"end_ms", rounded(timeline.end_ms)},
          {"communication_ms", rounded(timeline.communication_ms())},
          {"hidden_ms", rounded(timeline.hidden_ms())},
          {"buckets", buckets}};
}

std::optional<double> floor_of(const nn::OperationCost& cost, const StepResult& result) {
  return result.measured ? floor_ms(cost, *result.measured, result.precision) : std::nullopt;
}

/// The share of measured products that a rank's step reaches.
std::optional<double> measured_share(const StepResult& r) {
  const auto rate = r.measured ? r.measured->product_tflops(r.precision) : std::nullopt;
  return rate ? std::optional(1e-9 * r.flops_per_step / r.step_ms / *rate) : std::nullopt;
}

/// The share of its cores' multiply-adds in f32.
std::optional<double> core_share(const StepResult& r) {
  if (!r.measured || !r.measured->core_flops || r.precision != "f32") return std::nullopt;
  return 1e3 * r.flops_per_step / r.step_ms / (*r.measured->core_flops * r.threads);
}

JsonObject json_of(const devices::MeasuredRates& rates, const StepResult& result) {
  JsonObject json;
  if (rates.copy_bytes_per_s) json.add("copy_bytes_per_s", *rates.copy_bytes_per_s).add("copy_bytes", rates.copy_bytes);
  for (const auto& product : rates.products)
    if (product.precision == result.precision)
      json.add("product_tflops", rounded(product.tflops)).add("product_width", product.width);
  if (const auto share = measured_share(result)) json.add("mfu", rounded_share(*share));
  if (rates.core_flops) json.add("core_flops", *rates.core_flops);
  if (const auto share = core_share(result)) json.add("core_share", rounded_share(*share));
  return json;
}

/// The share of the memory's peak that an operation's tensors were moved at.
std::optional<double> share_of_peak(const nn::OperationCost& cost, const Profile& profile) {
  if (!profile.peak_bytes_per_s || cost.ms <= 0) return std::nullopt;
  return 1e3 * cost.bytes / cost.ms / *profile.peak_bytes_per_s;
}

JsonObject json_of(const Profile& profile, const StepResult& result) {
  std::vector<JsonText> operations;
  for (const auto& cost : profile.operations) {
    JsonObject one = {{"operation", cost.operation},
                      {"calls", cost.calls},
                      {"ms", rounded(cost.ms)},
                      {"bytes", cost.bytes},
                      {"flops", cost.flops}};
    if (const auto share = share_of_peak(cost, profile)) one.add("share_of_peak_bandwidth", rounded(*share));
    if (const auto least = floor_of(cost, result)) one.add("floor_ms", rounded(*least, 1e6));
    operations.emplace_back(one);
  }
  JsonObject json = {{"step_ms", rounded(profile.step_ms)}, {"operations", operations}};
  if (profile.peak_bytes_per_s) json.add("peak_bytes_per_s", *profile.peak_bytes_per_s);
  return json;
}

std::string table_of(const Profile& profile, const StepResult& result) {
  std::string text = fmt::format("  one step, operation by operation: {:.3f} ms\n", profile.step_ms);
  for (const auto& cost : profile.operations) {
    const auto share = share_of_peak(cost, profile), least = floor_of(cost, result);
    text += fmt::format("    {:<34}{:>6} ×{:>10.3f} ms{}{}{}\n", cost.operation, cost.calls, cost.ms,
                        least ? fmt::format("{:>10.3f} ms at least", *least) : std::string(),
                        share ? fmt::format("{:>8.1f} % of peak bandwidth", 100 * *share) : std::string(),
                        cost.flops > 0 ? fmt::format("{:>9.1f} TFLOP/s", 1e-9 * cost.flops / cost.ms) : std::string());
  }
  return text;
}

JsonObject json_of(const StepResult& r) {
  JsonObject json = {{"model", r.model},
                     {"world_size", r.world_size},
                     {"batch", r.batch},
                     {"device", r.device},
                     {"precision", r.precision},
                     {"step_ms", rounded(r.step_ms)},
                     {"samples_per_s", rounded(r.samples_per_s, 10)},
                     {"compute_ms", rounded(r.compute_ms)},
                     {"exposed_comm_ms", rounded(r.exposed_comm_ms)},
                     {"flops_per_step", r.flops_per_step},
                     {"tflops", rounded(1e-9 * r.flops_per_step / r.step_ms)},
                     {"graphs", r.graphs},
                     {"replays_per_step", rounded(r.replays_per_step)},
                     {"peak_memory_bytes", r.peak_memory_bytes},
                     {"startup_ms", rounded(r.startup_ms, 10)},
                     {"step_ms_p10", rounded(r.step_ms_p10)},
                     {"step_ms_p90", rounded(r.step_ms_p90)},
                     {"backend", r.backend},
                     {"threads", r.threads},
                     {"steps", r.steps},
                     {"steps_a_block", r.steps_a_block}};
  if (!r.bf16_by.empty()) json.add("bf16_by", r.bf16_by);
  if (r.peak_tflops) json.add("peak_tflops", *r.peak_tflops);
  if (r.mfu) json.add("mfu", rounded_share(*r.mfu));
  if (r.measured) json.add("measured", json_of(*r.measured, r));
  if (!r.graphs_refused.empty()) json.add("graphs_refused", r.graphs_refused);
  if (!r.engines.empty()) {
    JsonObject engines, fallbacks;
    for (const auto& [operation, choice] : r.engines) {
      engines.add(operation, choice.engine);
      if (!choice.because.empty()) fallbacks.add(operation, choice.because);
    }
    json.add("engines", engines).add("fallbacks", fallbacks);
  }
  if (r.kernels_per_step > 0) json.add("kernels_per_step", r.kernels_per_step);
  if (r.hook)
    json.add("comm_hook", r.hook->name)
        .add("comm_bytes", std::round(r.hook->bytes_sent))
        .add("comm_bytes_without_hook", std::round(r.hook->bytes_without_hook))
        .add("comm_fallbacks", r.hook->fallbacks);
  json.add("buckets", r.buckets).add("bucket_bytes", r.bucket_bytes);
  if (r.bucket_choice) {
    std::vector<JsonText> trials;
    for (const auto& trial : r.bucket_choice->trials)
      trials.emplace_back(
          JsonObject{{"bucket_bytes", trial.bucket_bytes}, {"step_ms", rounded(1e3 * trial.step_seconds)}});
    json.add("bucket_trials", trials).add("bucket_trial_steps", r.bucket_choice->steps);
  }
  if (r.timeline) json.add("timeline", json_of(*r.timeline));
  if (!r.bottlenecks.empty()) json.add("bottlenecks", r.bottlenecks);
  if (r.profile) json.add("profile", json_of(*r.profile, r));
  return json;
}

std::string csv_of(const StepResult& r) {
  const auto shown = [](const std::optional<double>& share) {
    return share ? fmt::format("{:.4f}", *share) : std::string();
  };
  return fmt::format(
      "model,world_size,batch,precision,step_ms,samples_per_s,compute_ms,exposed_comm_ms,peak_memory_bytes,startup_ms,"
      "step_ms_p10,step_ms_p90,backend,threads,steps,flops_per_step,mfu,graphs,mfu_measured\n"
      "{},{},{},{},{:.4f},{:.1f},{:.4f},{:.4f},{},{:.1f},{:.4f},{:.4f},{},{},{},{:.0f},{},{},{}\n",
      r.model, r.world_size, r.batch, r.precision, r.step_ms, r.samples_per_s, r.compute_ms, r.exposed_comm_ms,
      fmt::join(r.peak_memory_bytes, " "), r.startup_ms, r.step_ms_p10, r.step_ms_p90, r.backend, r.threads, r.steps,
      r.flops_per_step, shown(r.mfu), r.graphs, shown(measured_share(r)));
}

std::string table_of(const StepResult& r) {
  std::vector<std::string> memory;
  for (const auto bytes : r.peak_memory_bytes) memory.push_back(human_bytes(static_cast<double>(bytes)));
  std::string text =
      fmt::format("{}: {} rank{} ({}), {} thread{} and {} samples each, {} steps\n", r.model, r.world_size,
                  r.world_size == 1 ? "" : "s", r.backend, r.threads, r.threads == 1 ? "" : "s", r.batch, r.steps);
  text += fmt::format("  on {}, {}{}{}\n", r.device, r.precision, r.bf16_by.empty() ? "" : " (" + r.bf16_by + ")",
                      r.graphs                        ? ", each step as one CUDA graph"
                      : !r.device.starts_with("cuda") ? ""
                                                      : ", steps are not captured: " + r.graphs_refused);
  text += fmt::format("  step                   {:>10.3f} ms   10 % to 90 %: {:.3f} to {:.3f}\n", r.step_ms,
                      r.step_ms_p10, r.step_ms_p90);
  text += fmt::format("  computation            {:>10.3f} ms   collectives replaced by nothing\n", r.compute_ms);
  text +=
      fmt::format("  exposed communication  {:>10.3f} ms   step minus computation, interleaved\n", r.exposed_comm_ms);
  text += fmt::format("  throughput             {:>10.1f} samples/s\n", r.samples_per_s);
  text += fmt::format("  arithmetic             {:>10.3f} TFLOP/s per rank{}\n", 1e-9 * r.flops_per_step / r.step_ms,
                      r.mfu ? fmt::format("   {:.1f} % of {:g}", 100 * *r.mfu, *r.peak_tflops) : std::string());
  if (const auto share = measured_share(r))
    text += fmt::format("  measured products      {:>10.4g} TFLOP/s          {:.1f} % of that\n",
                        *r.measured->product_tflops(r.precision), 100 * *share);
  if (const auto share = core_share(r))
    text += fmt::format("  measured multiply-adds {:>10.4g} GFLOP/s per core {:.1f} % of that\n",
                        1e-9 * *r.measured->core_flops, 100 * *share);
  if (r.measured && r.measured->copy_bytes_per_s)
    text += fmt::format("  measured copy          {:>10.4g} GB/s\n", 1e-9 * *r.measured->copy_bytes_per_s);
  text += fmt::format("  start-up               {:>10.1f} ms   process start to end of step 1\n", r.startup_ms);
  text += fmt::format("  peak memory            {:>10}\n", join(memory, ", "));
  for (const auto& [operation, choice] : r.engines) text += fmt::format("  {} by {}\n", operation, choice.engine);
  if (r.kernels_per_step > 0) text += fmt::format("  kernels of a step      {:>10}\n", r.kernels_per_step);
  if (r.hook) text += fmt::format("  {}\n", trainer::describe(*r.hook));
  if (r.bucket_choice) text += fmt::format("  {}\n", ddp::describe(*r.bucket_choice));
  if (r.timeline) text += describe(*r.timeline);
  for (const auto& bottleneck : r.bottlenecks) text += "  " + bottleneck + "\n";
  return r.profile ? text + table_of(*r.profile, r) : text;
}

}  // namespace

std::optional<double> floor_ms(const nn::OperationCost& cost, const devices::MeasuredRates& rates,
                               std::string_view precision) {
  if (!rates.copy_bytes_per_s) return std::nullopt;
  const double moving = 1e3 * cost.bytes / *rates.copy_bytes_per_s;
  const auto tflops = rates.product_tflops(precision);
  return tflops ? std::max(moving, 1e-9 * cost.flops / *tflops) : moving;
}

std::string text_of(const StepResult& result, Format format) {
  if (format == Format::kJson) return json_of(result).text() + "\n";
  return format == Format::kCsv ? csv_of(result) : table_of(result);
}

}  // namespace lockstep::bench
