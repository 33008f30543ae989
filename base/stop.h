// Stop requests (Ctrl-C, SIGTERM) as a flag that loops and waits look at.
#pragma once

namespace lockstep {

/// SIGINT and SIGTERM set the flag; another one more than a second later ends the process at once.
void install_stop_handlers();

/// The first signal that asked this process to stop; 0 while none has.
int stop_signal() noexcept;

/// Throws InterruptedError(what was under way) if a stop has been asked for.
void throw_if_stopped(const char* doing);

}  // namespace lockstep
