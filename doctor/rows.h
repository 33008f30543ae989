// What the rows of checks share: where findings go, and how files of the host are read. Internal to this module.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "doctor/host.h"

namespace lockstep::doctor {

inline constexpr double kKi = 1024, kMi = 1024 * kKi, kGi = 1024 * kMi;

/// Collects the findings of one row.
class RowFindings {
 public:
  RowFindings(std::vector<Finding>& findings, const char* check) : findings_(findings), check_(check) {}

  void ok(std::string what) { add(Severity::kOk, std::move(what), {}); }
  void note(std::string what) { add(Severity::kNote, std::move(what), {}); }
  void warn(std::string what, std::string remedy) { add(Severity::kWarning, std::move(what), std::move(remedy)); }
  void fail(std::string what, std::string remedy) { add(Severity::kFailure, std::move(what), std::move(remedy)); }

 private:
  void add(Severity severity, std::string what, std::string remedy) {
    findings_.push_back({check_, severity, std::move(what), std::move(remedy)});
  }

  std::vector<Finding>& findings_;
  const char* check_;
};

/// A whole small file without white space at its end; nothing where it cannot be read.
std::optional<std::string> read(const View& view, const std::string& path);
std::optional<std::int64_t> read_number(const View& view, const std::string& path);
/// The names in a directory of /sys, sorted.
std::vector<std::string> names_in(const View& view, const std::string& path);

// Rows of GPUs (gpus.cpp).
void check_gpus(const View& view, RowFindings& report);
void check_gpu_links(const View& view, RowFindings& report);
void check_nccl(const View& view, RowFindings& report);

}  // namespace lockstep::doctor
