#include "bench/step.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>

#include "base/env.h"
#include "base/memory.h"
#include "base/stop.h"
#include "base/text.h"
#include "bench/muted_group.h"
#include "bench/timings.h"
#include "comm/agree.h"
#include "data/loader.h"
#include "trainer/build.h"
#include "trainer/session.h"
#include "trainer/step.h"

namespace lockstep::bench {
namespace {

/// Seconds since this process was started, by the kernel's account (in hundredths).
double process_age_s() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  // The program's name, in brackets, may hold anything. The start is field 22, the second behind it field 3.
  std::istringstream fields(text.substr(text.rfind(')') + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  const double ticks = parse_double(field).value_or(0);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) -
         ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

/// Samples of the size that a model is known for, enough for one step.
std::string made_up_data(const std::string& model, std::int64_t samples) {
  return fmt::format("random:{},{}", model == "linear" ? "5" : "1x28x28", samples);
}

class Benchmark {
 public:
  Benchmark(const StepOptions& options, trainer::Session& session)
      : options_(options), group_(*session.group), muted_(group_), threads_(session.threads) {
    const auto& config = options_.train;
    comm::agree_on(group_, [&] {
      splits_ = trainer::open_splits(config);
      model_ = trainer::build_model(config, *session.backend, *splits_.train);
      loader_.emplace(splits_.train, trainer::make_sampler(config, splits_.train->size(), group_.rank(), group_.size()),
                      data::LoaderOptions{.workers = 0, .memory = session.backend->staging_memory()});
    });
    auto manifest = trainer::manifest_of(config, *model_, *splits_.train);
    manifest.emplace_back("measured steps", fmt::to_string(options_.steps));
    manifest.emplace_back("warmup-steps", fmt::to_string(options_.warmup_steps));
    comm::compare_manifests(group_, manifest);
    replica_.emplace(muted_, *session.backend, *model_, trainer::bucket_limits(config));
    step_.emplace(*session.backend, *model_, *replica_, trainer::make_optimizer(config, replica_->parameters()),
                  splits_.train->sample_dims(), trainer::TrainingStep::Options{.clip_norm = config.clip_norm});
  }

  /// Whether all losses so far were.
  bool finite() const { return finite_; }

  StepResult run() {
    const data::Batch& batch = loader_->next();
    time_ms(batch, false);
    const double startup_s = process_age_s();
    for (std::int64_t i = 1; i < options_.warmup_steps; ++i) time_ms(batch, i % 2 == 1);

    std::vector<double> with, without;
    for (std::int64_t i = 0; i < options_.steps; ++i) {
      with.push_back(time_ms(batch, false));
      without.push_back(time_ms(batch, true));
    }
    with = slowest(group_, with);
    without = slowest(group_, without);
    std::vector<double> exposed;
    for (std::size_t i = 0; i < with.size(); ++i) exposed.push_back(with[i] - without[i]);

    StepResult result;
    result.model = options_.train.model.name;
    result.world_size = group_.size();
    result.batch = static_cast<std::int64_t>(batch.plan.global_count) / group_.size();
    result.step_ms = median(with);
    result.step_ms_p10 = quantile(with, 0.1);
    result.step_ms_p90 = quantile(with, 0.9);
    result.samples_per_s = 1e3 * static_cast<double>(batch.plan.global_count) / result.step_ms;
    result.compute_ms = median(without);
    result.exposed_comm_ms = median(exposed);
    result.peak_memory_bytes = group_.all_gather_numbers(peak_resident_bytes());
    const std::vector<double> startup = {1e3 * startup_s};
    result.startup_ms = slowest(group_, startup)[0];
    result.precision = trainer::name_of(options_.train.precision);
    result.backend = group_.name();
    result.threads = threads_;
    result.steps = options_.steps;
    return result;
  }

 private:
  double time_ms(const data::Batch& batch, bool muted) {
    throw_if_stopped("measuring");
    ++steps_;
    muted_.mute(muted);
    step_->set_variant(muted ? 1 : 0);
    group_.barrier().wait_host();
    const auto begin = Clock::now();
    step_->run(steps_, batch, options_.train.lr);
    const auto outcome = step_->take_outcome();
    const double ms = 1e3 * seconds_between(begin, Clock::now());
    // Steps that update nothing would be too fast. Muted, each rank sees its own loss: all must leave together.
    finite_ = finite_ && std::isfinite(outcome.totals.loss);
    return ms;
  }

  const StepOptions& options_;
  comm::ProcessGroup& group_;
  MutedGroup muted_;
  int threads_;
  data::DataSplits splits_;
  std::unique_ptr<nn::Module> model_;
  std::optional<data::Loader> loader_;
  std::optional<trainer::Replica> replica_;
  std::optional<trainer::TrainingStep> step_;
  std::int64_t steps_ = 0;
  bool finite_ = true;
};

}  // namespace

std::string text_of(const StepResult& r, Format format) {
  if (format == Format::kJson)
    return fmt::format(
        R"({{"model":"{}","world_size":{},"batch":{},"precision":"{}","step_ms":{:.4f},"samples_per_s":{:.1f},"compute_ms":{:.4f},"exposed_comm_ms":{:.4f},"peak_memory_bytes":[{}],"startup_ms":{:.1f},"step_ms_p10":{:.4f},"step_ms_p90":{:.4f},"backend":"{}","threads":{},"steps":{}}})"
        "\n",
        r.model, r.world_size, r.batch, r.precision, r.step_ms, r.samples_per_s, r.compute_ms, r.exposed_comm_ms,
        fmt::join(r.peak_memory_bytes, ","), r.startup_ms, r.step_ms_p10, r.step_ms_p90, r.backend, r.threads, r.steps);
  if (format == Format::kCsv)
    return fmt::format(
        "model,world_size,batch,precision,step_ms,samples_per_s,compute_ms,exposed_comm_ms,peak_memory_bytes,startup_"
        "ms,"
        "step_ms_p10,step_ms_p90,backend,threads,steps\n"
        "{},{},{},{},{:.4f},{:.1f},{:.4f},{:.4f},{},{:.1f},{:.4f},{:.4f},{},{},{}\n",
        r.model, r.world_size, r.batch, r.precision, r.step_ms, r.samples_per_s, r.compute_ms, r.exposed_comm_ms,
        fmt::join(r.peak_memory_bytes, " "), r.startup_ms, r.step_ms_p10, r.step_ms_p90, r.backend, r.threads, r.steps);
  std::vector<std::string> memory;
  for (const auto bytes : r.peak_memory_bytes) memory.push_back(human_bytes(static_cast<double>(bytes)));
  std::string text =
      fmt::format("{}: {} rank{} ({}), {} thread{} and {} samples each, {} steps\n", r.model, r.world_size,
                  r.world_size == 1 ? "" : "s", r.backend, r.threads, r.threads == 1 ? "" : "s", r.batch, r.steps);
  text += fmt::format("  step                   {:>10.3f} ms   10 % to 90 %: {:.3f} to {:.3f}\n", r.step_ms,
                      r.step_ms_p10, r.step_ms_p90);
  text += fmt::format("  computation            {:>10.3f} ms   collectives replaced by nothing\n", r.compute_ms);
  text +=
      fmt::format("  exposed communication  {:>10.3f} ms   step minus computation, interleaved\n", r.exposed_comm_ms);
  text += fmt::format("  throughput             {:>10.1f} samples/s\n", r.samples_per_s);
  text += fmt::format("  start-up               {:>10.1f} ms   process start to end of step 1\n", r.startup_ms);
  return text + fmt::format("  peak memory            {:>10}\n", join(memory, ", "));
}

int bench_step(StepOptions options, const std::optional<UsageError>& refusal) {
  install_stop_handlers();
  const int world_size = comm::discover_world(env).size;
  if (options.train.data.empty())
    options.train.data = made_up_data(options.train.model.name, trainer::global_batch_of(options.train, world_size));
  trainer::Session session = trainer::open_session(options.train, refusal);
  {
    Benchmark benchmark(options, session);
    const StepResult result = benchmark.run();
    comm::agree_on(*session.group, [&] {
      if (!benchmark.finite())
        throw DivergedError("the loss became NaN or infinite while it was measured", "lower --lr, or add --clip-norm");
    });
    if (session.group->rank() == 0) std::fputs(text_of(result, options.format).c_str(), stdout);
  }
  session.shutdown();
  return 0;
}

}  // namespace lockstep::bench
