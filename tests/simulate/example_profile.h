// A model as simulations see it.
#pragma once

#include <string>

#include "simulate/step_profile.h"

namespace lockstep::simulate {

/// Ten gradients of 4 MB, ready 20, 28, … 92 ms after the beginning of a step, the last one first; backward ends at 100
/// ms, updates take 10.
inline StepProfile example_profile() {
  StepProfile p{.model = "example", .precision = "f32", .device = "cpu: example", .version = "0", .batch = 8};
  for (int i = 0; i < 10; ++i)
    p.gradients.push_back({.slot = {.name = "layer" + std::to_string(i), .count = 1 << 20, .rows = 1024},
                           .ready_ms = 20.0 + 8 * (9 - i)});
  p.backward_ms = 100;
  p.update_ms = 10;
  p.step_ms = {105, 110, 110, 110, 121};
  p.copy_bytes_per_s = 20e9;
  return p;
}

}  // namespace lockstep::simulate
