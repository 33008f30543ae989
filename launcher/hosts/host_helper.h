// `lockstep _host`: the launcher's helper on another host.
#pragma once

namespace lockstep::launcher {

/// Greets on stdout, obeys what the launcher says on stdin, and returns when the job has ended or the launcher has
/// gone; nothing of the job is left on this host then. `gpus` is for Greeting. See Note [Helpers on other hosts] in
/// host_link.h. Call it from the main thread before any other thread starts. Throws MpiError for what no launcher says,
/// DeviceError.
int host_helper(int gpus);

}  // namespace lockstep::launcher
