// Which threads take signals, and on what stack; and stop requests as a flag that loops and waits look at.
//
// Note [Signals]
// oneDNN's f32 matrix products for AVX2 and AVX-512 keep the stack pointer in the heap while they run (oneDNN#4845). A
// handler that runs on the stack of such a thread writes its frame into whatever lies there. A handler's frame holds
// the vector registers besides, more than 10 KB where there is AMX. So
// - computing threads take no signals from outside: these are blocked before threads start, and threads inherit the
//   mask. One thread waits for the signals that stop a run (watch_for_stops), and takes all others;
// - in the program every thread, OpenMP's and MPI's too, has an alternate stack (cli/main.cpp). All handlers
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

/// While it lives, what the calling thread writes to a pipe without a reader fails with EPIPE, and no SIGPIPE ends the
/// process: for messages beside the work.
class BrokenPipesTolerated {
 public:
  BrokenPipesTolerated() noexcept;
  ~BrokenPipesTolerated();
  BrokenPipesTolerated(const BrokenPipesTolerated&) = delete;
  BrokenPipesTolerated& operator=(const BrokenPipesTolerated&) = delete;

 private:
  bool pending_before_;
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

// Stop requests.

/// SIGINT, SIGTERM, SIGHUP (unless it is ignored, as under nohup) and SIGUSR1 (which mpirun passes on and batch systems
/// send ahead of the end) set the flag. Another signal, more than a second later, ends the process at once. They are
/// sent to the process: a thread waits for them, and the calling one and those that it starts take no signals any more
/// (Note [Signals]). To be called before there are threads, and again in a process that was forked.
void watch_for_stops();

/// The first signal that asked this process to stop; 0 while none has, or while stops are deferred.
int stop_signal() noexcept;

/// The same, deferred or not.
int stop_request() noexcept;

/// While it lives, stop requests change nothing but stop_request(). Its owner polls that, and makes all ranks stop
/// together. Another signal more than a second later still ends the process at once. The launcher is notified, and
/// gives this process more time to end from then on. One at a time.
class DeferredStops {
 public:
  DeferredStops() noexcept;
  ~DeferredStops();
  DeferredStops(const DeferredStops&) = delete;
  DeferredStops& operator=(const DeferredStops&) = delete;
};

/// Throws InterruptedError(what was under way) if a stop has been asked for.
void throw_if_stopped(const char* doing);

}  // namespace lockstep
