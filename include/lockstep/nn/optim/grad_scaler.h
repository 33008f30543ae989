// Loss scaling, for gradients whose numbers are too small for f16.
#pragma once

#include <cstdint>
#include <span>

#include "lockstep/base/misuse.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn {

/// torch.amp.GradScaler (Micikevicius et al., "Mixed Precision Training", 2018): losses are multiplied by a scale
/// before backward, gradients are divided by it before an optimizer moves anything, and a step with gradients that are
/// not finite is skipped. Then the scale falls to half; it doubles after 2,000 good steps in a row.
///
///   nn::GradScaler scaler(backend);
///   optimizer->set_scaler(&scaler);
///   tape.set_activations(DType::kF16);
///   tape.set_loss_scale(scaler.scale());  // stays over Tape::reset()
///   for (…) {
///     …
///     tape.backward(loss.value);
///     optimizer->step({.lr = lr, .clip_norm = 1.0});
///     scaler.update();
///   }
///
/// Scale and counts are in device memory: no step waits for the device, and one that is captured as a graph may be run
/// again. With DistributedDataParallel each rank has a scaler: the summed gradients are the same on all, and so is what
/// each makes of them. Several optimizers may share one, each of which skips its own steps; update() comes after all of
/// them. It works in any precision. One thread uses it. The backend must outlive it, and so must it the optimizers that
/// have it, or their next set_scaler(); a tape keeps a handle of the scale alone.
class GradScaler final {
 public:
  /// No scale falls below this, nor begins there.
  static constexpr double kLeastScale = 0x1p-100;

  struct Options {
    double initial_scale = 65536;
    double growth_factor = 2;
    double backoff_factor = 0.5;
    std::int64_t growth_interval = 2000;  // good steps in a row
    bool dynamic = true;                  // false: the scale stays as it is; steps are skipped all the same
  };
  /// Throws UsageError for a scale that is not positive or no f32, for factors on the wrong side of 1, and for an
  /// interval below 1 or above 2²⁴.
  explicit GradScaler(Backend& backend) : GradScaler(backend, Options()) {}
  GradScaler(Backend& backend, const Options& options);
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  Backend& backend() const { return backend_; }
  const Options& options() const { return options_; }
  /// (1) f32: for Tape::set_loss_scale().
  const Tensor& scale() const { return scale_; }
  /// Once after each step, of all optimizers: moves the scale.
  void update();

  /// What a run resumes from.
  struct State {
    float scale = 0;
    std::int64_t good_steps = 0;     // in a row, since the scale has changed
    std::int64_t skipped_steps = 0;  // of all
    bool operator==(const State&) const = default;
  };
  /// Between steps; waits for the device.
  State state() const;
  /// Throws UsageError for a scale that is not positive or no f32, and for counts below 0 or above 2²⁴.
  void set_state(const State& state);

  /// (ScalerState::kSize), for kernels and asynchronous downloads.
  const Tensor& numbers() const { return numbers_; }
  /// Of what was downloaded: ScalerState::kSize numbers.
  static State state_of(std::span<const float> numbers);
  /// Ends with it: for whoever keeps a reference.
  Lifetime::Ref lifetime() const { return lifetime_.ref(); }

 private:
  Backend& backend_;
  Options options_;
  Tensor numbers_, scale_;
  Lifetime lifetime_;
};

}  // namespace lockstep::nn
