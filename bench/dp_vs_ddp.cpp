#include "bench/dp_vs_ddp.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "base/json_value.h"
#include "base/signals.h"
#include "base/text.h"
#include "bench/flops.h"
#include "bench/own_processes.h"
#include "bench/timings.h"
#include "lockstep/base/device.h"
#include "lockstep/base/env.h"
#include "lockstep/comm/world.h"
#include "session/device_choice.h"

namespace lockstep::bench {
namespace {

using Kind = session::DeviceRequest::Kind;

constexpr int kCpuDevices = 2;

/// How many GPUs there are, asked by a process that ends: this one forks, and CUDA does not work in forked processes.
int count_gpus(bool needed) {
  return std::stoi(run_processes(1, [&](int) {
    const CudaProbe& probe = probe_cuda();
    if (needed && probe.devices == 0) throw DeviceError("--device cuda: " + probe.problem, probe.remedy);
    return std::to_string(probe.devices);
  }));
}

/// The numbers that the devices have, and their list as --device takes it.
std::vector<int> choose_devices(std::string& device) {
  const auto request = session::parse_device(device);
  check_usage(!request.most_free, "bench dp-vs-ddp with --device cuda:free", "name the GPUs: --device cuda:0,1");
  std::vector<int> ids = request.indices;
  bool gpus = request.kind == Kind::kCuda;
  if (ids.empty()) {
    int count = kCpuDevices;
    if (request.kind != Kind::kCpu) {
      const int found = count_gpus(/*needed=*/gpus);
      gpus = gpus || found > 1;
      if (gpus) count = found;
    }
    for (int id = 0; id < count; ++id) ids.push_back(id);
  }
  if (ids.size() < 2)
    throw UsageError(fmt::format("bench dp-vs-ddp on {} device{}", ids.size(), ids.size() == 1 ? "" : "s"),
                     "name at least two: --device cuda:0,1, or --device cpu:0,1");
  std::vector<std::string> numbers;
  for (const int id : ids) numbers.push_back(std::to_string(id));
  device = (gpus ? "cuda:" : "cpu:") + join(numbers, ",");
  return ids;
}

MeasuredMode measure(DpVsDdpOptions options, trainer::Parallel parallel, bool loss_outside, std::size_t devices) {
  options.train.parallel = parallel;
  options.loss_outside = loss_outside;
  // --graphs yes is about the other mode.
  if (parallel == trainer::Parallel::kDp && options.train.graphs == true) options.train.graphs.reset();
  const int processes = parallel == trainer::Parallel::kDp ? 1 : static_cast<int>(devices);
  const std::string text = run_processes(processes, [&](int) { return measure_mode(options); });
  auto found = members_from_json<MeasuredMode>(parse_json(text, /*deepest=*/3));
  LOCKSTEP_ASSERT(found.mode.devices.size() == devices, "{} devices of {}", found.mode.devices.size(), devices);
  return found;
}

ModeResult middle_of(const std::vector<ModeResult>& rounds, std::int64_t samples) {
  ModeResult mode = rounds.front();
  std::vector<double> steps;
  for (const ModeResult& round : rounds) steps.push_back(round.step_ms);
  mode.step_ms = median(steps);
  mode.samples_per_s = 1e3 * static_cast<double>(samples) / mode.step_ms;
  for (std::size_t i = 0; i < mode.devices.size(); ++i) {
    std::vector<double> busy;
    for (const ModeResult& round : rounds) {
      mode.devices[i].peak_memory_bytes =
          std::max(mode.devices[i].peak_memory_bytes, round.devices[i].peak_memory_bytes);
      if (round.devices[i].busy) busy.push_back(*round.devices[i].busy);
    }
    mode.devices[i].busy = busy.empty() ? std::nullopt : std::optional(median(busy));
  }
  return mode;
}

template <class Value>
std::optional<double> ratio(const ModeResult& mode, const Value& value) {
  std::vector<double> all;
  for (const DeviceShare& device : mode.devices) {
    const std::optional<double> each = value(device);
    if (!each) return std::nullopt;
    all.push_back(*each);
  }
  const auto [least, most] = std::ranges::minmax(all);
  return least > 0 ? std::optional(most / least) : std::nullopt;
}

}  // namespace

std::optional<double> memory_ratio(const ModeResult& mode) {
  return ratio(mode, [](const DeviceShare& d) { return std::optional(static_cast<double>(d.peak_memory_bytes)); });
}

std::optional<double> busy_ratio(const ModeResult& mode) {
  return ratio(mode, [](const DeviceShare& d) { return d.busy; });
}

int bench_dp_vs_ddp(DpVsDdpOptions options, const std::optional<UsageError>& refusal) {
  watch_for_stops();
  if (refusal) throw *refusal;
  check_usage(comm::discover_world(env).size == 1, "bench dp-vs-ddp as one of several ranks",
              "start it without a launcher: it starts its processes itself");
  trainer::TrainConfig& train = options.train;
  check_usage(!train.share_devices, "bench dp-vs-ddp with --share-devices", "leave it out");
  const auto ids = choose_devices(train.device);
  const auto count = static_cast<int>(ids.size());
  train.global_batch = trainer::global_batch_of(train, count);
  train.batch.reset();
  if (train.data.empty()) train.data = synthetic_data(train.model.name, *train.global_batch);
  trainer::validate(train);
  if (*train.global_batch < count)
    throw UsageError(fmt::format("bench dp-vs-ddp with {} samples for {} devices", *train.global_batch, count),
                     "give a larger --global-batch, or --batch, which is a device's");

  DpVsDdpResult result;
  result.model = train.model.name;
  result.global_batch = *train.global_batch;
  result.steps = options.steps;
  result.rounds = options.rounds;
  const std::string kind = train.device.substr(0, train.device.find(':'));
  for (const int id : ids) result.devices.push_back(fmt::format("{}:{}", kind, id));
  std::vector<ModeResult> dp_loss_outside, dp, ddp;
  for (std::int64_t round = 0; round < options.rounds; ++round) {
    dp_loss_outside.push_back(measure(options, trainer::Parallel::kDp, true, ids.size()).mode);
    dp.push_back(measure(options, trainer::Parallel::kDp, false, ids.size()).mode);
    MeasuredMode many = measure(options, trainer::Parallel::kDdp, false, ids.size());
    ddp.push_back(std::move(many.mode));
    result.device = std::move(many.device);
    result.threads = many.threads;
  }
  result.dp_loss_outside = middle_of(dp_loss_outside, result.global_batch);
  result.dp = middle_of(dp, result.global_batch);
  result.ddp = middle_of(ddp, result.global_batch);
  std::fputs(text_of(result, options.format).c_str(), stdout);
  return 0;
}

}  // namespace lockstep::bench
