#include "cli/commands.h"

#define CXXOPTS_NO_REGEX true
#include <fmt/format.h>
#include <hwloc.h>
#include <openssl/crypto.h>
#include <spdlog/version.h>
#include <toml++/toml.h>
#include <zlib.h>
#include <cxxopts.hpp>
#include <nlohmann/json_fwd.hpp>

#include <cstdio>

#include "base/cpu.h"
#include "base/cuda/library.h"
#include "base/cuda/probe.h"
#include "base/error.h"
#include "base/text.h"
#include "base/version.h"
#include "cli/build_config.h"
#include "comm/backends.h"
#include "devices/read_gpus.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::cli {
namespace {

std::string line(const char* name, const std::string& value) { return fmt::format("{:<17}{}\n", name, value); }

std::string hwloc_text() {
  const unsigned version = hwloc_get_api_version();
  return fmt::format("{}.{}.{}", version >> 16, (version >> 8) & 0xffu, version & 0xffu);
}

std::string backends() {
  std::vector<std::string> names = {"cpu"};
  if (probe_cuda().built) names.emplace_back("cuda");
  names.emplace_back("self");
  for (const auto* family : comm::backend_families())
    if (family->is_built()) names.push_back(family->name);
  return join(names, ", ");
}

/// What `ask` says of the library that it is given, or why there is none.
template <class Ask>
std::string library_text(const char* what, const char* file, const Ask& ask) {
  try {
    const char* const names[] = {file};
    return ask(SharedLibrary(what, names, ""));
  } catch (const CudaError& error) {
    return error.what();
  }
}

/// Major, minor and patch of 92800: two digits each but the first.
std::string version_of(std::size_t number) {
  return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

/// The libraries have C interfaces that have been the same for years: no header of theirs is needed here.
template <class Number>
std::string reported_version(const SharedLibrary& library, const char* function) {
  Number (*get)() = nullptr;
  library.bind(get, function);
  return version_of(static_cast<std::size_t>(get()));
}

std::string driver_text(const CudaProbe& probe) {
  if (probe.driver_version == 0) return probe.problem;
  const auto installed = devices::read_gpus(devices::Detail::kChoice).driver_version;
  const std::string driver = fmt::format("driver {}", installed.value_or("of unknown version"));
  return fmt::format("{} for CUDA up to {}{}{}", driver, cuda_version_text(probe.driver_version),
                     probe.problem.empty() ? "" : ", ", probe.problem);
}

std::string cuda_lines(const CudaProbe& probe) {
  std::string text = line(
      "CUDA", fmt::format("{} (toolkit {}), for GPUs of compute capability {}; {}",
                          cuda_version_text(probe.runtime_version), kCudaToolkit, cuda_targets(), driver_text(probe)));
  const std::string lt = fmt::format("libcublasLt.so.{}", probe.runtime_version / 1000);
  text += line("cuBLASLt", library_text("cuBLASLt", lt.c_str(), [](const SharedLibrary& library) {
                 return reported_version<std::size_t>(library, "cublasLtGetVersion");
               }));
  text += line("cuDNN", library_text("cuDNN", "libcudnn.so.9", [](const SharedLibrary& library) {
                 return reported_version<std::size_t>(library, "cudnnGetVersion");
               }));
  return text;
}

}  // namespace

OptionTable version_options() {
  OptionTable table("version", "Prints this build, its backends, the instruction set in use and library versions.");
  options::add_config_option(table);
  return table;
}

std::string version_text() {
  std::string text = line("lockstep", fmt::format("{} (git {})", version(), git_revision()));
  text += line("build", fmt::format("{}, {}", build_type(), compiler()));
  text += line("instruction set", cpu_instruction_set());
  text += line("backends", backends());
  for (const auto& lack : split(kMissing, '|')) {
    if (!lack.empty()) text += line("without", lack);
  }
  for (const auto* family : comm::backend_families())
    if (family->library_version != nullptr && (family->is_built() || family->memory == DeviceKind::kCpu))
      text += line(family->title.c_str(), family->library_version());
  if (probe_cuda().built) text += cuda_lines(probe_cuda());
  text += line("oneDNN", fmt::format("{} (computes with {}; bf16: {})", nn::onednn_version(), nn::cpu_kernel_isa(),
                                     nn::name_of(nn::cpu_bf16())));
  text += line("hwloc", hwloc_text());
  text += line("spdlog", fmt::format("{}.{}.{}", SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH));
  text += line("fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100));
  text +=
      line("cxxopts", fmt::format("{}.{}.{}", cxxopts::version.major, cxxopts::version.minor, cxxopts::version.patch));
  text += line("toml++", fmt::format("{}.{}.{}", TOML_LIB_MAJOR, TOML_LIB_MINOR, TOML_LIB_PATCH));
  text += line("nlohmann/json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                            NLOHMANN_JSON_VERSION_PATCH));
  text += line("OpenSSL", OpenSSL_version(OPENSSL_VERSION_STRING));
  text += line("zlib", zlibVersion());
  return text;
}

int version_command(const Sources& sources, const ForeignFlags& foreign) {
  const OptionTable table = version_options();
  const bool help = parse_options(table, sources, foreign).help;
  std::fputs((help ? table.help() : version_text()).c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli
