// Which threads take signals, and on what stack.
//
// Note [Signals]
// oneDNN's f32 matrix products for AVX2 and AVX-512 keep the stack pointer in the heap while they run (oneDNN#4845). A
// handler that runs on the stack of such a thread writes its frame into whatever lies there. A handler's frame holds
// the vector registers besides, more than 10 KB where there is AMX. So
// - computing threads take no signals from outside: these are blocked before threads start, and threads inherit the
//   mask. One thread waits for the signals that stop a run (base/stop.h), and takes all others;
// - in the program every thread, OpenMP's and MPI's too, has an alternate stack (cli/thread_stacks.cpp). All handlers
//   that were installed before run on it: for signals that a thread causes itself, and for profilers (SIGPROF), which
//   have to interrupt computing threads;
// - a program of which lockstep is a library keeps its handlers and masks: there, signals are blocked while a kernel
//   runs and while threads for kernels start.
#pragma once

#include <csignal>

#include <system_error>
#include <thread>
#include <utility>

namespace lockstep {

/// Blocks in the calling thread, and in those that it starts from now on, the signals that others send. Those that a
/// thread causes itself stay (SIGSEGV and the like, SIGPIPE), and so does SIGPROF if it has a handler: all handlers
/// that are there run on the threads' alternate stacks from now on. A process that is forked has the mask that was
/// before.
void keep_signals_off_this_thread() noexcept;

/// Unblocks in the calling thread the signals that others send.
void take_signals_on_this_thread() noexcept;

/// Gives the calling thread an alternate signal stack until it ends, if it has none.
void use_alternate_signal_stack() noexcept;

/// While it lives, the calling thread takes no signal that others send. Free where keep_signals_off_this_thread() has
/// been called, there or in the thread that started it; two system calls elsewhere.
class SignalsBlocked {
 public:
  SignalsBlocked() noexcept;
  ~SignalsBlocked() {
    if (blocks_) ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  bool blocks_ = false;
  sigset_t before_;
};

namespace detail {
void begin_thread() noexcept;
[[noreturn]] void refuse_thread(const std::system_error& error);
}  // namespace detail

/// A thread of ours: it takes no signal from outside, and has an alternate stack. Throws DeviceError if the system has
/// no more threads.
template <class Work>
std::thread start_thread(Work&& work) {
  const SignalsBlocked inherited;
  try {
    return std::thread([work = std::forward<Work>(work)]() mutable {
      detail::begin_thread();
      work();
    });
  } catch (const std::system_error& error) {
    detail::refuse_thread(error);
  }
}

}  // namespace lockstep
