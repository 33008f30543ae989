#include "bench/rivals/rivals.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "base/error.h"
#include "comm/agree.h"

namespace lockstep::bench {
namespace {

/// From a library beside this program, which is there where Gloo was when it was built.
std::unique_ptr<Rival> make_gloo_rival(const comm::World& world, comm::ProcessGroup& group, std::string& missing) {
  using Make = Rival* (*)(const comm::World&, comm::ProcessGroup&);
  std::error_code ignored;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / "liblockstep_gloo.so";
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // it stays open
  const auto make = library == nullptr ? nullptr : reinterpret_cast<Make>(::dlsym(library, "lockstep_make_gloo_rival"));
  if (make == nullptr) missing = ::dlerror();
  comm::run_collectively(group, [&] {
    if (make == nullptr)
      throw UsageError("--compare gloo: " + missing,
                       "install libgloo-dev, configure again and build lockstep_gloo: cmake --build build --target "
                       "lockstep_gloo");
  });
  std::unique_ptr<Rival> rival;
  comm::run_collectively(group, [&] {
    try {
      rival.reset(make(world, group));
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw DeviceError(std::string("--compare gloo: ") + error.what(), "see that ranks reach each other by TCP");
    }
  });
  return rival;
}

struct RivalFamily {
  const char* name;
  DeviceKind device;  // whose memory it works on
  std::unique_ptr<Rival> (*make)(const comm::World& world, comm::ProcessGroup& group, std::string& missing);
};
constexpr RivalFamily kRivals[] = {{"mpi", DeviceKind::kCpu, make_mpi_rival},
                                   {"gloo", DeviceKind::kCpu, make_gloo_rival},
                                   {"nccl", DeviceKind::kCuda, make_nccl_rival}};

}  // namespace

std::vector<std::string> rival_names() {
  std::vector<std::string> names;
  for (const RivalFamily& rival : kRivals) names.emplace_back(rival.name);
  return names;
}

std::unique_ptr<Rival> make_rival(const std::string& name, const comm::World& world, comm::ProcessGroup& group,
                                  DeviceKind device) {
  const auto* const family = std::ranges::find(kRivals, name, &RivalFamily::name);
  LOCKSTEP_ASSERT(family != std::end(kRivals), "no rival '{}'", name);
  comm::run_collectively(group, [&] {
    if (family->device == device) return;
    if (device == DeviceKind::kCpu)
      throw UsageError(fmt::format("--compare {}: it works on GPUs' memory, and these ranks are on the CPU", name),
                       "leave it out, or measure on GPUs: --device cuda");
    throw UsageError(fmt::format("--compare {}: it works on the host's memory, and these ranks are on GPUs", name),
                     "compare with nccl, or measure on the CPU: --device cpu");
  });
  std::string missing;
  auto rival = family->make(world, group, missing);
  comm::run_collectively(group, [&] {
    if (rival == nullptr) throw UsageError(fmt::format("--compare {}: {}", name, missing), "leave it out");
  });
  return rival;
}

}  // namespace lockstep::bench
