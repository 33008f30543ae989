// lockstep simulate and lockstep plan: their settings, and what they print.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "options/table.h"
#include "simulate/failures.h"
#include "simulate/plan.h"
#include "simulate/step_model.h"

namespace lockstep::simulate {

struct SimulateOptions {
  std::string subject;                     // a model, or a file of `lockstep bench step MODEL --profile-out`
  std::vector<std::string> more_profiles;  // of the same, with other numbers of ranks on a host
  std::vector<int> nodes = {1, 2, 4, 8, 16};
  Cluster cluster;
  bool has_link = false, has_local_link = false;  // Cluster::fabric's were given
  std::optional<double> thread_gbit;              // default: kThreadGbit on a CPU
  bool has_algorithm = false;
  std::vector<std::string> collectives;  // files of measured times: FILE or FILE:NODES
  double step_ms = 0;                    // of one rank on the device that is meant; 0: as measured
  Job job;
  TrialOptions trials;

  double samples = 0;  // of a whole training; 0: not asked for
  double price = 0;    // of a node and hour
  Failures failures;
  double checkpoint_interval_s = 0;  // 0: the best one

  bool json = false;
  std::string html, svg;  // files; empty: none
};

/// What a CPU's thread moves between hosts, if nothing is said: sends, receives and adds.
inline constexpr double kThreadGbit = 20;

/// Settings of both; `plan`: those of lockstep plan. The targets must outlive the table.
options::OptionTable simulate_options(SimulateOptions& options);
options::OptionTable plan_options(SimulateOptions& options);

/// Whether `subject` is a file, and no model's name.
bool names_a_file(const std::string& subject);

/// What a run takes, and costs, with failures. Nothing is asked for where `samples` is 0.
struct Economy {
  int nodes = 1;
  double hours = 0;         // wall time
  double price = 0;         // of all nodes, in the unit of SimulateOptions::price
  double checkpoint_s = 0;  // interval that was taken
  double young_s = 0;       // for comparison
  double lost = 0;          // share of the wall time that checkpoints and failures take
  double failures = 0;      // expected in the run
};
std::optional<Economy> economy_of(const SimulateOptions& options, const Prediction& prediction);

/// Return the text for standard output. `profiles` are those that have been measured; where it is empty, the options
/// name a file. What the options leave open follows from the kind of device. They write the files of --html and --svg.
/// Throw UsageError for something that has to be given, IoError for files.
std::string simulate(SimulateOptions options, std::vector<StepProfile> profiles, const std::string& command);
std::string plan(SimulateOptions options, std::vector<StepProfile> profiles);

/// The page of --html: what was simulated, with plots and tables.
std::string page_of(const SimulateOptions& options, const StepProfile& profile,
                    const std::vector<Prediction>& predictions, const std::string& command);
std::string svg_of(const StepProfile& profile, const std::vector<Prediction>& predictions, const std::string& note);
/// "4 ranks per node; 10 Gbit/s, 20 µs between nodes": the cluster in words.
std::string describe(const SimulateOptions& options);

}  // namespace lockstep::simulate
