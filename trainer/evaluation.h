// A run that only evaluates, of this process as a rank of its world.
#pragma once

#include <optional>

#include "base/error.h"
#include "trainer/config.h"

namespace lockstep::trainer {

/// Collective: what `config.weights` make of the data's test part: every sample is looked at by one rank. Prints loss
/// and accuracy (top-1, and top-5 where there are more than five classes; of tokens the perplexity) on rank 0, and
/// writes them to the metrics file. `refusal`: as train() has it. Returns the exit code 0; throws lockstep::Error
/// otherwise.
int evaluate(const TrainConfig& config, const std::optional<UsageError>& refusal = std::nullopt);

}  // namespace lockstep::trainer
