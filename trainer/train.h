// A run of this process, as a rank of its world.
#pragma once

#include <optional>

#include "base/error.h"
#include "trainer/config.h"

namespace lockstep::trainer {

/// Runs `config` from start to end as one rank of the world that the environment describes (a world of one without a
/// launcher). Progress goes to stdout on rank 0. Collective: every rank of the world calls it with the same
/// configuration. Returns the exit code 0, or 75 where it was asked to stop and has saved a checkpoint first
/// (config.checkpoint_dir); throws lockstep::Error otherwise.
///
/// `refusal`: what this rank found wrong with its flags. It is not thrown before the ranks are connected, so that a
/// flag that is wrong on all of them is complained about once.
int train(const TrainConfig& config, const std::optional<UsageError>& refusal = std::nullopt);

/// Collective: what `config.weights` make of the data's test part: every sample is looked at by one rank. Prints loss
/// and accuracy (top-1, and top-5 where there are more than five classes; of tokens the perplexity) on rank 0, and
/// writes them to the metrics file. `refusal`: as train() has it. Returns the exit code 0; throws lockstep::Error
/// otherwise.
int evaluate(const TrainConfig& config, const std::optional<UsageError>& refusal = std::nullopt);

}  // namespace lockstep::trainer
