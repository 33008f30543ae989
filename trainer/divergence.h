// Where training cannot continue: numbers that are not finite.
#pragma once

#include <cstdint>
#include <string>

#include "lockstep/comm/process_group.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// Note [Rewinding]
/// With --on-divergence rewind a run that diverges begins again from its newest checkpoint, in the same processes and
/// session. The data are those that follow the step at which it has diverged: the batches before are not repeated, as
/// in Chowdhery et al. (PaLM, 2022, section 5.1). Steps and learning rates are the checkpoint's; the sampler is ahead
/// of them, which later checkpoints have like any other position. Without a checkpoint it is the run's beginning. All
/// ranks see the same numbers, so all do it at the same step.

struct DivergenceSetting {
  std::int64_t most = 0;  // times that a run goes back; 0: divergence ends it
};
/// "stop", "rewind" (3) or "rewind:K". Throws UsageError for another text.
DivergenceSetting parse_divergence(const std::string& text);

/// Thrown where a run that diverges is to go back, on all ranks.
struct Diverged {
  std::int64_t step = 0;
  std::string cause;
};

/// Follows a run's numbers, which are the same on all ranks. If they show divergence, all ranks throw: Diverged
/// where the run may go back, else rank 0 DivergedError, the others PeerError. A step skipped for its gradients
/// (nn::GradScaler) is no divergence, whatever its loss. But if no scale of losses helps, it is one.
class DivergenceWatch {
 public:
  /// A scale below this does not help: so small a loss has gradients below the smallest normal number of f16.
  static constexpr double kLeastScale = 0x1p-14;
  /// So many steps in a row that a constant scale skips are no accident: they would take the usual first scale of a
  /// dynamic one below kLeastScale.
  static constexpr std::int64_t kMostSkipped = 31;

  /// `clips`: by the gradients' norm; `dynamic`: the scale of losses moves, where there is any; `rewinds`: the run may
  /// go back.
  DivergenceWatch(const comm::ProcessGroup& group, bool clips, bool dynamic, bool rewinds = false)
      : rank_(group.rank()), clips_(clips), dynamic_(dynamic), rewinds_(rewinds) {}

  /// Steps in their order. Rank 0 logs those that are skipped. `whose`: of a loss or norm that is not finite, where not
  /// of all ranks; empty: it is not known.
  void follow(const StepReport& report, const std::string& whose = {});
  void follow(const EvalReport& report, std::int64_t epoch) const;
  /// Whether follow() will throw for the gradients' norm alone.
  bool is_of_gradients(const StepReport& report) const;

 private:
  void follow(std::int64_t step, std::int64_t epoch, const LossScaling& scaling);
  void check(const char* which, double value, std::int64_t step, std::int64_t epoch,
             const std::string& whose = {}) const;
  [[noreturn]] void diverged(std::int64_t step, const std::string& what, const std::string& remedy) const;

  int rank_;
  bool clips_, dynamic_, rewinds_;
  std::int64_t in_a_row_ = 0;  // steps that were skipped
};

}  // namespace lockstep::trainer
