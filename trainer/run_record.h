// What a run is, for those who follow it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "checkpoint/folder.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/config.h"
#include "lockstep/trainer/metrics.h"

namespace lockstep::trainer {

/// Collective; what rank 0 has is whole, and others have no digest of the data. `facts`: data_facts_of() them, or
/// empty; then they are read where metrics are wanted.
RunReport describe_run(const TrainConfig& config, const session::Session& session, const nn::Module& model,
                       const data::Dataset& dataset, const checkpoint::Facts& facts, std::int64_t total_steps);

}  // namespace lockstep::trainer
