// How a run is doing, for those who ask over HTTP.
#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/trainer/config.h"
#include "trainer/reports.h"

namespace lockstep::trainer {

/// Serves, at the address and port of `config`, GET /metrics and /healthz of a run that continues after step `done`
/// (docs/metrics.md). Throws UsageError where it cannot listen there, or needs a token that nobody has given; IoError
/// for a file of the token that cannot be read.
///
/// Note [Health]
/// A run is stalled when nothing has moved for --stall-warning-seconds, or for three times as long as the last step
/// took, where that is longer: no step, evaluation or checkpoint has ended, and rank 0's flight record has had the same
/// phase. Phases change several times in a step, and begin again with each batch of an evaluation, which may last.
std::unique_ptr<Follower> make_status_server(const TrainConfig& config, std::int64_t done);

}  // namespace lockstep::trainer
