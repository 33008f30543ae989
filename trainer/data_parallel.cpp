#include "trainer/build.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "lockstep/base/env.h"
#include "session/opening.h"

namespace lockstep::trainer {
namespace {

parallel::Devices devices_of(const TrainConfig& config, session::Session& session) {
  const std::vector<int>& ids = session.devices;
  const int threads = session.threads;
  auto devices = session.device.kind == DeviceKind::kCpu
                     ? parallel::Devices::cpu(*std::ranges::max_element(ids) + 1, threads)
                     : parallel::Devices::cuda(session::cuda_options(session_options_of(config), 0));
  devices.adopt(ids.front(), *session.backend);
  return devices;
}

}  // namespace

void check_alone(const TrainConfig& config) {
  const int size = comm::discover_world(env).size;
  if (config.parallel == Parallel::kDp && size > 1)
    throw UsageError(fmt::format("--parallel dp is one process for all devices, and this is one of {}", size),
                     "start it without a launcher, or use --parallel ddp");
}

DataParallelModel::DataParallelModel(const TrainConfig& config, session::Session& session, nn::Module& module)
    : first_(*session.backend), devices_(devices_of(config, session)), module_(module, devices_, session.devices) {}

std::string DataParallelModel::describe() const {
  std::vector<std::string> names;
  for (const int id : module_.device_ids()) names.push_back(devices_.name_of(id));
  return fmt::format("{}: {}{}", join(names, ", "), names.size() > 1 ? "each " : "", first_.describe());
}

}  // namespace lockstep::trainer
