// Stop requests (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) as a flag that loops and waits look at; threads without signals.
#pragma once

#include <csignal>

namespace lockstep {

/// SIGINT, SIGTERM, SIGHUP (unless it is ignored, as under nohup) and SIGUSR1 (which mpirun passes on and batch systems
/// send ahead of the end) set the flag. Another signal, more than a second later, ends the process at once.
void install_stop_handlers();

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

/// Blocks all signals of the calling thread while it lives. Threads that it starts meanwhile inherit that for good, so
/// that handlers run on the program's own threads.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace lockstep
