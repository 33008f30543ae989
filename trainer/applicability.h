// Settings that apply to some runs only. One that would change nothing is refused: nothing is taken in silence.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/device.h"
#include "trainer/config.h"
#include "trainer/infer/config.h"

namespace lockstep::trainer {

/// Why a setting would have no effect ("applies to --optimizer sgd, and this run has --optimizer adamw") and what to
/// do.
struct Inapplicable {
  std::string why;
  std::string remedy;
};

/// What is wrong with giving `setting`, which is a flag's name without dashes; nothing where it has an effect.
///
/// A value that asks for nothing (--tf32=false, --dropout 0, --graphs no) always applies: it says what happens, and it
/// takes back what a file has asked for. So does what a model that is not known takes, of which others complain.
///
/// What depends on how long a run is or on how many ranks it has is not looked at: --warmup, --eval-every,
/// --checkpoint-every, --log-every and --check-replicas in a run of few steps, --bucket-mb, --first-bucket-mb,
/// --backend,
/// --timeout-seconds, --encrypt, --sync-batchnorm or --share-devices in a world of one, --accumulate where a rank's
/// share has fewer samples than parts. The same command is run at several sizes.
std::optional<Inapplicable> inapplicable(const TrainConfig& config, std::string_view setting);
std::optional<Inapplicable> inapplicable(const InferConfig& config, std::string_view setting);

/// Throws UsageError for the first setting of all that is given and inapplicable.
void check_applicability(const TrainConfig& config);
void check_applicability(const InferConfig& config);

/// What only the ranks together know: throws UsageError where --encrypt cannot hold for GPUs that `several_hosts` have.
void check_encryption(const TrainConfig& config, DeviceKind kind, bool several_hosts);

}  // namespace lockstep::trainer
