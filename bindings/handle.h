// What every function of the C interface does: handles, and errors as codes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::bindings {

/// Runs `action`: the code of what it throws, whose text is the thread's last error from then on; LOCKSTEP_OK
/// otherwise.
int run(FunctionRef<void()> action) noexcept;

/// Note [Handles]
/// A handle's shell stays until the process ends; what it holds goes when the handle is destroyed. So a call with one
/// that has been destroyed finds an empty shell, and is refused. A shell has a few words, and handles are few.
class Shell {
 public:
  Shell();

 private:
  Shell* const next_;  // all of them: no leak to whoever looks for leaks
};

template <class T>
class Handle : public Shell {
 public:
  explicit Handle(std::shared_ptr<T> held) : held_(std::move(held)) {}

  /// Throws UsageError if it has been destroyed.
  const std::shared_ptr<T>& held(const char* what) const {
    if (held_ == nullptr)
      throw UsageError(fmt::format("{} that has been destroyed", what), "destroy it after its last use");
    return held_;
  }
  void destroy(const char* what) {
    held(what);
    held_.reset();
  }

 private:
  std::shared_ptr<T> held_;
};

/// `argument` must not be NULL.
template <class T>
T& deref(T* argument, const char* name) {
  if (argument == nullptr) throw UsageError(fmt::format("{} is NULL", name), "pass what lockstep.h asks for");
  return *argument;
}

/// `options` becomes `defaults`, as far as the caller, whose structure has `size` bytes, knows of them: a program built
/// with an older lockstep.h has a shorter one.
template <class Options>
void init_options(Options* options, std::size_t size, const Options& defaults) {
  const std::size_t known = std::min(size, sizeof defaults);
  std::memcpy(&deref(options, "options"), &defaults, known);
  options->size = known;
}

}  // namespace lockstep::bindings
