#include "trainer/session.h"

#include "base/env.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agree.h"
#include "comm/make_group.h"

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

Session open_session(const TrainConfig& config, const std::optional<UsageError>& refusal) {
  Session session;
  session.world = comm::discover_world(env);
  const auto& world = session.world;
  set_log_identity(world.rank, world.size, host_name());
  set_log_level_named(config.log_level);

  comm::GroupOptions options;
  options.timeout_seconds = config.timeout_seconds;
  options.backend = config.backend;
  options.spare_core = config.threads > 0 && comm::expected_cores(world) > config.threads;
  session.group = comm::make_group(world, options);

  comm::agree_on(*session.group, [&] {
    if (refusal) throw *refusal;
    validate(config);
    check_device(config.device);
  });
  session.binding = comm::bind_to_share(*session.group);
  session.threads = config.threads > 0 ? config.threads : session.binding.cores;
  session.backend = nn::make_cpu_backend(session.threads);
  return session;
}

}  // namespace lockstep::trainer
