#include "trainer/session.h"

#include "base/env.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agree.h"

namespace lockstep::trainer {
namespace {

void set_log_level_named(const std::string& name) {
  // "info" is the default, and only rank 0's: the others speak up when something is wrong.
  if (name == "debug") set_log_level(LogLevel::kDebug);
  if (name == "warn") set_log_level(LogLevel::kWarn);
  if (name == "error") set_log_level(LogLevel::kError);
}

void check_device(const std::string& device) {
  if (device == "auto" || device == "cpu") return;
  if (device == "cuda" || device.starts_with("cuda:"))
    throw DeviceError(fmt::format("--device {}: this build computes on the CPU only", device), "use --device cpu");
  const std::vector<std::string> known = {"auto", "cpu", "cuda"};
  const auto near = nearest(device, known);
  throw UsageError(fmt::format("unknown device '{}'", device),
                   near ? fmt::format("did you mean '{}'?", *near) : "use auto or cpu");
}

}  // namespace

Session join_session(const comm::GroupOptions& options, const std::function<void()>& check) {
  Session session;
  session.world = comm::discover_world(env);
  set_log_identity(session.world.rank, session.world.size, host_name());
  session.group = comm::make_group(session.world, options);
  comm::agree_on(*session.group, check);
  session.binding = comm::bind_to_share(*session.group);
  session.threads = session.binding.cores;
  return session;
}

Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal) {
  set_log_level_named(config.log_level);
  comm::GroupOptions options;
  options.timeout_seconds = config.timeout_seconds;
  options.backend = config.backend;
  options.spare_core = config.threads > 0 && comm::expected_cores(comm::discover_world(env)) > config.threads;
  Session session = join_session(options, [&] {
    if (refusal) throw *refusal;
    validate(config);
    check_device(config.device);
  });
  if (config.threads > 0) session.threads = config.threads;
  session.backend = nn::make_cpu_backend(session.threads);
  return session;
}

}  // namespace lockstep::trainer
