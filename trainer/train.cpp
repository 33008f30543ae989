#include "trainer/train.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "base/file.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/stop.h"
#include "base/text.h"
#include "base/version.h"
#include "comm/agree.h"
#include "data/loader.h"
#include "data/open.h"
#include "nn/io/state.h"
#include "nn/models/models.h"
#include "trainer/evaluate.h"
#include "trainer/progress.h"
#include "trainer/replica.h"
#include "trainer/schedule.h"
#include "trainer/session.h"

namespace lockstep::trainer {
namespace {

constexpr std::int64_t kDefaultBatch = 32;  // samples a rank

std::unique_ptr<nn::Optimizer> make_optimizer(const TrainConfig& config,
                                              const std::vector<nn::NamedParameter>& parameters) {
  if (config.optimizer == Optimizer::kSgd)
    return nn::make_sgd(
        parameters,
        {.momentum = config.momentum, .nesterov = config.nesterov, .weight_decay = config.weight_decay.value_or(0.0)});
  return nn::make_adamw(
      parameters,
      {.beta1 = config.betas.first, .beta2 = config.betas.second, .weight_decay = config.weight_decay.value_or(0.01)});
}

data::DataSplits open_splits(const TrainConfig& config) {
  data::OpenOptions options{.classes = config.classes.value_or(0), .seed = config.seed};
  if (config.model.name == "linear" && options.classes == 0) {
    // Made-up data has as many classes as the model is asked for: 2, as in the 5 → 2 layer of the tutorials.
    if (config.model.out)
      options.classes = *config.model.out;
    else if (config.data.starts_with("random:"))
      options.classes = 2;
  }
  return data::open_data(config.data, options);
}

std::unique_ptr<nn::Module> build_model(const TrainConfig& config, nn::Backend& backend, const data::Dataset& dataset) {
  if (config.model.in && static_cast<std::size_t>(*config.model.in) != dataset.sample_elements())
    throw UsageError(fmt::format("--in {} where the samples of {} have {} numbers", *config.model.in, dataset.name(),
                                 dataset.sample_elements()),
                     "leave --in out: it follows the data");
  if (config.model.out && *config.model.out != dataset.classes())
    throw UsageError(
        fmt::format("--out {} where {} has {} classes", *config.model.out, dataset.name(), dataset.classes()),
        "leave --out out: it follows the data and --classes");
  nn::Generator generator(config.seed);
  nn::Context context{backend, generator};
  nn::ModelSpec spec{.name = config.model.name, .sample_shape = dataset.sample_dims(), .classes = dataset.classes()};
  if (!config.model.hidden.empty()) spec.hidden.assign(config.model.hidden.begin(), config.model.hidden.end());
  auto model = nn::make_model(context, spec);
  if (!config.weights.empty()) nn::load_state(*model, nn::read_safetensors(config.weights), config.weights);
  return model;
}

comm::Manifest manifest_of(const TrainConfig& config, const nn::Module& model, const data::Dataset& dataset) {
  comm::Manifest manifest = {
      {"lockstep", fmt::format("{} {} {}", version(), git_revision(), build_type())},
      {"instruction set",
       fmt::format("{}, oneDNN {} {}", cpu_instruction_set(), nn::onednn_version(), nn::cpu_kernel_isa())},
      {"data set", fmt::format("{} of {} samples", dataset.name(), dataset.size())},
  };
  std::string shapes;
  for (const auto& [name, parameter] : model.named_parameters())
    shapes += fmt::format("{}{} ", name, nn::to_string(parameter->value().shape()));
  manifest.emplace_back("parameters", shapes);
  const auto options = describe(config);
  manifest.insert(manifest.end(), options.begin(), options.end());
  return manifest;
}

// One run: what is made once, and the loop over steps.
class Run {
 public:
  Run(const TrainConfig& config, Session& session)
      : config_(config), group_(*session.group), backend_(*session.backend) {
    comm::agree_on(group_, [&] {
      splits_ = open_splits(config_);
      model_ = build_model(config_, backend_, *splits_.train);
      const std::int64_t batch = config_.batch.value_or(kDefaultBatch);
      sampler_.emplace(sampler::SamplerConfig{.length = splits_.train->size(),
                                              .seed = config_.seed,
                                              .global_batch = static_cast<std::uint64_t>(
                                                  config_.global_batch.value_or(batch * group_.size())),
                                              .tail = config_.tail},
                       group_.rank(), group_.size());
      check_size_of_steps();
      steps_per_epoch_ = static_cast<std::int64_t>(sampler_->steps_per_epoch());
      if (config_.steps)
        total_steps_ = *config_.steps;
      else if (__builtin_mul_overflow(config_.epochs, steps_per_epoch_, &total_steps_))
        throw UsageError(fmt::format("{} epochs of {} steps are too many to count", config_.epochs, steps_per_epoch_),
                         "give fewer --epochs");
    });
    comm::compare_manifests(group_, manifest_of(config_, *model_, *splits_.train));
    comm::agree_on(group_, [&] {
      loader_.emplace(splits_.train, *sampler_, data::LoaderOptions{.workers = config_.workers});
      if (group_.rank() != 0) return;
      // A run of hours must not find out at its end that its result has no place to go.
      if (!config_.save.empty()) {
        const AtomicFile probe(config_.save);
      }
      metrics_ = Metrics(config_.metrics);
    });

    replica_.emplace(group_, *model_,
                     ddp::BucketLimits{.first_bytes = static_cast<std::size_t>(config_.first_bucket_mb * 1048576.0),
                                       .bytes = static_cast<std::size_t>(config_.bucket_mb * 1048576.0)});
    optimizer_ = make_optimizer(config_, replica_->parameters());
    tape_.emplace(backend_);
    rate_.emplace(config_, total_steps_);
  }

  void execute() {
    const std::int64_t epochs = (total_steps_ - 1) / steps_per_epoch_ + 1;
    Progress progress(Progress::style_for(group_.rank(), config_.quiet), total_steps_, epochs, config_.log_every);
    progress.announce(fmt::format("training {} on {} ({} samples) with {} rank{}, global batch {}, {}",
                                  config_.model.name, splits_.train->name(), splits_.train->size(), group_.size(),
                                  group_.size() == 1 ? "" : "s", sampler_->config().global_batch, backend_.describe()));
    Evaluator evaluator(group_, backend_, splits_.test,
                        static_cast<std::int64_t>(std::max<std::uint64_t>(1, sampler_->max_local_count())),
                        config_.workers);
    EvalReport evaluation;
    for (std::int64_t step = 1; step <= total_steps_; ++step) {
      const data::Batch& batch = loader_->next();
      const StepReport report = train_step(step, batch);
      metrics_.write(report);
      progress.step(report);
      if (config_.check_replicas > 0 && step % config_.check_replicas == 0) replica_->check();

      const bool last = step == total_steps_;
      const bool epoch_due =
          batch.plan.last_of_epoch && config_.eval_every > 0 && report.epoch % config_.eval_every == 0;
      if (!last && !epoch_due) continue;
      replica_->broadcast_buffers();
      evaluation = evaluator.run(*model_, step);
      metrics_.write(evaluation);
      progress.evaluation(evaluation, report.epoch);
      if (!std::isfinite(evaluation.loss)) diverged("evaluation loss", evaluation.loss, report);
    }
    finish(progress, evaluation, epochs);
  }

 private:
  StepReport train_step(std::int64_t step, const data::Batch& batch) {
    throw_if_stopped("training");
    const auto from = Clock::now();
    const auto& plan = batch.plan;
    StepReport report{.step = step, .epoch = static_cast<std::int64_t>(plan.epoch) + 1, .lr = rate_->at(step - 1)};

    replica_->begin_step(step);
    if (batch.empty()) {
      replica_->contribute_nothing();
    } else {
      const auto samples = static_cast<std::int64_t>(plan.local_count);
      const nn::Var x =
          tape_->input(backend_.from_host(batch.x.data(), batch_shape(*splits_.train, samples), DType::kF32));
      const auto labels = backend_.from_host(batch.labels.data(), {samples}, DType::kI32);
      const nn::Loss loss =
          nn::cross_entropy(*tape_, model_->forward(*tape_, x), labels, 1.0f / static_cast<float>(plan.global_count));
      replica_->backward(*tape_, loss, samples);
    }
    update(report, plan);
    tape_->reset();

    const auto to = Clock::now();
    report.step_ms = 1e3 * seconds_between(from, to);
    report.comm_wait_ms = 1e3 * std::chrono::duration<double>(replica_->reducer().waited()).count();
    report.samples_per_s = static_cast<double>(plan.global_count) / seconds_between(from, to);
    train_seconds_ += seconds_between(from, to);
    wait_seconds_ += 1e-3 * report.comm_wait_ms;
    samples_ += static_cast<std::int64_t>(plan.global_count);
    if (log_enabled(LogLevel::kDebug))
      for (const auto& line : split(describe(replica_->reducer().timeline()), '\n'))
        log_debug("step {}: {}", step, line);
    return report;
  }

  // Waits for the sums and moves the parameters: each as soon as its bucket is there, or, with clipping, all at the
  // end.
  void update(StepReport& report, const sampler::StepPlan& plan) {
    const bool clip = config_.clip_norm > 0;
    const bool want_norm = clip || metrics_;
    double squares = 0.0;
    bool finite = true;
    const auto& parameters = replica_->parameters();
    replica_->finish(
        [&](const Replica::Totals& totals) {
          LOCKSTEP_ASSERT(static_cast<std::uint64_t>(totals.count) == plan.global_count, "{} of {} samples",
                          totals.count, plan.global_count);
          report.loss = totals.loss / totals.count;
          finite = std::isfinite(report.loss);
          if (finite && !clip) optimizer_->begin_step(report.lr);
        },
        [&](std::size_t index) {
          if (!finite) return;
          if (want_norm) squares += backend_.optim().sum_of_squares(parameters[index].parameter->gradient());
          if (!clip) optimizer_->update(index);
        });
    // Only now, so that no rank leaves while another still takes part in the collectives.
    if (!finite) diverged("loss", report.loss, report);
    report.grad_norm = std::sqrt(squares);
    if (!clip) return;
    // As torch.nn.utils.clip_grad_norm_: scale by max_norm / (norm + 1e-6) where that is below one.
    optimizer_->begin_step(report.lr, std::min(1.0, config_.clip_norm / (report.grad_norm + 1e-6)));
    for (std::size_t index = 0; index < parameters.size(); ++index) optimizer_->update(index);
  }

  // All ranks see the same sum: one of them says so.
  [[noreturn]] void diverged(const char* which, double loss, const StepReport& report) const {
    const std::string what = fmt::format("the {} is {} at step {} (epoch {})", which,
                                         std::isnan(loss) ? "NaN" : "infinite", report.step, report.epoch);
    if (group_.rank() != 0) throw PeerError(static_cast<int>(ExitCode::kDiverged), what);
    throw DivergedError(what, "lower --lr, add --warmup or --clip-norm, or look at the data");
  }

  // The numbers are told first: they stay even if the weights cannot be written.
  void finish(Progress& progress, const EvalReport& evaluation, std::int64_t epochs) {
    const FinalReport report{.steps = total_steps_,
                             .epochs = epochs,
                             .world_size = group_.size(),
                             .wall_s = seconds_between(start_, Clock::now()),
                             .loss = evaluation.loss,
                             .accuracy = evaluation.accuracy,
                             .peak_memory_bytes = peak_memory_of_all_ranks(),
                             .params_sha256 = group_.rank() == 0 ? nn::parameters_sha256(*model_) : std::string()};
    metrics_.write(report);
    if (group_.rank() == 0)
      progress.summary({.final = report, .samples = samples_, .train_s = train_seconds_, .comm_wait_s = wait_seconds_});
    comm::agree_on(group_, [&] {
      if (group_.rank() == 0) save();
    });
    comm::agree_on(group_, [&] {
      if (!metrics_.failure().empty())
        throw IoError(metrics_.failure(),
                      "free some space and train again if the metrics matter; all else is complete");
    });
  }

  void save() const {
    if (config_.save.empty()) return;
    try {
      nn::write_safetensors(config_.save, nn::state_of(*model_), {{"format", "pt"}});
    } catch (const IoError& error) {
      throw IoError(fmt::format("training is complete, but its weights are lost: {}", error.what()), error.remedy());
    }
  }

  // Before anything counts in f32.
  void check_size_of_steps() const {
    const auto largest = std::min(sampler_->config().global_batch, splits_.train->size());
    if (largest > static_cast<std::uint64_t>(Replica::kMostSamples))
      throw UsageError(fmt::format("a step of {} samples", largest),
                       fmt::format("give a global batch of at most {}", Replica::kMostSamples));
  }

  std::vector<std::int64_t> peak_memory_of_all_ranks() {
    std::vector<std::int64_t> peaks;
    for (const auto& peak : group_.all_gather_text(fmt::to_string(peak_resident_bytes())))
      peaks.push_back(parse_int(peak).value_or(0));
    return peaks;
  }

  const TrainConfig& config_;
  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  Clock::time_point start_ = Clock::now();

  data::DataSplits splits_;
  std::unique_ptr<nn::Module> model_;
  std::optional<sampler::DistributedSampler> sampler_;
  std::optional<data::Loader> loader_;
  Metrics metrics_;  // rank 0's
  std::int64_t steps_per_epoch_ = 0, total_steps_ = 0;
  std::optional<Replica> replica_;
  std::unique_ptr<nn::Optimizer> optimizer_;
  std::optional<nn::Tape> tape_;
  std::optional<LearningRate> rate_;

  double train_seconds_ = 0, wait_seconds_ = 0;
  std::int64_t samples_ = 0;
};

}  // namespace

int train(const TrainConfig& config, const std::optional<UsageError>& refusal) {
  install_stop_handlers();
  Session session = open_session(config, refusal);
  {
    Run run(config, session);
    run.execute();
  }
  session.group->shutdown();
  return 0;
}

}  // namespace lockstep::trainer
