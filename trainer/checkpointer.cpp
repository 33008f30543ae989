#include "lockstep/trainer/checkpointer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/version.h"
#include "checkpoint/checkpoints.h"
#include "comm/agree.h"
#include "trainer/carried_state.h"
#include "trainer/checkpoint_parts.h"
#include "trainer/resume.h"

namespace lockstep::trainer {

struct Checkpointer::State {
  session::Session& session;
  parallel::DistributedDataParallel& ddp;
  nn::Optimizer& optimizer;
  Subject subject;
  checkpoint::Checkpoints checkpoints;
  bool loaded = false;
  std::int64_t step = 0;  // of the last one

  checkpoint::CheckpointManifest plan() const {
    checkpoint::CheckpointManifest plan;
    plan.world_size = session.group->size();
    plan.identity = {{"model", subject.name}};
    plan.settings = {{"ranks", fmt::to_string(session.group->size())},
                     {"lockstep", fmt::format("{} {}", version(), git_revision())}};
    return plan;
  }
};

Checkpointer::Checkpointer(session::Session& session, parallel::DistributedDataParallel& ddp, nn::Optimizer& optimizer,
                           checkpoint::CheckpointOptions options, Subject subject) {
  check_usage(!options.checkpoint_dir.empty(), "checkpoints without a directory",
              "give CheckpointOptions::checkpoint_dir");
  check_usage(options.keep.value_or(0) >= 0, "a negative number of checkpoints to keep", "give 0 to keep all");
  check_usage(!options.checkpoint_every && options.keep_best == 0 && options.checkpoint_mirror.empty() &&
                  options.resume.empty(),
              "a Checkpointer with checkpoint_every, keep_best, checkpoint_mirror or resume",
              "leave them out: call save() when a checkpoint is due, and load_latest() to resume");
  options.resume = "auto";
  std::vector<std::string> writes;
  if (session.group->rank() == 0) writes.push_back(options.checkpoint_dir);
  state_ =
      std::make_unique<State>(State{.session = session,
                                    .ddp = ddp,
                                    .optimizer = optimizer,
                                    .subject = std::move(subject),
                                    .checkpoints = checkpoint::Checkpoints(std::move(options), std::move(writes))});
}

Checkpointer::~Checkpointer() = default;

std::optional<std::int64_t> Checkpointer::load_latest(sampler::DistributedSampler& sampler) {
  State& state = *state_;
  check_usage(!state.loaded, "load_latest() a second time", "call it once, before the first step");
  comm::ProcessGroup& group = *state.session.group;
  checkpoint::CheckpointManifest plan = state.plan();
  if (state.subject.data != nullptr) plan.data = data_facts_of(*state.subject.data, group);
  const auto resumed =
      resume_module(state.checkpoints.options(), nullptr, group, state.session.gradients(), plan, state.ddp.module());
  if (resumed) {
    state.ddp.broadcast_state();  // rank 0 has read it
    resume_optimizer(*resumed, group, state.session.gradients(), state.optimizer, state.ddp);
    resume_hook_state(*resumed, state.ddp.reducer().comm_hook(), group);
    if (state.optimizer.scaler() != nullptr) resume_scaler(*resumed, *state.optimizer.scaler(), group);
    sampler.restore(resumed->manifest.position);
    state.step = resumed->manifest.step;
  }
  std::optional<checkpoint::OwnPart> part;
  if (state.optimizer.is_sliced() && group.size() > 1)
    part = place_part(look_at_directory(state.checkpoints.options().checkpoint_dir, group), group, state.ddp,
                      state.optimizer, plan);
  comm::run_collectively(group, [&] {
    state.checkpoints.open(state.ddp.module(), state.optimizer, nullptr, plan, {{"format", "pt"}}, resumed, part);
  });
  state.loaded = true;
  return resumed ? std::optional(state.step) : std::nullopt;
}

void Checkpointer::save(std::int64_t step, const sampler::SamplerState& position) {
  const auto since = Clock::now();
  State& state = *state_;
  check_usage(state.loaded, "save() before load_latest()",
              "call load_latest() before the first step: it says where the run continues");
  if (step <= state.step)
    throw UsageError(fmt::format("a checkpoint of step {} after that of step {}", step, state.step),
                     "count steps from 1, and continue where load_latest() says");
  state.ddp.check();
  state.step = step;
  checkpoint::ExtraState extra;
  extra.files[checkpoint::kHookFile] = gather_hook_state(state.ddp.reducer().comm_hook(), *state.session.group);
  if (state.session.group->rank() == 0) extra.files[checkpoint::kScalerFile] = scaler_tensors(state.optimizer.scaler());
  settle_parts(state.checkpoints, *state.session.group);
  extra.moments = gather_moments(state.checkpoints, state.ddp, state.optimizer, 0);
  state.checkpoints.take(step, since, position, state.optimizer.steps(), bucket_layout_of(state.ddp), std::move(extra));
}

void Checkpointer::finish() {
  State& state = *state_;
  const bool written = finish_checkpoints(state.checkpoints, *state.session.group);
  state.checkpoints.tell_failures();
  comm::run_collectively(*state.session.group, [&] {
    if (!written)
      throw IoError(
          fmt::format("the checkpoint of step {} is not in {}", state.step, state.checkpoints.options().checkpoint_dir),
          "the warnings above say why; free some space or choose another directory");
  });
}

}  // namespace lockstep::trainer
