#include "doctor/doctor.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/json_value.h"
#include "base/log.h"
#include "base/signals.h"
#include "base/text.h"
#include "comm/backends.h"
#include "comm/store.h"
#include "doctor/links.h"
#include "lockstep/comm/world.h"

namespace lockstep::doctor {
namespace {

double wall_clock_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// What a rank sends to the others: its host's findings and facts.
struct HostMessage {
  Report::Host host;
  std::vector<HostFacts::Fact> facts;
  void members(auto& io) {
    host.members(io);
    io("facts", facts);
  }
};

/// Sets each host's clock against rank 0's: all say the time after an exchange, which ends on all within its own
/// length.
void compare_clocks(const Exchange& others, std::vector<HostFacts>& hosts) {
  constexpr int kRounds = 5;
  std::vector<double> best_error(hosts.size(), 1e9);
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = Clock::now();
    others.all_gather({});
    const auto texts = others.all_gather(fmt::format("{:.6f}", wall_clock_s()));
    const double error = seconds_between(begin, Clock::now());
    for (std::size_t i = 0; i < hosts.size(); ++i) {
      if (error >= best_error[i]) continue;
      best_error[i] = error;
      hosts[i].clock_offset_s = parse_double(texts[i]).value_or(0) - parse_double(texts[0]).value_or(0);
      hosts[i].clock_error_s = error;
    }
  }
}

/// "nccl 2.28.3", of hosts with GPUs.
std::string gpu_libraries(const View& view) {
  std::vector<std::string> all;
  for (const auto* family : comm::backend_families())
    if (family->memory != DeviceKind::kCpu && family->is_built() && family->library_version != nullptr)
      all.push_back(fmt::format("{} {}", family->name, family->library_version()));
  return view.gpus.list.empty() || all.empty() ? "none" : join(all, ", ");
}

std::string line_of(const Finding& finding) {
  const char* const mark = finding.severity == Severity::kFailure   ? "FAIL"
                           : finding.severity == Severity::kWarning ? "WARN"
                           : finding.severity == Severity::kNote    ? "note"
                                                                    : "ok";
  std::string line = fmt::format("  {:<4} {:<14} {}", mark, finding.check, finding.what);
  if (!finding.remedy.empty()) line += " → " + finding.remedy;
  return line + "\n";
}

std::string lines_of(const std::vector<Finding>& findings, bool all) {
  std::string text;
  std::size_t quiet = 0;
  for (const Finding& finding : findings) {
    if (all || finding.severity >= Severity::kWarning)
      text += line_of(finding);
    else
      ++quiet;
  }
  if (quiet > 0)
    text += fmt::format("  {} other check{} found nothing (--all shows them)\n", quiet, quiet == 1 ? "" : "s");
  return text;
}

/// Returns the exit code.
int look(const DoctorOptions& options, bool has_cuda, const Exchange& others) {
  const bool several = others.size > 1;
  const View view = View::of_this_host(options.directory, several, has_cuda);
  Report report;
  std::vector<HostFacts> facts;
  const HostMessage mine = {.host = {.name = view.host_name, .findings = check_host(view)},
                            .facts = facts_of(view, gpu_libraries(view)).facts};
  for (const auto& text : others.all_gather(members_as_json(mine).text())) {
    auto message = members_from_json<HostMessage>(parse_json(text, 4));
    facts.push_back({.host = message.host.name, .facts = std::move(message.facts)});
    report.hosts.push_back(std::move(message.host));
  }
  if (several) {
    compare_clocks(others, facts);
    report.between = compare_hosts(facts);
    report.links = measure_links(others, view.interfaces, view.root);
    std::vector<std::string> hosts;
    for (const auto& host : report.hosts) hosts.push_back(host.name);
    for (Finding& finding : check_links(report.links, hosts)) report.between.push_back(std::move(finding));
  }
  if (others.rank != 0) return 0;
  std::fputs((options.json ? json_of(report) : text_of(report, options.all)).c_str(), stdout);
  std::fflush(stdout);
  return report.count(Severity::kFailure) > 0 ? static_cast<int>(ExitCode::kDevice) : 0;
}

}  // namespace

std::size_t Report::count(Severity severity) const {
  const auto in = [&](const std::vector<Finding>& findings) {
    return static_cast<std::size_t>(std::ranges::count(findings, severity, &Finding::severity));
  };
  std::size_t all = in(between);
  for (const Host& host : hosts) all += in(host.findings);
  return all;
}

std::string text_of(const Report& report, bool all) {
  std::string text;
  for (const auto& host : report.hosts)
    text += fmt::format("host {}\n{}", printable(host.name), lines_of(host.findings, all));
  if (report.hosts.size() > 1) {
    std::vector<std::string> names;
    for (const auto& host : report.hosts) names.push_back(host.name);
    text += fmt::format("between hosts\n{}{}", lines_of(report.between, all), matrix_of(report.links, names));
  }
  const std::size_t failures = report.count(Severity::kFailure), warnings = report.count(Severity::kWarning);
  return text + fmt::format("{} failure{}, {} warning{}\n", failures, failures == 1 ? "" : "s", warnings,
                            warnings == 1 ? "" : "s");
}

std::string json_of(const Report& report) {
  return JsonObject({{"failures", report.count(Severity::kFailure)},
                     {"warnings", report.count(Severity::kWarning)},
                     {"hosts", members_as_json(report.hosts)},
                     {"between", members_as_json(report.between)},
                     {"links", members_as_json(report.links)}})
             .text() +
         "\n";
}

int run_doctor(const DoctorOptions& options, bool has_cuda, const std::optional<UsageError>& refusal) {
  watch_for_stops();
  const comm::World world = comm::discover_world(env);
  set_log_identity(world.rank, world.size, host_name());
  const auto deadline = [&] { return Deadline::after_seconds(options.timeout_seconds); };
  const auto store = world.size > 1 ? comm::make_store(world, deadline()) : nullptr;
  const auto names = store ? store->all_gather_text("host", host_name(), deadline()) : std::vector<std::string>{""};
  if (refusal) {
    if (store) store->leave(deadline());
    if (world.rank != 0) throw PeerError(refusal->code(), refusal->what());
    throw *refusal;
  }
  // The first rank of each host looks at it.
  std::vector<int> members;
  for (auto name = names.begin(); name != names.end(); ++name)
    if (std::find(names.begin(), name, *name) == name) members.push_back(static_cast<int>(name - names.begin()));
  const auto me = std::ranges::find(members, world.rank);
  int code = 0;
  if (me != members.end()) {
    int round = 0;
    const Exchange others = {.rank = static_cast<int>(me - members.begin()),
                             .size = static_cast<int>(members.size()),
                             .all_gather = [&](const std::string& mine) {
                               if (!store) return std::vector<std::string>{mine};
                               const auto key = [&](int rank) { return fmt::format("doctor {} {}", round, rank); };
                               ++round;
                               store->set(key(world.rank), mine);
                               std::vector<std::string> texts;
                               for (const int rank : members) texts.push_back(store->get(key(rank), deadline()));
                               return texts;
                             }};
    code = look(options, has_cuda, others);
  }
  if (store) store->leave(deadline());
  return code;
}

}  // namespace lockstep::doctor
