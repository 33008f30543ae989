#include "bench/step.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>

#include "base/file.h"
#include "base/kernel.h"
#include "base/signals.h"
#include "base/text.h"
#include "base/version.h"
#include "bench/bypass_group.h"
#include "bench/ceilings.h"
#include "bench/flops.h"
#include "bench/timings.h"
#include "comm/agree.h"
#include "devices/cpus.h"
#include "lockstep/base/env.h"
#include "lockstep/data/loader.h"
#include "lockstep/session/session.h"
#include "trainer/build.h"
#include "trainer/carried_state.h"
#include "trainer/memory_estimate.h"
#include "trainer/step.h"

namespace lockstep::bench {
namespace {

// Blocks of steps with communication, and as many without.
constexpr std::int64_t kBlocks = 20;
constexpr std::int64_t kStepsOfZero = 4;  // in a row: parameters come from the other ranks during the next step

/// Kinds of steps: graphs of one are not used for another.
enum Kind : std::size_t { kWith, kWithout, kAlone };

/// Seconds since this process was started, by the kernel's account (in hundredths).
double process_age_s() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  // The program's name, in brackets, may hold anything. The start is field 22, the second one after the name field 3.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  const double ticks = parse_double(field).value_or(0);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) -
         ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

class StepBenchmark {
 public:
  StepBenchmark(const StepOptions& options, session::Session& session)
      : options_(options),
        session_(session),
        group_(*session.group),
        gradients_(session.gradients()),
        on_gpu_(session.device.kind == DeviceKind::kCuda) {
    const auto& config = options_.train;
    nn::Backend& backend = *session.backend;
    session::MemoryNeeds needs;
    comm::run_collectively(group_, [&] {
      check_usage(on_gpu_ || !options_.copy_batch, "--copy-batch yes is for GPUs, and this run is on the CPU",
                  "leave --copy-batch out, or use --device cuda");
      check_usage(on_gpu_ || !options_.profile, "--profile is for GPUs, and this run is on the CPU",
                  "leave --profile out, or use --device cuda");
      check_usage(!on_gpu_ || !options_.step_profile || group_.size() == 1,
                  "--profile-out on GPUs is for one rank alone", "start one, without lockstep launch");
      splits_ = trainer::open_splits(config);
      const auto sampler = trainer::make_sampler(config, splits_.train->size(), group_.rank(), group_.size());
      const auto most = static_cast<std::int64_t>(sampler.max_local_count());
      const auto updates = config.zero > 0 ? static_cast<std::size_t>(group_.size()) : 1;
      needs = trainer::estimate_memory(config, backend, *splits_.train,
                                       {.samples = most, .updates = updates, .batch = most, .ranks = group_.size()});
    });
    session::check_memory(group_, backend, needs);
    comm::run_collectively(group_, [&] {
      model_ = trainer::build_model(config, backend, *splits_.train);
      loader_.emplace(splits_.train, trainer::make_sampler(config, splits_.train->size(), group_.rank(), group_.size()),
                      data::LoaderOptions{.workers = 0, .memory = backend.staging_memory()});
    });
    auto manifest = trainer::manifest_of(config, *model_, *splits_.train, session.threads);
    manifest.emplace_back("measured steps", fmt::to_string(options_.steps));
    manifest.emplace_back("warmup-steps", fmt::to_string(warm_up()));
    manifest.emplace_back("timeline", fmt::to_string(options_.timeline));
    manifest.emplace_back("profile", fmt::to_string(options_.profile));
    manifest.emplace_back("measured peaks", fmt::to_string(options_.measure_peaks));
    comm::compare_manifests(group_, manifest);
    ddp_.emplace(*model_, gradients_, trainer::ddp_options(config));
    trainer::register_hook(config, *ddp_);
    auto step_options = trainer::step_options(config);
    scaler_ = trainer::make_grad_scaler(config, backend);
    step_options.scaler = scaler_.get();
    step_.emplace(backend, *ddp_, trainer::make_optimizer(config, ddp_->parameters(), ddp_->share()),
                  trainer::training_format_of(*splits_.train), step_options);
    if (trainer::wants_graphs(config))
      for (auto& graphs : graphs_) graphs.emplace(backend, *ddp_, step_options.activations);
  }

  /// Whether all losses so far were.
  bool finite() const { return finite_; }

  /// The median of a few steps' computation alone, of the slowest rank.
  double compute_ms() {
    constexpr std::int64_t kWarm = 2, kMeasured = 3;
    batch_ = &loader_->next();
    inputs_ = step_->upload(*batch_);
    std::vector<double> times;
    for (std::int64_t i = 0; i < kWarm + kMeasured; ++i) {
      const double ms = time_ms(kWithout, 1);
      if (i >= kWarm) times.push_back(ms);
    }
    return median(comm::largest_of_ranks(group_, times));
  }

  StepResult run() {
    batch_ = &loader_->next();
    if (!options_.copy_batch) inputs_ = step_->upload(*batch_);
    StepResult result;
    time_ms(kWith, 1);
    const std::vector<double> startup = {1e3 * process_age_s()};
    result.startup_ms = comm::largest_of_ranks(group_, startup)[0];
    while (ddp_->choosing_buckets()) time_ms(kWith, 1);
    for (std::int64_t i = 1; i < warm_up(); ++i) time_ms(i % 2 == 1 ? kWithout : kWith, 1);
    measure(result);
    if (options_.timeline) result.timeline = take_timeline();
    if (options_.profile) result.profile = take_profile();
    if (options_.step_profile) result.step_profile = take_step_profile();
    describe(result);
    if (options_.bottlenecks == true) find_facts(result);
    if (options_.profile || options_.measure_peaks || result.step_profile || options_.bottlenecks == true) {
      // Last: the memory that this takes is not the step's.
      group_.barrier().wait_host();
      comm::run_collectively(group_, [&] {
        result.measured = measure_rates(*session_.backend, {config().precision}, config().tf32, session_.threads);
      });
    }
    if (result.step_profile) complete(*result.step_profile, result);
    return result;
  }

 private:
  const trainer::TrainConfig& config() const { return options_.train; }
  std::int64_t warm_up() const { return options_.warmup_steps.value_or(on_gpu_ ? kWarmUpStepsOnGpu : kWarmUpSteps); }

  void measure(StepResult& result) {
    const std::int64_t block = on_gpu_                   ? std::max<std::int64_t>(1, options_.steps / kBlocks)
                               : options_.train.zero > 0 ? std::min(options_.steps, kStepsOfZero)
                                                         : 1;
    const std::int64_t blocks = (options_.steps + block - 1) / block, replayed = replayed_steps();
    std::vector<double> with, without;
    for (std::int64_t i = 0; i < blocks; ++i) {
      with.push_back(time_ms(kWith, block));
      without.push_back(time_ms(kWithout, block));
    }
    // What a neighbour takes now and then is in the upper quartiles.
    for (const auto& rank : group_.all_gather_text(fmt::format("{} {}", quantile(without, 0.25), host_name())))
      result.facts.ranks.push_back({.host = rank.substr(rank.find(' ') + 1),
                                    .compute_ms = parse_double(rank.substr(0, rank.find(' '))).value_or(0)});
    with = comm::largest_of_ranks(group_, with);
    without = comm::largest_of_ranks(group_, without);
    std::vector<double> exposed;
    for (std::size_t i = 0; i < with.size(); ++i) exposed.push_back(with[i] - without[i]);
    result.step_ms = median(with);
    result.step_ms_p10 = quantile(with, 0.1);
    result.step_ms_p90 = quantile(with, 0.9);
    result.compute_ms = median(without);
    result.exposed_comm_ms = median(exposed);
    result.facts.exposed_ms = quantile(exposed, 0.25) > 0 ? result.exposed_comm_ms : 0;
    result.steps = blocks * block;
    result.steps_a_block = block;
    result.replays_per_step = static_cast<double>(replayed_steps() - replayed) / static_cast<double>(2 * result.steps);
  }

  void describe(StepResult& result) {
    const auto& config = options_.train;
    result.model = config.model.name;
    result.world_size = group_.size();
    result.batch = static_cast<std::int64_t>(batch_->plan.global_count) / group_.size();
    result.device = session_.backend->describe();
    result.precision = precision_name(config.precision, session_.device.kind, config.tf32);
    if (config.precision == Precision::kBF16 && session_.device.kind == DeviceKind::kCpu)
      result.bf16_by = nn::name_of(nn::cpu_bf16());
    result.samples_per_s = 1e3 * static_cast<double>(batch_->plan.global_count) / result.step_ms;
    result.flops_per_step =
        flops_per_step(nn::products_of(trainer::model_spec(config.model, *splits_.train)), result.batch);
    result.peak_tflops = options_.peak_tflops ? options_.peak_tflops : peak_tflops(result.device, result.precision);
    if (result.peak_tflops) result.mfu = 1e-9 * result.flops_per_step / result.step_ms / *result.peak_tflops;
    result.graphs = result.replays_per_step > 0;
    if (!result.graphs)
      result.graphs_refused = config.graphs == false ? "--graphs no"
                              : !refusal().empty()   ? refusal()
                                                     : "this device captures no graphs";
    for (const auto& graphs : graphs_)
      if (graphs) result.kernels_per_step = std::max(result.kernels_per_step, graphs->kernels());
    result.engines = session_.backend->engines();
    result.peak_memory_bytes = group_.all_gather_numbers(peak_resident_bytes());
    result.backend = session_.gradients().name();
    result.threads = session_.threads;
    result.hook = trainer::hook_report_of(ddp_->reducer());
    result.buckets = ddp_->reducer().plan().buckets.size();
    result.bucket_bytes = ddp_->reducer().limits().bucket_bytes;
    result.bucket_choice = ddp_->bucket_choice();
  }

  /// Of one of `steps` steps that are given to the device one after the other, from its being idle to its being idle.
  double time_ms(Kind kind, std::int64_t steps) {
    throw_if_stopped("measuring");
    gradients_.set_bypass(kind == kWithout);
    step_->set_graphs(kind != kAlone && graphs_[kind] ? &*graphs_[kind] : nullptr);
    group_.barrier().wait_host();
    const auto begin = Clock::now();
    for (std::int64_t i = 0; i < steps; ++i) run_step();
    take_outcomes();
    ddp_->wait_for_parameters();
    return 1e3 * seconds_between(begin, Clock::now()) / static_cast<double>(steps);
  }

  void run_step() {
    const double lr = trainer::learning_rate_of(options_.train, group_.size());
    if (options_.copy_batch)
      step_->run(++steps_, *batch_, lr);
    else
      step_->run(++steps_, inputs_, batch_->plan, lr);
    while (step_->outcome_due()) take_outcome();
  }
  void take_outcomes() {
    while (step_->outcomes_waiting() > 0) take_outcome();
  }
  void take_outcome() {
    // Steps that update nothing would be too fast. Bypassed, each rank sees its own loss: all must leave together.
    const bool finite = std::isfinite(step_->take_outcome().totals.loss);
    finite_ = finite_ && finite;
  }

  std::int64_t replayed_steps() const {
    std::int64_t steps = 0;
    for (const auto& graphs : graphs_) steps += graphs ? graphs->replayed() : 0;
    return steps;
  }
  /// Why steps are not captured; empty where they are.
  std::string refusal() const {
    for (const auto& graphs : graphs_)
      if (graphs && !graphs->refusal().empty()) return graphs->refusal();
    return "";
  }

  /// As if steps were run kernel by kernel from now on, with the memory that they take.
  void prepare_without_graphs() {
    for (auto& graphs : graphs_)
      if (graphs) graphs->expect_other_work();
    time_ms(kAlone, 1);
  }

  Profile take_profile() {
    prepare_without_graphs();
    group_.barrier().wait_host();
    const auto begin = Clock::now();
    Profile profile{.operations = session_.backend->profile([&] {
                      run_step();
                      take_outcomes();
                    }),
                    .peak_bytes_per_s = session_.backend->peak_bytes_per_s()};
    profile.step_ms = 1e3 * seconds_between(begin, Clock::now());
    return profile;
  }

  /// Of steps without communication, in which each gradient is a bucket of its own: what is in it beside describe()'s.
  simulate::StepProfile take_step_profile() {
    prepare_without_graphs();
    const auto& reducer = ddp_->reducer();
    std::vector<std::vector<double>> ready(reducer.specs().size());
    std::vector<double> backward, update;
    simulate::StepProfile profile;
    for (std::int64_t i = 0; i < options_.steps; ++i) {
      throw_if_stopped("measuring");
      gradients_.set_bypass(group_.size() > 1);
      const Timeline timeline = on_gpu_ ? timeline_of_gpu() : timeline_of_cpu();
      gradients_.set_bypass(false);
      const auto& buckets = reducer.plan().buckets;
      for (std::size_t b = 0; b < buckets.size(); ++b)
        for (const std::size_t slot : buckets[b].slots) ready[slot].push_back(timeline.buckets[b].ready_ms);
      backward.push_back(timeline.last_ready_ms);
      update.push_back(timeline.end_ms - timeline.last_ready_ms);
      profile.step_ms.push_back(timeline.end_ms);
    }
    for (std::size_t slot = 0; slot < ready.size(); ++slot)
      profile.gradients.push_back({.slot = reducer.specs()[slot], .ready_ms = median(std::move(ready[slot]))});
    profile.backward_ms = median(std::move(backward));
    profile.update_ms = median(std::move(update));
    // A step takes as long as the slowest of the ranks beside each other.
    std::vector<double> slowest = comm::largest_of_ranks(group_, profile.step_ms);
    profile.scale_to(median(slowest));
    profile.step_ms = std::move(slowest);
    profile.arena_alignment = reducer.limits().slot_alignment;
    devices::CpuMask cpus;
    const devices::CpuMask own = devices::allowed_cpus();
    for (const auto& bytes : group_.all_gather_objects(std::as_bytes(std::span(&own, 1)))) {
      devices::CpuMask of_rank;
      std::memcpy(&of_rank, bytes.data(), sizeof of_rank);
      cpus |= of_rank;
    }
    profile.cores = static_cast<int>(cpus.count());
    return profile;
  }
  static void complete(simulate::StepProfile& profile, const StepResult& result) {
    profile.model = result.model;
    profile.precision = result.precision;
    profile.device = result.device;
    profile.version = version();
    profile.batch = result.batch;
    profile.threads = result.threads;
    profile.ranks = result.world_size;
    profile.flops_per_step = result.flops_per_step;
    profile.memory_bytes = static_cast<std::uint64_t>(result.peak_memory_bytes.front());
    if (result.measured) profile.copy_bytes_per_s = result.measured->copy_bytes_per_s.value_or(0);
  }

  Timeline timeline_of_cpu() {
    group_.barrier().wait_host();
    const auto begin = Clock::now();
    run_step();
    take_outcomes();
    return timeline_of(ddp_->reducer().timeline(), begin, Clock::now());
  }
  Timeline timeline_of_gpu() {
    const auto timer = make_device_timer(*session_.backend, session_.gradients());
    gradients_.set_observer([&](const comm::Op& op) { timer->bucket_ready(op.bytes()); });
    group_.barrier().wait_host();
    timer->begin();
    run_step();
    timer->end();
    take_outcomes();
    gradients_.set_observer(nullptr);
    return timer->read();
  }

  /// For bottlenecks, beside the times of steps, what loading and collectives take alone.
  void find_facts(StepResult& result) {
    report::StepFacts& facts = result.facts;
    facts.step_ms = result.step_ms;
    facts.workers = config().workers;
    facts.compresses = config().comm_hook != "none";
    if (!options_.synthetic) {
      const double ahead = std::max(0.0, loading_ms() - result.step_ms);
      for (auto& rank : facts.ranks) rank.data_ms = ahead;
      facts.step_ms += ahead;
    }
    const bool plain = config().zero == 0 && config().shards == 0 && !facts.compresses;
    if (group_.size() == 1 || !plain || *facts.exposed_ms < report::kLeastShare * facts.step_ms) return;
    const Timeline timeline = take_timeline();
    std::size_t bytes = 0, largest = 0;
    for (const auto& bucket : timeline.buckets) {
      bytes += bucket.bytes;
      largest = std::max(largest, bucket.bytes);
    }
    if (bytes == 0 || timeline.communication_ms() <= 0) return;
    facts.link = {.bytes = static_cast<double>(bytes),
                  .step_gbs = 1e-6 * static_cast<double>(bytes) / timeline.communication_ms(),
                  .alone_gbs = 1e-6 * static_cast<double>(largest) / all_reduce_ms(largest),
                  .buckets = timeline.buckets.size(),
                  .bucket_mb = static_cast<double>(largest) / (1 << 20)};
  }

  /// Of a batch, by threads that load ahead with nothing beside; the slowest rank's.
  double loading_ms() {
    constexpr std::int64_t kBatches = 20;
    const auto sampler = trainer::make_sampler(config(), splits_.train->size(), group_.rank(), group_.size());
    data::Loader loader(splits_.train, sampler,
                        data::LoaderOptions{.workers = config().workers, .memory = session_.backend->staging_memory()});
    for (int i = 0; i <= config().workers; ++i) static_cast<void>(loader.next());  // those that were loaded ahead
    const auto begin = Clock::now();
    for (std::int64_t i = 0; i < kBatches; ++i) static_cast<void>(loader.next());
    const std::vector<double> mine = {1e3 * seconds_between(begin, Clock::now()) / kBatches};
    return comm::largest_of_ranks(group_, mine)[0];
  }

  /// Of so many bytes, with nothing beside; the slowest rank's.
  double all_reduce_ms(std::size_t bytes) {
    constexpr int kTimes = 9;
    const auto arena = session_.gradients().allocate(bytes);
    std::vector<double> times;
    for (int i = 0; i < kTimes; ++i) {
      group_.barrier().wait_host();
      const auto begin = Clock::now();
      session_.gradients()
          .all_reduce({arena.get(), 0, bytes / sizeof(float), DType::kF32}, comm::ReduceOp::kSum)
          .wait_host();
      times.push_back(1e3 * seconds_between(begin, Clock::now()));
    }
    return median(comm::largest_of_ranks(group_, times));
  }

  Timeline take_timeline() {
    prepare_without_graphs();
    return on_gpu_ ? timeline_of_gpu() : timeline_of_cpu();
  }

  const StepOptions& options_;
  session::Session& session_;
  comm::ProcessGroup& group_;  // in the host's memory
  BypassGroup gradients_;      // the gradients'
  bool on_gpu_;
  data::DataSplits splits_;
  std::unique_ptr<nn::Module> model_;
  std::optional<data::Loader> loader_;
  std::optional<parallel::DistributedDataParallel> ddp_;
  std::unique_ptr<nn::GradScaler> scaler_;                    // nullptr: losses are not scaled
  std::array<std::optional<trainer::StepGraphs>, 2> graphs_;  // by Kind; steps of kAlone have none
  std::optional<trainer::TrainingStep> step_;
  trainer::Inputs inputs_;  // of all steps, unless each copies the batch
  const data::Batch* batch_ = nullptr;
  std::int64_t steps_ = 0;
  bool finite_ = true;
};

}  // namespace

namespace {

/// Whether a larger batch would use the device better is tried, where the step is far from what products reach.
void try_larger_batch(const StepOptions& options, session::Session& session, StepResult& result) {
  constexpr double kFar = 0.5, kMostSeconds = 20;
  constexpr std::int64_t kTimes = 4;
  const auto& config = options.train;
  const auto rate = result.measured ? result.measured->product_tflops(result.precision) : std::nullopt;
  const double share = rate ? 1e-9 * result.flops_per_step / result.compute_ms / *rate : 1;
  const bool tries = options.synthetic && !config.global_batch && config.accumulate == 1 && config.shards == 0 &&
                     share < kFar && 5e-3 * kTimes * result.compute_ms < kMostSeconds;
  // Rank 0 has measured the rate that counts.
  if (session.group->all_gather_numbers(tries ? 1 : 0).front() == 0) return;
  StepOptions larger = options;
  larger.train.batch = kTimes * result.batch;
  larger.train.data = synthetic_data(config.model.name, *larger.train.batch * session.group->size());
  try {
    const double ms = StepBenchmark(larger, session).compute_ms();
    result.facts.larger_batch = {.batch = result.batch,
                                 .larger = *larger.train.batch,
                                 .gain = kTimes * result.compute_ms / ms - 1,
                                 .share = share};
  } catch (const DeviceError&) {  // all ranks': there is no memory for it, which is no reason to end
  }
}

StepResult measure(const StepOptions& options, session::Session& session) {
  StepResult result;
  {
    StepBenchmark benchmark(options, session);
    result = benchmark.run();
    comm::run_collectively(*session.group, [&] {
      if (!benchmark.finite())
        throw DivergedError("the loss became NaN or infinite while it was measured", "lower --lr, or add --clip-norm");
    });
  }
  if (options.bottlenecks == true) {
    try_larger_batch(options, session, result);
    result.bottlenecks = report::lines_of(report::bottlenecks_of(result.facts), result.facts);
  }
  return result;
}

session::Session prepare(StepOptions& options, const std::optional<UsageError>& refusal) {
  watch_for_stops();
  const int world_size = comm::discover_world(env).size;
  options.bottlenecks = options.bottlenecks.value_or(options.format == Format::kTable && !options.step_profile);
  options.synthetic = options.train.data.empty();
  if (options.synthetic)
    options.train.data = synthetic_data(options.train.model.name, trainer::global_batch_of(options.train, world_size));
  if (options.step_profile) {
    // Each gradient is a bucket of its own, so that the timeline has when it was ready.
    options.train.first_bucket_mb = 1e-6;
    options.train.bucket_mb = 1e-6;
  }
  return trainer::open_session(options.train, refusal);
}

}  // namespace

int bench_step(StepOptions options, const std::optional<UsageError>& refusal) {
  options.step_profile = !options.profile_out.empty();
  session::Session session = prepare(options, refusal);
  {
    std::optional<AtomicFile> file;
    comm::run_collectively(*session.group, [&] {
      if (session.group->rank() == 0 && !options.profile_out.empty()) file.emplace(options.profile_out);
    });
    const StepResult result = measure(options, session);
    if (session.group->rank() == 0) {
      if (file) {
        const std::string text = simulate::text_of(*result.step_profile);
        file->write(std::as_bytes(std::span(text)));
        file->commit();
      }
      std::fputs(text_of(result, options.format).c_str(), stdout);
    }
  }
  session.shutdown();
  return 0;
}

simulate::StepProfile measure_step_profile(const std::string& model) {
  StepOptions options;
  options.train.model.name = model;
  options.step_profile = true;
  session::Session session = prepare(options, std::nullopt);
  const auto profile = measure(options, session).step_profile;
  session.shutdown();
  return *profile;
}

}  // namespace lockstep::bench
