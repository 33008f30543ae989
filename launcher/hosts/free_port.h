// A port for the rendezvous of the ranks.
#pragma once

namespace lockstep::launcher {

/// A TCP port that is free on this host now, below those that the kernel hands out by itself, so that it is likely to
/// stay so. Throws DeviceError when all that are tried are taken.
int find_free_port();

}  // namespace lockstep::launcher
