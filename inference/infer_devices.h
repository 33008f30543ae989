// What inference computes on: one device, or several that each have a copy of the weights.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "inference/config.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/session/session.h"

namespace lockstep::inference {

/// The devices that config.device names for `session`, in that order: session.backend, and a backend for each further
/// one. The session must outlive it. Throws what keeps a device from being opened.
class InferDevices {
 public:
  InferDevices(const InferConfig& config, session::Session& session);

  std::size_t size() const { return backends_.size(); }
  nn::Backend& operator[](std::size_t device) const { return *backends_[device]; }
  /// As results have it: "cuda:1", "cpu:3"; "cpu" where no number was given.
  const std::string& name(std::size_t device) const { return names_[device]; }
  /// All of them, as --device has them: "cuda:0,1".
  std::string describe() const;

 private:
  std::vector<std::unique_ptr<nn::Backend>> own_;
  std::vector<nn::Backend*> backends_;
  std::vector<std::string> names_;
};

/// How a session for `config` is opened: a world of one, on all devices that are named.
session::SessionOptions session_options(const InferConfig& config);

}  // namespace lockstep::inference
