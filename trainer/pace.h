// How fast a run is, and how long it will still take.
#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/base/deadline.h"

namespace lockstep::trainer {

/// What a run has to do. Steps count from 1; 0 in place of a number of steps between two events: there are none.
struct RunPlan {
  std::int64_t first_steps = 0, total_steps = 0, steps_per_epoch = 1;  // first_steps: done by an earlier process
  std::int64_t evaluate_every = 0;     // steps; also after the last one, unless evaluation_steps is 0
  double evaluation_steps = 0;         // steps with as many samples as an evaluation has; 0: nothing is evaluated
  std::int64_t checkpoint_every = 0;   // steps
  bool checkpoint_at_end = false;      // there are checkpoints
  bool checkpoint_evaluation = false;  // besides, before each evaluation

  std::int64_t epochs() const { return (total_steps - 1) / steps_per_epoch + 1; }  // begun
};

/// Of a run, from the times at which it takes its steps. What lies between two steps, but for pauses, is the later
/// one's: data that it waited for are a part of its time. Evaluations and checkpoints are timed on their own, for they
/// come seldom. Reads no clock; not thread-safe.
class Pace {
 public:
  enum class Pause { kEvaluation, kCheckpoint };

  Pace(const RunPlan& plan, Clock::time_point now) : plan_(plan), step_(plan.first_steps), mark_(now) {}

  /// `step` is complete, which had so many samples.
  void step_ended(std::int64_t step, std::int64_t samples, Clock::time_point now);
  /// What training stands still for, after step `step`. One at a time.
  void pause_begins(Clock::time_point now);
  void pause_ended(Pause what, std::int64_t step, Clock::time_point now);

  /// Of about the last half minute, or of ten steps where they are longer. 0: nothing is known.
  double samples_per_s() const { return recent_.per_second(); }
  /// That the steps of the last whole epoch took, or nothing.
  std::optional<double> epoch_seconds() const { return epoch_seconds_; }
  /// Until its end, or nothing before the first step. An evaluation that has not been there yet is taken for a third of
  /// the steps with as many samples (a backward pass costs two forward passes), a checkpoint for nothing.
  std::optional<double> seconds_left(Clock::time_point now) const;

 private:
  /// Sums in which what is older counts less.
  struct Recent {
    double seconds = 0, steps = 0, samples = 0;
    void add(double more_seconds, double more_steps, double more_samples, double keep);
    double mean() const { return steps > 0 ? seconds / steps : 0; }
    double per_second() const { return seconds > 0 ? samples / seconds : 0; }
  };

  std::int64_t evaluations_left() const;
  std::int64_t checkpoints_left() const;
  /// Since the last event.
  double lap(Clock::time_point now);

  RunPlan plan_;
  std::int64_t step_;
  std::int64_t evaluated_ = -1, checkpointed_ = -1;  // the steps after which it was done last
  Clock::time_point mark_;                           // of the last event
  double of_step_ = 0;                               // of the present step, before pauses
  Recent recent_, evaluations_, checkpoints_;
  double epoch_so_far_ = 0;
  std::int64_t epoch_steps_ = 0;
  std::optional<double> epoch_seconds_;
};

}  // namespace lockstep::trainer
