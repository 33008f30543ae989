#include "launcher/launch.h"

#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "base/error.h"
#include "base/text.h"
#include "launcher/channel.h"
#include "launcher/mpirun_command.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {

int remote_start(const std::vector<std::string>& arguments) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  open_standard_fds();
  const auto address = env(kLauncherVariable);
  const auto host = std::ranges::find_if(arguments, [](const auto& word) { return !word.starts_with('-'); });
  check_usage(address && host != arguments.end(), "_rsh is started by mpirun in a `lockstep launch` job, not by hand",
              "run `lockstep launch --hosts a:2,b:2 -- PROGRAM`");
  Channel launcher(connect_to(*address, JobSecret::from(env)));
  // Like ssh: the words make one shell command.
  launcher.send(StartDaemon{*host, join(std::span(host + 1, arguments.end()), " ")});
  for (;;) {
    pollfd entry = {launcher.fd(), static_cast<short>(POLLIN | (launcher.pending_bytes() > 0 ? POLLOUT : 0)), 0};
    ::poll(&entry, 1, -1);
    launcher.flush();
    const auto received = launcher.receive();
    while (const auto message = launcher.next()) {
      if (const auto* ended = std::get_if<Ended>(&*message)) return ended->exit_status.exit_code();
      const auto* output = std::get_if<Output>(&*message);
      if (output == nullptr) continue;
      [[maybe_unused]] const auto written = ::write(STDERR_FILENO, output->bytes.data(), output->bytes.size());
    }
    if (received == Channel::Received::kGone) return static_cast<int>(ExitCode::kDevice);
  }
}

}  // namespace lockstep::launcher
