#include "trainer/divergence.h"

#include <cmath>

#include "base/error.h"
#include "base/log.h"
#include "trainer/bad_batches.h"

namespace lockstep::trainer {

DivergenceSetting parse_divergence(const std::string& text) {
  constexpr std::int64_t kUsualMost = 3, kMost = 1000;
  if (const auto most = parse_limit(text, "rewind", kUsualMost, kMost)) return {.most = *most};
  throw UsageError(fmt::format("'{}' for divergence", text),
                   fmt::format("give stop, rewind, or rewind:K of at most K times, 1 to {}", kMost));
}

void DivergenceWatch::follow(const StepReport& report, const std::string& whose) {
  if (report.scaling) follow(report.step, report.epoch, *report.scaling);
  if (report.scaling && report.scaling->skipped) return;
  check("loss", report.loss, report.step, report.epoch, whose);
  // Clipped by such a norm, no gradient means anything: the parameters are those of before (compute_update_scale()).
  if (clips_) check("gradients' norm", report.grad_norm, report.step, report.epoch, whose);
}

bool DivergenceWatch::is_of_gradients(const StepReport& report) const {
  return clips_ && !report.scaling && std::isfinite(report.loss) && !std::isfinite(report.grad_norm);
}

void DivergenceWatch::follow(const EvalReport& report, std::int64_t epoch) const {
  check("evaluation loss", report.loss, report.step, epoch);
}

void DivergenceWatch::follow(std::int64_t step, std::int64_t epoch, const LossScaling& scaling) {
  in_a_row_ = scaling.skipped ? in_a_row_ + 1 : 0;
  if (rank_ == 0 && scaling.skipped)
    log_info("step {} is skipped, because its gradients are not finite: losses were scaled by {:g}, {}", step,
             scaling.scale,
             dynamic_ ? fmt::format("and are by {:g} from now on", scaling.next_scale) : "which --loss-scale keeps");
  else if (rank_ == 0 && scaling.next_scale != scaling.scale)
    log_debug("step {}: losses are scaled by {:g} from now on, and were by {:g}", step, scaling.next_scale,
              scaling.scale);
  const char* const remedy = "lower --lr, add --warmup or --clip-norm, look at the data, or use --precision bf16";
  if (dynamic_ && scaling.next_scale < kLeastScale)
    diverged(step,
             fmt::format("the gradients are not finite at step {} (epoch {}), even of losses scaled by {:g}", step,
                         epoch, scaling.scale),
             remedy);
  if (!dynamic_ && in_a_row_ >= kMostSkipped)
    diverged(step,
             fmt::format("the gradients are not finite at step {} (epoch {}), as in the {} steps before it, of losses "
                         "scaled by {:g}",
                         step, epoch, in_a_row_ - 1, scaling.scale),
             "lower --loss-scale, or leave it out: it is dynamic then");
}

void DivergenceWatch::check(const char* which, double value, std::int64_t step, std::int64_t epoch,
                            const std::string& whose) const {
  if (std::isfinite(value)) return;
  diverged(step,
           fmt::format("the {} is {} at step {} (epoch {}){}", which, std::isnan(value) ? "NaN" : "infinite", step,
                       epoch, whose.empty() ? "" : ": that of " + whose),
           "lower --lr, add --warmup or --clip-norm, or look at the data");
}

// All ranks see the same sum: one of them says so.
void DivergenceWatch::diverged(std::int64_t step, const std::string& what, const std::string& remedy) const {
  if (rewinds_) throw Diverged{.step = step, .cause = what};
  if (rank_ != 0) throw PeerError(static_cast<int>(ExitCode::kDiverged), what);
  throw DivergedError(what, remedy);
}

}  // namespace lockstep::trainer
