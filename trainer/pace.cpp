#include "trainer/pace.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace lockstep::trainer {
namespace {

constexpr double kRememberedSeconds = 30, kRememberedSteps = 10;  // the longer of the two
constexpr double kPauseKept = 0.9;

/// Multiples of `every` above `from`, up to `to`.
std::int64_t multiples(std::int64_t every, std::int64_t from, std::int64_t to) {
  return every > 0 && from < to ? to / every - from / every : 0;
}

/// The same, and `to`.
std::int64_t multiples_and_end(std::int64_t every, std::int64_t from, std::int64_t to) {
  if (from >= to) return 0;
  return multiples(every, from, to) + (every > 0 && to % every == 0 ? 0 : 1);
}

}  // namespace

void Pace::Recent::add(double more_seconds, double more_steps, double more_samples, double keep) {
  seconds = keep * seconds + more_seconds;
  steps = keep * steps + more_steps;
  samples = keep * samples + more_samples;
}

double Pace::lap(Clock::time_point now) { return seconds_between(std::exchange(mark_, now), now); }

void Pace::step_ended(std::int64_t step, std::int64_t samples, Clock::time_point now) {
  const double took = std::exchange(of_step_, 0) + lap(now);
  const double remembered = std::max(kRememberedSeconds, kRememberedSteps * recent_.mean());
  // A first step is seldom like others: it counts until there is another.
  const double keep = step == plan_.first_steps + 2 ? 0 : std::exp(-took / remembered);
  recent_.add(took, 1, static_cast<double>(samples), keep);
  step_ = step;
  epoch_so_far_ += took;
  ++epoch_steps_;
  if (step % plan_.steps_per_epoch != 0) return;
  if (epoch_steps_ == plan_.steps_per_epoch) epoch_seconds_ = epoch_so_far_;
  epoch_so_far_ = 0;
  epoch_steps_ = 0;
}

void Pace::pause_begins(Clock::time_point now) { of_step_ += lap(now); }

void Pace::pause_ended(Pause what, std::int64_t step, Clock::time_point now) {
  const bool evaluation = what == Pause::kEvaluation;
  (evaluation ? evaluated_ : checkpointed_) = step;
  (evaluation ? evaluations_ : checkpoints_).add(lap(now), 1, 0, kPauseKept);
}

// One that is due now, and has not been there yet, is left.
std::int64_t Pace::evaluations_left() const {
  if (plan_.evaluation_steps <= 0) return 0;
  return multiples_and_end(plan_.evaluate_every, std::max({step_ - 1, evaluated_, plan_.first_steps}),
                           plan_.total_steps);
}

std::int64_t Pace::checkpoints_left() const {
  if (!plan_.checkpoint_at_end) return 0;
  const std::int64_t from = std::max({step_ - 1, checkpointed_, plan_.first_steps}), to = plan_.total_steps;
  const std::int64_t every = plan_.checkpoint_every;
  std::int64_t left = multiples_and_end(every, from, to);
  const std::int64_t evaluate = plan_.checkpoint_evaluation ? plan_.evaluate_every : 0;
  if (evaluate == 0 || from >= to) return left;
  left += multiples(evaluate, from, to - 1);
  if (every > 0 && every / std::gcd(every, evaluate) <= to / evaluate)
    left -= multiples(std::lcm(every, evaluate), from, to - 1);
  return left;
}

std::optional<double> Pace::seconds_left(Clock::time_point now) const {
  if (recent_.steps <= 0) return std::nullopt;
  const double step = recent_.mean();
  const double evaluation = evaluations_.steps > 0 ? evaluations_.mean() : plan_.evaluation_steps * step / 3;
  const double checkpoint = checkpoints_.mean();
  const double left = step * static_cast<double>(plan_.total_steps - step_) +
                      evaluation * static_cast<double>(evaluations_left()) +
                      checkpoint * static_cast<double>(checkpoints_left());
  return std::max(0.0, left - of_step_ - seconds_between(mark_, now));
}

}  // namespace lockstep::trainer
