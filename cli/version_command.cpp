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

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "base/cpu.h"
#include "base/cuda/library.h"
#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "base/version.h"
#include "cli/build_config.h"
#include "comm/backends.h"
#include "devices/nvml.h"
#include "lockstep/nn/ops/backend.h"
#include "options/values.h"

namespace lockstep::cli {
namespace {

using bench::Facts;

constexpr const char* kProgram = "lockstep";
constexpr const char* kBackends = "backends";

std::string hwloc_text() {
  const unsigned version = hwloc_get_api_version();
  return fmt::format("{}.{}.{}", version >> 16, (version >> 8) & 0xffu, version & 0xffu);
}

std::vector<std::string> backends() {
  std::vector<std::string> names = {"cpu"};
  if (probe_cuda().built) names.emplace_back("cuda");
  names.emplace_back("self");
  for (const auto* family : comm::backend_families())
    if (family->is_built()) names.push_back(family->name);
  return names;
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

Facts cuda_facts(const CudaProbe& probe) {
  Facts facts;
  facts.emplace_back(
      "CUDA", fmt::format("{} (toolkit {}), for GPUs of compute capability {}; {}",
                          cuda_version_text(probe.runtime_version), kCudaToolkit, cuda_targets(), driver_text(probe)));
  const std::string lt = fmt::format("libcublasLt.so.{}", probe.runtime_version / 1000);
  facts.emplace_back("cuBLASLt", library_text("cuBLASLt", lt.c_str(), [](const SharedLibrary& library) {
                       return reported_version<std::size_t>(library, "cublasLtGetVersion");
                     }));
  facts.emplace_back("cuDNN", library_text("cuDNN", "libcudnn.so.9", [](const SharedLibrary& library) {
                       return reported_version<std::size_t>(library, "cudnnGetVersion");
                     }));
  return facts;
}

}  // namespace

Facts version_facts() {
  Facts facts;
  facts.emplace_back(kProgram, fmt::format("{} (git {})", version(), git_revision()));
  facts.emplace_back("build", fmt::format("{}, {}", build_type(), compiler()));
  facts.emplace_back("instruction set", cpu_instruction_set());
  facts.emplace_back(kBackends, join(backends(), ", "));
  for (const auto* family : comm::backend_families())
    if (family->library_version != nullptr && (family->is_built() || family->memory == DeviceKind::kCpu))
      facts.emplace_back(family->title, family->library_version());
  if (probe_cuda().built) std::ranges::move(cuda_facts(probe_cuda()), std::back_inserter(facts));
  facts.emplace_back("oneDNN", fmt::format("{} (computes with {}; bf16: {})", nn::onednn_version(),
                                           nn::cpu_kernel_isa(), nn::name_of(nn::cpu_bf16())));
  facts.emplace_back("hwloc", hwloc_text());
  facts.emplace_back("spdlog", fmt::format("{}.{}.{}", SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH));
  facts.emplace_back("fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100));
  facts.emplace_back("cxxopts",
                     fmt::format("{}.{}.{}", cxxopts::version.major, cxxopts::version.minor, cxxopts::version.patch));
  facts.emplace_back("toml++", fmt::format("{}.{}.{}", TOML_LIB_MAJOR, TOML_LIB_MINOR, TOML_LIB_PATCH));
  facts.emplace_back("nlohmann/json", fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR,
                                                  NLOHMANN_JSON_VERSION_PATCH));
  facts.emplace_back("OpenSSL", OpenSSL_version(OPENSSL_VERSION_STRING));
  facts.emplace_back("zlib", zlibVersion());
  return facts;
}

namespace {

std::vector<std::string> missing() {
  std::vector<std::string> all = split(kMissing, '|');
  std::erase_if(all, [](const std::string& lack) { return lack.empty(); });
  return all;
}

}  // namespace

OptionTable version_options(bool& json) {
  OptionTable table("version", "Prints this build, its backends, the instruction set in use and library versions.");
  table.group("Flags");
  table.add({.name = "json",
             .kind = options::OptionKind::kFlag,
             .help = "one line of JSON instead of a table",
             .value = options::boolean(json)});
  options::add_config_option(table);
  return table;
}

std::string version_text() {
  std::string text;
  const auto add = [&text](const std::string& name, const std::string& value) {
    text += fmt::format("{:<17}{}\n", name, value);
  };
  for (const auto& [name, value] : version_facts()) {
    add(name, value);
    if (name == kBackends)
      for (const std::string& lack : missing()) add("without", lack);
  }
  return text;
}

std::string version_json() {
  JsonObject json = {{"lockstep", version()}, {"git", git_revision()}};
  for (const auto& [name, value] : version_facts())
    if (name != kProgram && name != kBackends) json.add(name, value);
  json.add(kBackends, backends()).add("without", missing());
  return json.text() + "\n";
}

int version_command(const Sources& sources, const ForeignFlags& foreign) {
  bool json = false;
  const OptionTable table = version_options(json);
  const bool help = parse_options(table, sources, foreign).help;
  std::fputs((help ? table.help() : json ? version_json() : version_text()).c_str(), stdout);
  return 0;
}

}  // namespace lockstep::cli
