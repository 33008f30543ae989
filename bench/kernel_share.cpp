#include "bench/kernel_share.h"

#include <chrono>

#include "base/signals.h"
#include "devices/nvml.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/device.h"

namespace lockstep::bench {
namespace {

// The driver's figure is of the last sixth of a second to second: what it says before that has passed is of another
// time.
constexpr auto kPause = std::chrono::milliseconds(100);
constexpr auto kWindow = std::chrono::seconds(1);

std::vector<std::string> places_of(const std::vector<int>& gpus) {
  const auto& known = probe_cuda().bus_ids;
  std::vector<std::string> places;
  for (const int gpu : gpus) {
    const auto at = static_cast<std::size_t>(gpu);
    places.push_back(at < known.size() ? known[at] : "");
  }
  return places;
}

}  // namespace

KernelShare::KernelShare(std::vector<int> gpus)
    : bus_ids_(places_of(gpus)), sums_(gpus.size()), times_(gpus.size()), thread_(start_thread([this] { ask(); })) {}

KernelShare::~KernelShare() { end(); }

void KernelShare::end() {
  ends_ = true;
  if (thread_.joinable()) thread_.join();
}

void KernelShare::ask() {
  const auto from = Clock::now() + kWindow;
  while (!ends_) {
    std::this_thread::sleep_for(kPause);
    if (Clock::now() < from) continue;
    for (const auto& gpu : devices::read_gpus(devices::Detail::kAll).list)
      for (std::size_t i = 0; i < bus_ids_.size(); ++i)
        if (gpu.bus_id && *gpu.bus_id == bus_ids_[i] && gpu.utilisation_percent) {
          sums_[i] += *gpu.utilisation_percent;
          ++times_[i];
        }
  }
}

std::vector<std::optional<double>> KernelShare::shares() {
  end();
  std::vector<std::optional<double>> found(sums_.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    if (times_[i] > 0) found[i] = sums_[i] / times_[i] / 100;
  return found;
}

}  // namespace lockstep::bench
