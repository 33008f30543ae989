// Replaces the C library's pthread_create(), of which OpenMP's, MPI's and all other threads of the program are made, by
// one that gives each thread an alternate signal stack first (Note [Signals] in base/signals.h).
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <memory>
#include <new>

#include "base/signals.h"

namespace {

struct Start {
  void* (*routine)(void*);
  void* argument;
};

void* run_with_signal_stack(void* given) {
  const Start start = *std::unique_ptr<Start>(static_cast<Start*>(given));
  lockstep::use_alternate_signal_stack();
  return start.routine(start.argument);
}

}  // namespace

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*routine)(void*),
                              void* argument) noexcept {
  static const auto next = reinterpret_cast<decltype(&::pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  std::unique_ptr<Start> start(new (std::nothrow) Start{routine, argument});
  if (start == nullptr) return EAGAIN;
  const int code = next(thread, attributes, run_with_signal_stack, start.get());
  if (code == 0) static_cast<void>(start.release());
  return code;
}
