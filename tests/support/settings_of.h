// Settings for tests that run several models or optimizers in the same way.
#pragma once

#include <string>

#include "lockstep/nn/models/models.h"

namespace lockstep::testing {

/// Those of `all` that `model` has.
inline Settings settings_of(const std::string& model, const Settings& all) {
  Settings its;
  for (const auto& [name, value] : all)
    if (find_setting(nn::model_family(model).settings, name) != nullptr) its.set(name, value);
  return its;
}

}  // namespace lockstep::testing
