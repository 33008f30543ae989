// A run in TensorBoard.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "trainer/reports.h"

namespace lockstep::trainer {

/// Writes a new file of events in `directory` (trainer/event_file.h), of a run that continues after step `done`: what
/// TensorBoard has of later steps it drops. Throws IoError.
std::unique_ptr<Follower> make_tensorboard_follower(const std::string& directory, std::int64_t done);

}  // namespace lockstep::trainer
