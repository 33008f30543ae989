// One of the modes (DataParallel, DistributedDataParallel), in the processes that train in it.
#include <cmath>

#include "base/json_value.h"
#include "base/signals.h"
#include "bench/dp_vs_ddp.h"
#include "bench/kernel_share.h"
#include "bench/timings.h"
#include "comm/agree.h"
#include "lockstep/data/loader.h"
#include "lockstep/session/session.h"
#include "trainer/build.h"
#include "trainer/step.h"

namespace lockstep::bench {
namespace {

using trainer::Parallel;

/// The loss of a module's outputs, whatever the module would do about it.
class LossOutside final : public nn::Module {
 public:
  explicit LossOutside(nn::Module& module) : module_(module) { register_borrowed("module", module); }
  nn::Vars forward_all(nn::Tape& tape, const nn::Vars& inputs) override { return module_.forward_all(tape, inputs); }

 private:
  nn::Module& module_;
};

class Trainee {
 public:
  Trainee(const DpVsDdpOptions& options, session::Session& session)
      : options_(options), session_(session), group_(*session.group) {
    const auto& config = options_.train;
    nn::Backend& backend = *session.backend;
    comm::run_collectively(group_, [&] {
      splits_ = trainer::open_splits(config);
      model_ = trainer::build_model(config, backend, *splits_.train);
      if (config.parallel == Parallel::kDp)
        data_parallel_ = std::make_unique<trainer::DataParallelModel>(config, session, *model_);
      loader_.emplace(splits_.train, trainer::make_sampler(config, splits_.train->size(), group_.rank(), group_.size()),
                      data::LoaderOptions{.workers = 0, .memory = backend.staging_memory()});
    });
    comm::compare_manifests(group_, trainer::manifest_of(config, *model_, *splits_.train, session.threads));
    nn::Module& module = data_parallel_ ? data_parallel_->module() : *model_;
    if (options.loss_outside) loss_outside_.emplace(module);
    ddp_.emplace(loss_outside_ ? static_cast<nn::Module&>(*loss_outside_) : module, session.gradients(),
                 trainer::ddp_options(config));
    const auto step_options = trainer::step_options(config);
    step_.emplace(backend, *ddp_, trainer::make_optimizer(config, ddp_->parameters()),
                  trainer::training_format_of(*splits_.train), step_options);
    if (trainer::wants_graphs(config)) step_->set_graphs(&graphs_.emplace(backend, *ddp_, step_options.activations));
  }

  std::string run() {
    batch_ = &loader_->next();
    inputs_ = step_->upload(*batch_);
    for (std::int64_t i = 0; i < options_.warmup_steps; ++i) run_step();
    std::optional<KernelShare> kernels;
    if (session_.device.kind == DeviceKind::kCuda) kernels.emplace(gpus());
    group_.barrier().wait_host();
    const auto used_before = use();  // not with what the barrier took
    const auto began = Clock::now();
    std::vector<double> times;
    for (std::int64_t i = 0; i < options_.steps; ++i) {
      const auto at = Clock::now();
      run_step();
      times.push_back(1e3 * seconds_between(at, Clock::now()));
    }
    const auto used = use();
    const double seconds = seconds_between(began, Clock::now());
    const auto kernel_shares = kernels ? kernels->shares() : std::vector<std::optional<double>>();
    times = comm::largest_of_ranks(group_, times);
    comm::run_collectively(group_, [&] {
      if (!finite_)
        throw DivergedError("the loss became NaN or infinite while it was measured", "lower --lr, or add --clip-norm");
    });
    std::vector<DeviceShare> shares;
    const auto steps = static_cast<double>(options_.steps);
    for (std::size_t i = 0; i < used.size(); ++i) {
      DeviceShare share;
      share.peak_memory_bytes = peak_bytes(i);
      share.busy =
          kernels ? kernel_shares[i]
                  : std::optional(1e-9 * static_cast<double>((used[i].cpu_time - used_before[i].cpu_time).count()) /
                                  seconds);
      share.bytes_in = static_cast<double>(used[i].bytes_in - used_before[i].bytes_in) / steps;
      share.bytes_out = static_cast<double>(used[i].bytes_out - used_before[i].bytes_out) / steps;
      shares.push_back(share);
    }
    return text_of(median(times), shares);
  }

 private:
  std::vector<int> gpus() const {
    return data_parallel_ ? data_parallel_->module().device_ids() : std::vector<int>{session_.device.index};
  }

  void run_step() {
    throw_if_stopped("measuring");
    step_->run(++steps_, inputs_, batch_->plan, trainer::learning_rate_of(options_.train, group_.size()));
    while (step_->outcomes_waiting() > 0) finite_ = std::isfinite(step_->take_outcome().totals.loss) && finite_;
  }

  /// Of this process's devices, since it began.
  std::vector<parallel::DeviceUse> use() {
    if (data_parallel_) return data_parallel_->module().use();
    // Nobody counts them, but they are known. Of a sum each rank takes its part from all others and gives all others
    // theirs (docs/collectives.md); buffers go from rank 0 to each of the others.
    const auto others = static_cast<std::uint64_t>(group_.size()) - 1;
    const std::uint64_t summed = 2 * others * ddp_->reducer().bytes() / (others + 1);
    const std::uint64_t buffers = ddp_->buffer_bytes();
    const bool root = group_.rank() == 0;
    const auto steps = static_cast<std::uint64_t>(steps_);
    parallel::DeviceUse rank;
    rank.cpu_time = parallel::cpu_time_of_this_thread();
    rank.bytes_in = steps * (summed + (root ? 0 : buffers));
    rank.bytes_out = steps * (summed + (root ? others * buffers : 0));
    return {rank};
  }

  std::int64_t peak_bytes(std::size_t device) {
    nn::Backend& backend = data_parallel_ ? data_parallel_->backend(device) : *session_.backend;
    std::size_t bytes = backend.allocator().stats().peak_bytes_in_use;
    if (device == 0) bytes += ddp_->reducer().bytes() + ddp_->buffer_bytes();
    return static_cast<std::int64_t>(bytes);
  }

  /// Collective: of all ranks' devices, on rank 0.
  std::string text_of(double step_ms, const std::vector<DeviceShare>& mine) {
    MeasuredMode all = {.mode = {.step_ms = step_ms, .devices = {}},
                        .device = session_.backend->describe(),
                        .threads = session_.threads};
    for (const std::string& text : group_.all_gather_text(members_as_json(mine).text()))
      for (const DeviceShare& share : members_from_json<std::vector<DeviceShare>>(parse_json(text, /*deepest=*/2)))
        all.mode.devices.push_back(share);
    return group_.rank() == 0 ? members_as_json(all).text() : "";
  }

  const DpVsDdpOptions& options_;
  session::Session& session_;
  comm::ProcessGroup& group_;
  data::DataSplits splits_;
  std::unique_ptr<nn::Module> model_;
  std::unique_ptr<trainer::DataParallelModel> data_parallel_;
  std::optional<LossOutside> loss_outside_;
  std::optional<data::Loader> loader_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::optional<trainer::StepGraphs> graphs_;
  std::optional<trainer::TrainingStep> step_;
  trainer::Inputs inputs_;  // of all steps
  const data::Batch* batch_ = nullptr;
  std::int64_t steps_ = 0;
  bool finite_ = true;
};

}  // namespace

std::string measure_mode(const DpVsDdpOptions& options) {
  session::Session session = trainer::open_session(options.train, std::nullopt);
  std::string text;
  {
    Trainee trainee(options, session);
    text = trainee.run();
  }
  session.shutdown();
  return text;
}

}  // namespace lockstep::bench
