// Something that is done when a scope is left, by an exception too.
#pragma once

#include <utility>

namespace lockstep {

/// Runs `action`, which must not throw, when it ends.
template <class Action>
class [[nodiscard]] OnExit {
 public:
  explicit OnExit(Action action) : action_(std::move(action)) {}
  ~OnExit() { action_(); }
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;

 private:
  Action action_;
};

}  // namespace lockstep
