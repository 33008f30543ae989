#include "trainer/survivor.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "base/codec.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/status_report.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "trainer/resume.h"

namespace lockstep::trainer {
namespace {

/// What one of them says to all.
struct State {
  std::string manifest;
  StepReport report = {};

  void fields(auto& io) {
    StepReport& r = report;
    io(manifest, r.step, r.epoch, r.loss, r.lr, r.grad_norm, r.step_ms, r.comm_wait_ms, r.samples_per_s, r.samples,
       r.memory_bytes);
  }
};

}  // namespace

void Survivor::clear() {
  rejoins = false;
  config.reset();
  step = -1;
  average.reset();
  optimizer.reset();
  model.reset();
  splits = {};
  backend.reset();
}

int launcher_attempt() {
  return static_cast<int>(std::max<std::int64_t>(0, parse_int(env("LOCKSTEP_ATTEMPT").value_or("0")).value_or(0)));
}

bool launcher_keeps_survivors() { return env("LOCKSTEP_IN_PLACE") == "1"; }

bool is_spare() { return env("LOCKSTEP_SPARE") == "1"; }

std::string why_no_survivors(const TrainConfig& config, const session::Session& session, ddp::CommHook* hook) {
  if (session.device.kind != DeviceKind::kCpu) return "it is on GPUs";
  if (session.group->size() == 1) return "it has one rank";
  if (!session.world.over_tcp()) return "MPI joins its ranks";
  if (config.zero > 0) return "--zero has each moment on one rank alone";
  if (config.local_sgd > 0) return "--local-sgd has parameters that differ";
  if (config.stateful) return "--stateful carries a state that each rank has for itself";
  if (config.sync_batchnorm) return "--sync-batchnorm sums in the model";
  if (!config.broadcast_buffers) return "--no-broadcast-buffers keeps statistics apart";
  if (config.parallel == Parallel::kDp) return "--parallel dp has one rank";
  if (!config.trace.empty()) return "--trace writes one file of one attempt";
  if (hook != nullptr && !hook->state().empty())
    return fmt::format("--comm-hook {} keeps something on each rank", hook->name());
  return {};
}

std::optional<checkpoint::Resumed> resume_from_survivors(Survivor& own, comm::ProcessGroup& group,
                                                         comm::ProcessGroup& gradients,
                                                         const checkpoint::CheckpointManifest& plan,
                                                         nn::Module& module) {
  const auto steps = group.all_gather_numbers(own.step);
  const auto [least, furthest] = std::ranges::minmax(steps);
  if (furthest < 0) return std::nullopt;
  checkpoint::Resumed resumed;
  resumed.reader = static_cast<int>(std::ranges::find(steps, furthest) - steps.begin());
  resumed.from_own_directories = resumed.in_memory = true;
  resumed.all_have_it = least == furthest;
  resumed.path = fmt::format("the memory of rank {}", resumed.reader);
  const bool gives = group.rank() == resumed.reader;
  std::string text;
  if (gives) {
    checkpoint::CheckpointManifest manifest = plan;
    manifest.step = own.step;
    manifest.position = own.position;
    manifest.optimizer_steps = own.optimizer_steps;
    manifest.buckets = own.buckets;
    manifest.evaluations = own.evaluations;
    text = pack(State{encode(manifest), own.report});
  }
  State state = unpack<State>(group.all_gather_text(text)[static_cast<std::size_t>(resumed.reader)]);
  resumed.manifest = checkpoint::decode_checkpoint_manifest(state.manifest, resumed.path);
  own.report = state.report;
  if (resumed.all_have_it) return resumed;
  if (own.step < furthest) own.step = -1;  // what is there is half of one step and half of another meanwhile
  broadcast_module(gradients, module, resumed.reader);
  return resumed;
}

bool may_be_a_loss(const Error& error) {
  if (dynamic_cast<const OutOfMemoryError*>(&error) != nullptr) return false;
  return dynamic_cast<const PeerError*>(&error) != nullptr || error.code() == static_cast<int>(ExitCode::kDevice) ||
         error.code() == static_cast<int>(ExitCode::kTimeout);
}

bool wait_for_others(const Survivor& own) {
  // Where the socket is full for a moment; without it this rank would be taken for one that hangs.
  constexpr int kTries = 100;
  for (int i = 0; i < kTries && !report_status({.kind = StatusReport::Kind::kStranded, .step = own.step}); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const auto place = wait_for_place([] { return stop_request() != 0; });
  if (!place) return false;
  for (const auto& [name, value] : *place) set_env(name, value);
  return true;
}

}  // namespace lockstep::trainer
