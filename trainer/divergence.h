// Where training cannot continue: numbers that are not finite.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/comm/process_group.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// Follows a run's numbers, which are the same on all ranks. If they show divergence, all ranks throw: rank 0
/// DivergedError, the others PeerError. A step skipped for its gradients (nn::GradScaler) is no divergence, whatever
/// its loss. But if no scale of losses helps, it is one.
class DivergenceWatch {
 public:
  /// A scale below this does not help: so small a loss has gradients below the smallest normal number of f16.
  static constexpr double kLeastScale = 0x1p-14;
  /// So many steps in a row that a constant scale skips are no accident: they would take the usual first scale of a
  /// dynamic one below kLeastScale.
  static constexpr std::int64_t kMostSkipped = 31;

  /// `clips`: by the gradients' norm; `dynamic`: the scale of losses moves, where there is any.
  DivergenceWatch(const comm::ProcessGroup& group, bool clips, bool dynamic)
      : rank_(group.rank()), clips_(clips), dynamic_(dynamic) {}

  /// Steps in their order. Rank 0 logs those that are skipped. `whose`: of a loss that is not finite, where not of all
  /// ranks; empty: it is not known.
  void follow(const StepReport& report, const std::string& whose = {});
  void follow(const EvalReport& report, std::int64_t epoch) const;

 private:
  void follow(std::int64_t step, std::int64_t epoch, const LossScaling& scaling);
  void check(const char* which, double value, std::int64_t step, std::int64_t epoch,
             const std::string& whose = {}) const;
  [[noreturn]] void diverged(const std::string& what, const std::string& remedy) const;

  int rank_;
  bool clips_, dynamic_;
  std::int64_t in_a_row_ = 0;  // steps that were skipped
};

}  // namespace lockstep::trainer
