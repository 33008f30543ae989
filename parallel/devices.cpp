#include "lockstep/parallel/devices.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "lockstep/base/device.h"

namespace lockstep::parallel {

Devices::Devices(DeviceKind kind, int count, Maker make)
    : kind_(kind), make_(std::move(make)), places_(static_cast<std::size_t>(std::max(count, 0))) {
  check_usage(count >= 1, "a process without devices", "give it at least one");
}

Devices Devices::cpu(int count, int threads) {
  return {DeviceKind::kCpu, count, [threads](int) { return nn::make_cpu_backend(threads); }};
}

Devices Devices::cuda(const nn::CudaOptions& options) {
  const CudaProbe& probe = probe_cuda();
  if (probe.devices == 0) throw DeviceError(probe.problem, probe.remedy);
  return {DeviceKind::kCuda, probe.devices, [options](int id) {
            nn::CudaOptions of_id = options;
            of_id.device = id;
            return nn::make_cuda_backend(of_id);
          }};
}

void Devices::check(int id) const {
  if (id < 0 || id >= count())
    throw UsageError(fmt::format("there is no device {}: there {}", id, describe()),
                     fmt::format("choose 0{}", count() > 1 ? fmt::format(" to {}", count() - 1) : ""));
}

nn::Backend& Devices::operator[](int id) {
  check(id);
  Place& place = places_[static_cast<std::size_t>(id)];
  if (place.backend == nullptr) {
    check_usage(make_ != nullptr, "devices that nothing makes", "give Devices a function that returns a backend");
    place.made = make_(id);
    check_usage(place.made != nullptr, "a device whose maker returned none", "let it return a backend for each number");
    place.backend = place.made.get();
  }
  return *place.backend;
}

void Devices::adopt(int id, nn::Backend& backend) {
  check(id);
  Place& place = places_[static_cast<std::size_t>(id)];
  LOCKSTEP_ASSERT(place.backend == nullptr, "{} is in use", name_of(id));
  place.backend = &backend;
}

std::string Devices::name_of(int id) const {
  return fmt::format("{}:{}", kind_ == DeviceKind::kCpu ? "cpu" : "cuda", id);
}

std::string Devices::name_of(const nn::Backend& backend) const {
  for (int id = 0; id < count(); ++id)
    if (places_[static_cast<std::size_t>(id)].backend == &backend) return name_of(id);
  return to_string(backend.device());
}

std::string Devices::describe() const {
  return count() == 1 ? fmt::format("is one device, {}", name_of(0))
                      : fmt::format("are {} devices, {} to {}", count(), name_of(0), name_of(count() - 1));
}

}  // namespace lockstep::parallel
