// Batches that cannot be trained on: all ranks leave them out, or the run ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/loader.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/trainer/metrics.h"
#include "trainer/step.h"

namespace lockstep::trainer {

/// Note [Bad batches]
/// With --on-bad-batch skip all ranks leave a batch out if one of them cannot read its part, or if the loss is not
/// finite. The first is agreed on before the step, in one small exchange between the hosts' processes: nothing is
/// computed then. The second shows in the step's sums, which all ranks have: parameters and moments have stayed as they
/// were (Optimizer::compute_update_scale()), so has the moving average, the optimizer does not count the step, and
/// running statistics are taken back from a copy of before. So a run has the bits of one whose data never had the
/// batch at that step; steps and learning rates count on. What would keep a trace is refused: carried states, and hooks
/// with a state (residuals, scales). A device's loss comes a step later, so there only what cannot be read is left out.

/// How often "WORD" (`usual`) or "WORD:N" lets something happen, N from 1 to `most`; "stop": 0. Nothing for other
/// texts.
std::optional<std::int64_t> parse_limit(const std::string& text, const std::string& word, std::int64_t usual,
                                        std::int64_t most);

struct BadBatchSetting {
  std::int64_t most = 0;  // batches that are left out before the run ends; 0: it ends with the first
};
/// "stop", "skip" (10) or "skip:N". Throws UsageError for another text.
BadBatchSetting parse_bad_batch(const std::string& text);

/// The same calls on all ranks. Group and backend outlive it.
class BadBatches {
 public:
  /// Collective. `hook` carries gradients; nullptr: none. Throws UsageError for one with a state. `keeps`: the caller
  /// takes statistics back itself, whatever becomes of bad batches.
  BadBatches(const std::string& setting, comm::ProcessGroup& group, nn::Backend& backend, nn::Module& model,
             ddp::CommHook* hook, bool keeps = false);

  /// Whether any is left out.
  bool skips() const { return most_ > 0; }
  /// Whether a loss that is not finite leaves its batch out.
  bool skips_losses() const { return skips() && on_cpu_; }

  /// Collective, before the step of `batch`: what all leave out; nothing: train. One batch more than may be left out
  /// throws what reading has thrown, PeerError on the other ranks. `stop`: this rank wants all to stop.
  std::optional<SkippedReport> look(std::int64_t step, const data::Batch& batch, bool stop);
  /// Whether a rank wanted that when the last batch was left out: no step has sent it.
  bool stop_wanted() const { return stop_wanted_; }
  /// Before a step is computed, and to have them as they were before it.
  void keep_statistics();
  void take_statistics_back();
  /// What of this rank's part of a batch is the first that is not finite: TrainingStep::first_not_finite().
  using Find = FunctionRef<std::string()>;
  /// After it: what it has come to, and whether this rank's own loss is not finite. On CPUs collective where that of
  /// all is not; whose() then says which rank's it is.
  std::optional<SkippedReport> look(const TrainingStep::Outcome& outcome, const data::Batch& batch, bool own,
                                    Find find);
  /// On CPUs, collective: whose() is that of gradients whose norm is not finite.
  void look_at_gradients(const data::Batch& batch, Find find);
  /// "rank 1, samples 17, 203 and 30 more, and before it the output of fc1 (linear)"; empty: of all ranks, or it is not
  /// known.
  const std::string& whose() const { return whose_; }

  /// So far.
  std::int64_t count() const { return count_; }

 private:
  SkippedReport causes_of(std::int64_t step, const data::Batch& batch, const std::string& own);
  SkippedReport left_out(SkippedReport report);
  void set_whose(const SkippedReport& report);

  comm::ProcessGroup& group_;
  nn::Backend& backend_;
  const std::int64_t most_;
  const bool on_cpu_;
  std::int64_t count_ = 0;
  bool stop_wanted_ = false;
  std::string whose_;
  std::vector<nn::NamedBuffer> buffers_;
  std::vector<nn::Tensor> before_;
};

}  // namespace lockstep::trainer
