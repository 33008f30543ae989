#include "lockstep/base/thread_use.h"

#include <utility>

namespace lockstep {
namespace {

struct Identity {
  ThreadId acts_for = this;  // itself
};
thread_local Identity identity;

}  // namespace

ThreadId this_thread() noexcept { return identity.acts_for; }

ActsFor::ActsFor(ThreadId other) noexcept : before_(std::exchange(identity.acts_for, other)) {}

ActsFor::~ActsFor() { identity.acts_for = before_; }

}  // namespace lockstep
