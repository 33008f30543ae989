// How long a training step takes, and how much of it is communication that computing does not hide.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "bench/timeline.h"
#include "bench/timings.h"
#include "devices/machine.h"
#include "lockstep/ddp/bucket_plan.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"
#include "report/bottlenecks.h"
#include "simulate/step_profile.h"

namespace lockstep::bench {

/// Steps before those that are measured. On GPUs steps are captured as graphs after a few that run as they are, those
/// with and those without communication apart.
inline constexpr std::int64_t kWarmUpSteps = 10, kWarmUpStepsOnGpu = 20;

struct StepOptions {
  trainer::TrainConfig train;  // without `data`: synthetic samples of the size that the model is known for
  std::int64_t steps = 50;     // measured, of each kind
  std::optional<std::int64_t> warmup_steps;  // default: kWarmUpSteps, or kWarmUpStepsOnGpu
  bool copy_batch = false;                   // to the GPU in every step, as training does; else it stays there
  std::optional<double> peak_tflops;         // of the device, for `mfu`; default: what is known of it
  bool measure_peaks = false;                // of the device, too
  bool timeline = false;                     // of one step, too
  std::optional<bool> bottlenecks;           // what holds it up, too; default: in a table
  bool profile = false;                      // of one step, by operation
  bool step_profile = false;                 // what simulations start from, too
  std::string profile_out;                   // a file for it; empty: none
  bool synthetic = false;                    // bench_step() sets it: `train.data` is its own
  Format format = Format::kTable;
};

/// Of one step that ran operation by operation.
struct Profile {
  double step_ms = 0;  // with the events between operations
  std::vector<nn::OperationCost> operations;
  std::optional<double> peak_bytes_per_s;  // of the device's memory
};

/// The least that the operation can take, in ms: its bytes at the rate of a copy, or its arithmetic at that of products
/// in `precision`, as they were measured, whichever is longer.
std::optional<double> floor_ms(const nn::OperationCost& cost, const devices::MeasuredRates& rates,
                               std::string_view precision);

/// Times in ms. Of a step, the slowest rank's counts.
struct StepResult {
  std::string model;
  int world_size = 1;
  std::int64_t batch = 0;         // samples per rank
  std::string device;             // rank 0's, for people
  std::string precision = "f32";  // or "tf32", "bf16"
  std::string bf16_by;            // the instructions that a CPU computed bf16 with; empty: none
  double step_ms = 0;             // median
  double step_ms_p10 = 0, step_ms_p90 = 0;
  double samples_per_s = 0;    // of all ranks together
  double compute_ms = 0;       // median of the same step with collectives replaced by nothing
  double exposed_comm_ms = 0;  // median difference between a step and such a step beside it; noise may make it negative
  double flops_per_step = 0;   // a rank's: flops.h
  std::optional<double> peak_tflops, mfu;           // the share of it that a rank's step reaches
  std::optional<devices::MeasuredRates> measured;   // of rank 0's device, while the others measured theirs
  bool graphs = false;                              // whether the steps were captured and replayed as CUDA graphs
  std::string graphs_refused;                       // why not
  std::map<std::string, nn::EngineChoice> engines;  // Backend::engines()
  double replays_per_step = 0;                      // graphs that were given to the device, per measured step
  std::vector<std::int64_t> peak_memory_bytes;      // resident, by rank
  double startup_ms = 0;                            // from the start of the process to the end of its first step
  std::string backend;
  int threads = 1;
  std::int64_t steps = 0;
  std::int64_t steps_a_block = 1;                     // that were timed together
  std::optional<Timeline> timeline;                   // rank 0's
  std::int64_t kernels_per_step = 0;                  // that a graph of a step starts; 0: no graph
  std::optional<Profile> profile;                     // rank 0's
  std::optional<simulate::StepProfile> step_profile;  // rank 0's
  std::optional<trainer::HookReport> hook;
  std::size_t buckets = 0, bucket_bytes = 0;
  std::optional<ddp::BucketChoice> bucket_choice;
  report::StepFacts facts;               // to find bottlenecks in
  std::vector<std::string> bottlenecks;  // in words; empty: nobody asked
};

/// JSON, CSV with its heading (and without timeline), or a table of one.
std::string text_of(const StepResult& result, Format format);

/// Collective; rank 0 prints. The step is trainer::TrainingStep's, over one batch that stays: no data is loaded
/// meanwhile. Steps with and without communication alternate, each after a barrier, so that both see the same machine
/// and a core that communication takes from computing counts as communication. On a GPU, to which steps are given ahead
/// of time, they come in blocks, which begin and end with the GPU idle. Returns the exit code.
/// `refusal`: as for trainer::train.
int bench_step(StepOptions options, const std::optional<UsageError>& refusal);

/// Of a rank alone, in this process, with the model's defaults.
simulate::StepProfile measure_step_profile(const std::string& model);

}  // namespace lockstep::bench
