// Stop requests (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) as a flag that loops and waits look at.
#pragma once

namespace lockstep {

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
