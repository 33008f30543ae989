#include "comm/backends.h"

#include <algorithm>

#include "lockstep/base/settings.h"

namespace lockstep::comm {

const BackendFamily& shm_backend();
const BackendFamily& hosts_backend();
const BackendFamily& mpi_backend();
const BackendFamily& nccl_backend();

namespace {

const Registry<BackendFamily>& backend_registry() {
  static const Registry<BackendFamily> backends("backend",
                                                {&shm_backend(), &hosts_backend(), &mpi_backend(), &nccl_backend()});
  return backends;
}

}  // namespace

const std::vector<const BackendFamily*>& backend_families() { return backend_registry().all(); }

const BackendFamily* backend_family(const std::string& name) {
  if (name == kAutoBackend) return nullptr;
  if (const auto* family = backend_registry().find(name)) return family;
  auto names = backend_registry().names();
  names.insert(names.begin(), kAutoBackend);
  throw_unknown("backend", name, names);
}

const BackendFamily& device_backend(const std::string& name) {
  if (const auto* family = backend_family(name); family != nullptr && family->memory != DeviceKind::kCpu)
    return *family;
  return **std::ranges::find_if(backend_families(), [](const auto* one) { return one->memory != DeviceKind::kCpu; });
}

}  // namespace lockstep::comm
