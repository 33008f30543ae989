#include "tests/devices/recorded.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

#include "devices/nvml.h"

namespace lockstep::devices::testing {
namespace {

void* library() {
  static void* const kLibrary = ::dlopen(FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
  if (kLibrary == nullptr) throw std::runtime_error(::dlerror());
  return kLibrary;
}

}  // namespace

std::set<std::string> recordings() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(RECORDINGS)) names.insert(entry.path().stem());
  return names;
}

Symbols recorded_symbols(const std::string& recording, std::set<std::string> missing) {
  const std::string path = std::string(RECORDINGS) + "/" + recording + ".json";
  if (!std::filesystem::exists(path)) throw std::runtime_error("no recording " + path);
  ::setenv("LOCKSTEP_TEST_NVML", path.c_str(), 1);
  return [missing = std::move(missing)](const char* name) {
    return missing.contains(name) ? nullptr : ::dlsym(library(), name);
  };
}

Gpus recorded_gpus(const std::string& recording, const std::set<std::string>& missing,
                   const std::filesystem::path& sysfs) {
  const Nvml nvml(recorded_symbols(recording, missing));
  return read_gpus(nvml, Detail::kAll, sysfs);
}

Machine machine_with(Gpus gpus) {
  Cpu cpu;
  cpu.model = "AMD EPYC 9554 64-Core Processor";
  cpu.sockets = 2;
  cpu.cores = 128;
  cpu.processors = 256;
  cpu.usable_processors = 64;
  cpu.numa_nodes = 2;
  cpu.memory_bytes = std::int64_t{1546188} << 20;
  cpu.features = {.avx2 = true, .fma = true, .avx512 = true, .avx512_vnni = true, .avx512_bf16 = true};
  return {.gpus = std::move(gpus), .cpu = cpu};
}

int library_users() { return reinterpret_cast<int (*)()>(::dlsym(library(), "fake_nvml_users"))(); }

}  // namespace lockstep::devices::testing
