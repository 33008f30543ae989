// This process among its ranks: who it is, who it talks to, what it computes on.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "base/error.h"
#include "comm/binding.h"
#include "comm/make_group.h"
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

/// Collective: meets the other ranks, goes on only if `check` passes on all of them (comm::agree_on), and binds this
/// process to its share of the cores. There is no backend yet.
Session join_session(const comm::GroupOptions& options, const std::function<void()>& check);

/// Collective: join_session(), where `refusal` and `config` are what is checked, and opens the device. Throws what
/// cannot be.
Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal);

}  // namespace lockstep::trainer
