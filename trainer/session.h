// This process among its ranks: who it is, who it talks to, what it computes on.
#pragma once

#include <memory>
#include <optional>

#include "base/error.h"
#include "comm/binding.h"
#include "comm/process_group.h"
#include "comm/world.h"
#include "nn/ops/backend.h"
#include "trainer/config.h"

namespace lockstep::trainer {

/// Destroyed in reverse: the backend's memory first, the group last. Ending in order takes group->shutdown().
struct Session {
  comm::World world;
  std::unique_ptr<comm::ProcessGroup> group;
  comm::Binding binding;
  int threads = 1;  // that compute
  std::unique_ptr<nn::Backend> backend;
};

/// Collective: meets the other ranks, agrees with them that `refusal` and `config` are in order, binds this process to
/// its share of the cores and opens the device. Throws what cannot be.
Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal);

}  // namespace lockstep::trainer
