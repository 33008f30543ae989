#include "cli/version_command.h"

#define CXXOPTS_NO_REGEX true
#include <fmt/format.h>
#include <hwloc.h>
#include <openssl/crypto.h>
#include <spdlog/version.h>
#include <toml++/toml.h>
#include <zlib.h>
#include <cxxopts.hpp>
#include <nlohmann/json.hpp>

#include <cstdio>

#include "base/cpu.h"
#include "base/text.h"
#include "base/version.h"
#include "cli/build_config.h"
#include "comm/mpi/mpi_info.h"
#include "nn/ops/backend.h"

namespace lockstep::cli {
namespace {

std::string line(const char* name, const std::string& value) { return fmt::format("{:<17}{}\n", name, value); }

std::string hwloc_text() {
  const unsigned version = hwloc_get_api_version();
  return fmt::format("{}.{}.{}", version >> 16, (version >> 8) & 0xffu, version & 0xffu);
}

}  // namespace

OptionTable version_options() {
  OptionTable table("version", "Prints this build, its backends, the instruction set in use and library versions.");
  add_config_option(table);
  return table;
}

std::string version_text() {
  std::string text = line("lockstep", fmt::format("{} (git {})", version(), git_revision()));
  text += line("build", fmt::format("{}, {}", build_type(), compiler()));
  text += line("instruction set", cpu_instruction_set());
  text += line("backends", comm::mpi_available() ? "cpu, self, shm, mpi" : "cpu, self");
  for (const auto& lack : split(kMissing, '|')) {
    if (!lack.empty()) text += line("without", lack);
  }
  text += line("MPI", comm::mpi_library_version());
  if (const std::string toolkit = kCudaToolkit; !toolkit.empty())
    text += line("CUDA", fmt::format("toolkit {} found; this version computes on the CPU alone", toolkit));
  text += line("oneDNN", fmt::format("{} (computes with {})", nn::onednn_version(), nn::cpu_kernel_isa()));
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
