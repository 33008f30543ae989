#include "launcher/hosts/gather.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <functional>
#include <random>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "launcher/hosts/local_addresses.h"
#include "launcher/hosts/networks.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

constexpr double kAnswerSeconds = 10;
constexpr double kResolveSeconds = 5;
/// From the end of a connection to that of the agent, whose exit code explains it.
constexpr auto kAgentEnds = Millis(500);
constexpr int kLookEveryMs = 20;

/// One of the hosts as the user names them; this host has no link.
struct Candidate {
  HostSpec spec;
  bool is_own = false;
  std::unique_ptr<HostLink> link;
  Greeting greeting;
  std::string problem;
  bool ready = false;
};
using Candidates = std::vector<Candidate>;

/// Names for this host are one host.
Candidates find_own(const std::vector<HostSpec>& hosts) {
  std::vector<std::string> names;
  for (const auto& host : hosts) names.push_back(host.name);
  const auto own = local_addresses(names, Deadline::after_seconds(kResolveSeconds));
  Candidates candidates;
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (own[i] && first) {
      candidates[*first].spec.slots += hosts[i].slots;
      continue;
    }
    candidates.emplace_back().spec = hosts[i];
    candidates.back().is_own = own[i];
    if (!own[i]) continue;
    first = candidates.size() - 1;
    if (hosts[i].name == "localhost") candidates.back().spec.name = host_name();
  }
  return candidates;
}

std::vector<HostLink*> links_of(Candidates& candidates) {
  std::vector<HostLink*> links;
  for (auto& each : candidates)
    if (each.link && each.problem.empty()) links.push_back(each.link.get());
  return links;
}

/// Serves the links until `settled` says so of all candidates with one, or the deadline. Returns the signal that came
/// instead, or 0.
int wait_for(Candidates& candidates, Deadline deadline, SignalQueue& signals,
             const std::function<bool(Candidate&)>& settled) {
  for (;;) {
    const bool all = std::ranges::all_of(candidates, [&](Candidate& each) { return !each.link || settled(each); });
    if (all || deadline.expired()) return 0;
    const auto links = links_of(candidates);
    std::vector<pollfd> entries(1 + HostLink::kPollEntries * links.size());
    entries[0] = {signals.fd(), POLLIN, 0};
    const auto part = [&](std::size_t i) {
      return std::span(entries).subspan(1 + HostLink::kPollEntries * i).first<HostLink::kPollEntries>();
    };
    for (std::size_t i = 0; i < links.size(); ++i) links[i]->fill(part(i), true);
    if (::poll(entries.data(), entries.size(), kLookEveryMs) < 0) continue;
    for (std::size_t i = 0; i < links.size(); ++i) links[i]->serve(part(i));
    for (auto* link : links)
      if (link->greeting()) link->ping();
    while (const auto signal = signals.next()) {
      const int number = signal->number;
      if (number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT) return number;
    }
  }
}

/// Has each host greet. What is wrong with one is its `problem`.
int wait_for_greetings(Candidates& candidates, const Greeting& own, SignalQueue& signals) {
  const int signal = wait_for(candidates, Deadline::after_seconds(kAnswerSeconds), signals, [](Candidate& each) {
    if (each.link->greeting()) return true;
    // Wait for the exit code, which explains more; but not for an agent that stays although its output has ended.
    return each.link->gone() && (each.link->agent_exit_status() || Clock::now() - each.link->last_heard() > kAgentEnds);
  });
  for (auto& each : candidates) {
    if (!each.link || signal != 0) continue;
    if (each.link->greeting()) {
      each.greeting = *each.link->greeting();
      const auto other = difference(each.greeting, own);
      if (!other.empty()) each.problem = other + " → install the same build on every host";
    } else if (each.link->gone()) {
      each.problem = each.link->explain_failure();
    } else {
      const auto words = each.link->last_words();
      each.problem = fmt::format("it did not answer within {} s{} → is it up, and can you log in without a password?",
                                 kAnswerSeconds, words.empty() ? "" : fmt::format(" ({})", words));
    }
  }
  return signal;
}

/// What the host says is wrong is its problem, and so is nonsense.
std::optional<HostMessage> next_message(Candidate& candidate) {
  try {
    return candidate.link->next();
  } catch (const MpiError& error) {
    candidate.problem = fmt::format("{} → look what its login scripts print", error.what());
    return std::nullopt;
  }
}

int wait_for_ready(Candidates& candidates, SignalQueue& signals) {
  const auto settled = [](Candidate& each) {
    if (each.ready || !each.problem.empty()) return true;
    while (const auto message = next_message(each)) {
      if (const auto* ready = std::get_if<Ready>(&*message)) {
        each.link->ready = *ready;
        each.ready = true;
      }
      if (const auto* refused = std::get_if<Refused>(&*message)) each.problem = refused->why;
    }
    if (each.link->gone() && !each.ready && each.problem.empty()) each.problem = each.link->explain_failure();
    return each.ready || !each.problem.empty();
  };
  const int signal = wait_for(candidates, Deadline::after_seconds(kAnswerSeconds), signals, settled);
  for (auto& each : candidates)
    if (each.link && signal == 0 && !settled(each))
      each.problem = fmt::format("it has answered, but did not get ready within {} s → look at its load and its disks",
                                 kAnswerSeconds);
  return signal;
}

/// The exit code where some hosts cannot take part, and a line for each of them.
int report_problems(const Candidates& candidates) {
  int code = 0;
  for (const auto& each : candidates) {
    if (each.problem.empty()) continue;
    log_error("host {}: {}", each.spec.name, each.problem);
    code = static_cast<int>(ExitCode::kDevice);
  }
  return code;
}

int stopped_by(int signal) {
  log_info("lockstep: stopped by {} before the job had started", signal == SIGINT ? "Ctrl-C" : signal_name(signal));
  return 128 + signal;
}

std::string random_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}", random(), random(), random());
}

std::vector<Interface> chosen(const Greeting& greeting, const std::string& choice) {
  std::vector<Interface> interfaces;
  std::ranges::copy_if(greeting.interfaces, std::back_inserter(interfaces),
                       [&](const Interface& each) { return is_chosen(each.name, choice); });
  return interfaces;
}

/// Whether a host would have an interface left without these networks.
bool has_others(const std::vector<Interface>& interfaces, const std::vector<std::string>& networks) {
  return std::ranges::any_of(interfaces, [&](const Interface& each) {
    return std::ranges::find(networks, each.network_text()) == networks.end();
  });
}

/// Variables that go along: what lockstep and its libraries are set by, and what the user asks for.
std::vector<std::string> exported_names(const LaunchOptions& options) {
  std::vector<std::string> names;
  for (auto& name : env_names(""))
    if (goes_along(name)) names.push_back(std::move(name));
  for (const auto& each : options.exports) {
    const auto equals = each.find('=');
    if (each.substr(0, equals) == kJobSecretVariable)
      throw UsageError(fmt::format("launch: --export {}: every job gets a secret of its own, which goes another way",
                                   kJobSecretVariable),
                       "leave it out");
    if (equals != std::string::npos) set_env(each.substr(0, equals), each.substr(equals + 1));
    names.push_back(each.substr(0, equals));
  }
  std::ranges::sort(names);
  const auto repeated = std::ranges::unique(names);
  names.erase(repeated.begin(), repeated.end());
  return names;
}

}  // namespace

void choose_networks(const std::vector<Greeting>& greetings, const Greeting& own, const std::string& choice,
                     SeveralHosts& several) {
  std::vector<std::vector<Interface>> of_ranks;
  for (const auto& greeting : greetings) of_ranks.push_back(chosen(greeting, choice));
  auto of_all = of_ranks;
  const bool has_own_ranks =
      std::ranges::any_of(of_ranks, [&](const auto& each) { return each == chosen(own, choice); });
  if (!has_own_ranks) of_all.push_back(chosen(own, choice));

  const Networks among_all = compare_networks(of_all);
  several.networks = join(among_all.common, ",");
  if (std::ranges::all_of(of_all, [&](const auto& each) { return has_others(each, among_all.ambiguous); }))
    several.not_networks = join(among_all.ambiguous, ",");

  const Networks among_ranks = compare_networks(of_ranks);
  const Greeting& first = greetings.front();
  if (!among_ranks.common.empty()) {
    several.address = *address_in(of_ranks.front(), among_ranks.common.front());
    return;
  }
  // What ssh has shown to work.
  several.address = first.reached_at;
  for (const auto& each : greetings)
    if (several.address.empty()) several.address = each.reached_from;
  if (several.address.empty() && !of_ranks.front().empty()) several.address = of_ranks.front().front().address_text();
  if (several.address.empty()) several.address = "127.0.0.1";
}

namespace {

/// Their slots: those that were given, else one per GPU or core.
std::vector<HostSpec> with_slots(Candidates& candidates, const Greeting& own, int own_cores,
                                 const LaunchOptions& options) {
  std::vector<HostSpec> specs;
  for (auto& each : candidates) {
    if (each.is_own) {
      each.greeting = own;
      each.greeting.cores = own_cores;
      const bool ask = each.spec.slots == 0 && options.use_gpus && options.count_own_gpus;
      each.greeting.gpus = ask ? options.count_own_gpus() : 0;
    }
    if (options.ranks_for == RanksFor::kGpus && each.spec.slots == 0 && each.greeting.gpus == 0)
      throw UsageError(fmt::format("-n gpu: there is no GPU on {} that the program may use", each.spec.name),
                       "give it a number of ranks, as HOST:2, or leave it out");
    const int devices = options.use_gpus && each.greeting.gpus > 0 ? each.greeting.gpus : each.greeting.cores;
    if (each.spec.slots == 0) each.spec.slots = devices;
    specs.push_back(each.spec);
  }
  return specs;
}

/// Places the ranks; hosts that get none are no candidates any more.
void place(Candidates& candidates, const std::vector<HostSpec>& specs, int ranks, GatheredHosts& gathered) {
  const auto placed = place_ranks(specs, ranks);
  for (std::size_t i = candidates.size(); i-- > 0;)
    if (placed[i] == 0) candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(i));
  for (const int on_host : placed) {
    if (on_host == 0) continue;
    const Candidate& each = candidates[gathered.hosts.size()];
    gathered.ranks += on_host;
    gathered.ranks_on.push_back(on_host);
    gathered.hosts.push_back(each.spec);
    if (each.is_own) gathered.own_ranks = on_host;
    if (on_host <= each.greeting.cores) continue;
    gathered.several.oversubscribed = true;
    gathered.warnings.push_back(
        fmt::format("warning: host {}: {} ranks share {} core{}, so they yield while they wait: slow, but right",
                    each.spec.name, on_host, each.greeting.cores, each.greeting.cores == 1 ? "" : "s"));
  }
}

void send_orders(Candidates& candidates, const LaunchOptions& options, const GatheredHosts& gathered) {
  std::error_code no_directory;
  const auto directory = std::filesystem::current_path(no_directory).string();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!candidates[i].link) continue;
    candidates[i].link->send(Order{.ranks = gathered.ranks_on[i],
                                   // It gives up first, so that it has cleaned up when the launcher reports it lost.
                                   .silence_seconds = 0.8 * options.host_seconds,
                                   .finds_port = i == 0,
                                   .name = candidates[i].spec.name,
                                   .token = gathered.token,
                                   .secret = gathered.secret.text(),
                                   .program = options.program[0],
                                   .directory = directory});
  }
}

/// What ranks on several hosts are started with; takes the links over.
void join_hosts(Candidates& candidates, const Greeting& own, const LaunchOptions& options, GatheredHosts& gathered) {
  std::vector<Greeting> greetings;
  for (const Candidate& each : candidates) greetings.push_back(each.greeting);
  choose_networks(greetings, own, env("LOCKSTEP_SOCKET_IFNAME").value_or(""), gathered.several);
  gathered.several.port = candidates.front().link ? candidates.front().link->ready.port : find_free_port();
  if (const auto port = parse_int(env("MASTER_PORT").value_or(""))) gathered.several.port = static_cast<int>(*port);
  gathered.several.job_id = random_id();
  gathered.several.exported = exported_names(options);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    Candidate& each = candidates[i];
    gathered.several.shares.push_back({each.link ? each.spec.mpirun_name() : system_name(), gathered.ranks_on[i]});
    if (each.link && !each.link->ready.warning.empty())
      gathered.warnings.push_back(fmt::format("warning: host {}: {}", each.spec.name, each.link->ready.warning));
    if (each.link) gathered.links.push_back(std::move(each.link));
  }
}

}  // namespace

GatheredHosts gather_hosts(const LaunchOptions& options, const std::string& self, int own_cores, SignalQueue& signals) {
  Candidates candidates = find_own(options.hosts);
  std::optional<RemoteAgent> agent;
  for (auto& each : candidates) {
    if (each.is_own) continue;
    if (!agent) agent = find_remote_agent(env);
    each.link = std::make_unique<HostLink>(each.spec, *agent, self);
  }

  GatheredHosts gathered;
  gathered.own_name = host_name();
  Greeting own;
  if (agent) {
    own = own_greeting(0);
    if (const int signal = wait_for_greetings(candidates, own, signals); signal != 0) {
      gathered.exit_code = stopped_by(signal);
      return gathered;
    }
    gathered.exit_code = report_problems(candidates);
    if (gathered.exit_code != 0) return gathered;
  }

  for (const auto& each : candidates)
    if (each.is_own) gathered.own_name = each.spec.name;
  place(candidates, with_slots(candidates, own, own_cores, options), options.ranks, gathered);
  gathered.token = random_id();
  const bool elsewhere = std::ranges::any_of(candidates, [](const auto& each) { return each.link != nullptr; });
  if (!elsewhere) return gathered;

  gathered.secret = JobSecret::random();
  send_orders(candidates, options, gathered);
  if (const int signal = wait_for_ready(candidates, signals); signal != 0) {
    gathered.exit_code = stopped_by(signal);
    return gathered;
  }
  gathered.exit_code = report_problems(candidates);
  if (gathered.exit_code != 0) return gathered;
  join_hosts(candidates, own, options, gathered);
  return gathered;
}

}  // namespace lockstep::launcher
