// `lockstep doctor`: what would go wrong, or slowly, before a job is started.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "doctor/hosts.h"

namespace lockstep::doctor {

struct DoctorOptions {
  std::string directory = ".";
  bool json = false;
  bool all = false;  // also what is all right
  double timeout_seconds = 60;
};

/// What one host has to say, and what is between hosts.
struct Report {
  struct Host {
    std::string name;
    std::vector<Finding> findings;
    void members(auto& io) { io("host", name, "findings", findings); }
  };
  std::vector<Host> hosts;
  std::vector<Finding> between;  // empty of one host
  std::vector<Link> links;

  std::size_t count(Severity severity) const;
};

/// For people; without `all`, warnings and failures alone, and how many rows found nothing.
std::string text_of(const Report& report, bool all);
std::string json_of(const Report& report);

/// Alone, or as one of the ranks of a job, of which the first of each host looks at its host; collective then, and rank
/// 0 prints. `has_cuda`: this build. Returns 0, or 4 where something would keep jobs from running. `refusal`: as for
/// trainer::train.
int run_doctor(const DoctorOptions& options, bool has_cuda, const std::optional<UsageError>& refusal);

}  // namespace lockstep::doctor
