#include "launcher/hosts/gather.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <random>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/network.h"
#include "base/text.h"
#include "launcher/hosts/local_addresses.h"
#include "launcher/hosts/networks.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {
namespace {

constexpr double kReadySeconds = 10;
constexpr double kResolveSeconds = 5;
constexpr int kLookEveryMs = 20;

/// The hosts as the user names them, where names for this host are one host, and which of them is this one.
struct NamedHosts {
  std::vector<HostSpec> hosts;
  std::vector<bool> is_own;
};

NamedHosts find_own(const std::vector<HostSpec>& hosts) {
  std::vector<std::string> names;
  for (const auto& host : hosts) names.push_back(host.name);
  const auto own = local_addresses(names, Deadline::after_seconds(kResolveSeconds));
  NamedHosts named;
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (own[i] && first) {
      named.hosts[*first].slots += hosts[i].slots;
      continue;
    }
    named.hosts.push_back(hosts[i]);
    named.is_own.push_back(own[i]);
    if (!own[i]) continue;
    first = named.hosts.size() - 1;
    if (hosts[i].name == "localhost") named.hosts.back().name = host_name();
  }
  return named;
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
                       [&](const Interface& each) { return has_interface(choice, each.name); });
  return interfaces;
}

/// Whether a host would have an interface left without these networks.
bool has_others(const std::vector<Interface>& interfaces, const std::vector<std::string>& networks) {
  return std::ranges::any_of(interfaces, [&](const Interface& each) {
    return std::ranges::find(networks, each.network_text()) == networks.end();
  });
}

/// Variables for other hosts: settings of lockstep and its libraries, and those the user asks for.
std::vector<std::string> exported_names(const LaunchOptions& options) {
  std::vector<std::string> names;
  for (auto& name : env_names(""))
    if (goes_along(name)) names.push_back(std::move(name));
  for (const auto& each : options.exports) {
    const auto equals = each.find('=');
    if (each.substr(0, equals) == kJobSecretVariable)
      throw UsageError(
          fmt::format("launch: --export {}: every job gets its own secret, passed in another way", kJobSecretVariable),
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
  if (several.address.empty()) several.address = loopback_address();
}

namespace {

/// Those that were given, else one per GPU or core.
HostSpec with_slots(const RemoteHosts& hosts, std::size_t host, const LaunchOptions& options) {
  HostSpec spec = hosts.spec(host);
  const Greeting& greeting = hosts.greeting(host);
  if (spec.slots == 0) spec.slots = options.use_gpus && greeting.gpus > 0 ? greeting.gpus : greeting.cores;
  return spec;
}

/// Of the connected hosts. A host without a connection has none.
std::vector<HostSpec> specs_of(const RemoteHosts& hosts, const LaunchOptions& options) {
  std::vector<HostSpec> specs;
  for (std::size_t i = 0; i < hosts.size(); ++i)
    specs.push_back(hosts.is_there(i) ? with_slots(hosts, i, options) : HostSpec{hosts.name(i), {}, 0});
  return specs;
}

GatheredHosts place(const RemoteHosts& hosts, const std::vector<HostSpec>& specs, int ranks) {
  GatheredHosts gathered;
  const auto placed = place_ranks(specs, ranks);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (placed[i] == 0) continue;
    gathered.ranks += placed[i];
    gathered.hosts.push_back(i);
    gathered.ranks_on.push_back(placed[i]);
    if (hosts.is_own(i)) gathered.own_ranks = placed[i];
    const int cores = hosts.greeting(i).cores;
    if (placed[i] <= cores) continue;
    gathered.several.oversubscribed = true;
    gathered.warnings.push_back(
        fmt::format("warning: host {}: {} ranks share {} core{}, so they yield while they wait: slow, but right",
                    hosts.name(i), placed[i], cores, cores == 1 ? "" : "s"));
  }
  return gathered;
}

bool has_others(const RemoteHosts& hosts, const GatheredHosts& gathered) {
  return std::ranges::any_of(gathered.hosts, [&](std::size_t host) { return !hosts.is_own(host); });
}

void send_setups(RemoteHosts& hosts, const LaunchOptions& options, const GatheredHosts& gathered) {
  std::error_code no_directory;
  const auto directory = std::filesystem::current_path(no_directory).string();
  for (std::size_t i = 0; i < gathered.hosts.size(); ++i) {
    const std::size_t host = gathered.hosts[i];
    if (hosts.is_own(host)) continue;
    hosts.begin(host, JobSetup{.ranks = gathered.ranks_on[i],
                               // It gives up first, so that it has cleaned up when the launcher reports it lost.
                               .silence_seconds = 0.8 * options.host_seconds,
                               .finds_port = i == 0,
                               .name = hosts.name(host),
                               .token = gathered.token,
                               .secret = gathered.secret.text(),
                               .program = options.program[0],
                               .directory = directory});
  }
}

/// Waits for the answers to JobSetup. Hosts with a problem, and which: `problems`.
int wait_for_ready(RemoteHosts& hosts, const GatheredHosts& gathered, SignalQueue& signals,
                   std::vector<std::pair<std::size_t, std::string>>& problems) {
  std::vector<bool> waits(hosts.size());
  for (const std::size_t host : gathered.hosts) waits[host] = !hosts.is_own(host);
  const auto note = [&](std::size_t host, std::string problem) {
    waits[host] = false;
    problems.emplace_back(host, std::move(problem));
  };
  const auto handle = [&](std::size_t host, const HostMessage& message) {
    if (const auto* refused = std::get_if<Refused>(&message)) note(host, refused->why);
    if (const auto* ready = std::get_if<Ready>(&message)) {
      hosts.set_ready(host, *ready);
      waits[host] = false;
    }
  };
  const auto settled = [&] {
    for (const auto& lost : hosts.take_lost())
      note(lost.host, fmt::format("{} → look what its login scripts print, and at its load",
                                  lost.silent ? "it fell silent" : lost.why));
    return std::ranges::none_of(waits, [](bool each) { return each; });
  };
  const int signal = serve_hosts(hosts, Clock::now() + duration_of(kReadySeconds), signals, settled, handle);
  for (std::size_t host = 0; host < waits.size() && signal == 0; ++host)
    if (waits[host])
      note(host, fmt::format("it has answered, but did not get ready within {} s → look at its load and its disks",
                             kReadySeconds));
  return signal;
}

/// What ranks on several hosts are started with.
void join_hosts(const RemoteHosts& hosts, const Greeting& own, const LaunchOptions& options, GatheredHosts& gathered) {
  std::vector<Greeting> greetings;
  for (const std::size_t host : gathered.hosts) greetings.push_back(hosts.greeting(host));
  choose_networks(greetings, own, env("LOCKSTEP_SOCKET_IFNAME").value_or(""), gathered.several);
  const std::size_t first = gathered.hosts.front();
  gathered.several.port = hosts.is_own(first) ? find_free_port() : hosts.ready(first).port;
  if (const auto port = parse_int(env("MASTER_PORT").value_or(""))) gathered.several.port = static_cast<int>(*port);
  gathered.several.job_id = random_id();
  gathered.several.exported = exported_names(options);
  for (std::size_t i = 0; i < gathered.hosts.size(); ++i) {
    const std::size_t host = gathered.hosts[i];
    gathered.several.shares.push_back(
        {hosts.is_own(host) ? system_name() : hosts.spec(host).mpirun_name(), gathered.ranks_on[i]});
    if (!hosts.is_own(host) && !hosts.ready(host).warning.empty())
      gathered.warnings.push_back(fmt::format("warning: host {}: {}", hosts.name(host), hosts.ready(host).warning));
  }
}

using Problems = std::vector<std::pair<std::size_t, std::string>>;

/// Has the hosts of `gathered` make ready. The signal that has come meanwhile, or 0.
int make_ready(RemoteHosts& hosts, const LaunchOptions& options, SignalQueue& signals, GatheredHosts& gathered,
               Problems& problems) {
  gathered.token = random_id();
  if (!has_others(hosts, gathered)) return 0;
  gathered.secret = JobSecret::random();
  send_setups(hosts, options, gathered);
  if (const int signal = wait_for_ready(hosts, gathered, signals, problems); signal != 0) return signal;
  if (problems.empty()) join_hosts(hosts, hosts.own_greeting(), options, gathered);
  return 0;
}

}  // namespace

int serve_hosts(RemoteHosts& hosts, Clock::time_point until, SignalQueue& signals, FunctionRef<bool()> settled,
                const RemoteHosts::Handler& handle) {
  while (!settled() && Clock::now() < until) {
    std::vector<pollfd> entries = {{signals.fd(), POLLIN, 0}};
    hosts.add_entries(entries, true);
    const auto left = std::chrono::ceil<Millis>(until - Clock::now()).count();
    if (::poll(entries.data(), entries.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, kLookEveryMs))) < 0)
      continue;
    hosts.serve(std::span<const pollfd>(entries).subspan(1), handle);
    hosts.look_after();
    while (const auto signal = signals.next()) {
      const int number = signal->number;
      if (number == SIGTSTP) {
        hosts.pause();
        ::raise(SIGSTOP);
        hosts.resume();
      }
      if (number == SIGINT || number == SIGTERM || number == SIGHUP || number == SIGQUIT) return number;
    }
  }
  return 0;
}

RemoteHosts call_hosts(const LaunchOptions& options, const std::string& self, int own_cores, SignalQueue& signals,
                       int& exit_code) {
  const NamedHosts named = find_own(options.hosts);
  RemoteHosts::Setup setup{.agent = {}, .self = self, .own = {}, .silence = duration_of(options.host_seconds)};
  const bool elsewhere = std::ranges::find(named.is_own, false) != named.is_own.end();
  if (elsewhere) {
    setup.agent = find_remote_agent(env);
    setup.own = own_greeting(0);
  }
  setup.own.cores = own_cores;
  const auto own = std::ranges::find(named.is_own, true);
  const auto own_index = static_cast<std::size_t>(own - named.is_own.begin());
  if (own != named.is_own.end() && named.hosts[own_index].slots == 0 && options.use_gpus && options.count_own_gpus)
    setup.own.gpus = options.count_own_gpus();
  RemoteHosts hosts(named.hosts, named.is_own, std::move(setup));

  // Each has its own deadline, which is that of a call.
  const auto settled = [&] {
    for (std::size_t i = 0; i < hosts.size(); ++i)
      if (hosts.is_called(i)) return false;
    return true;
  };
  exit_code = serve_hosts(hosts, Clock::time_point::max(), signals, settled);
  if (exit_code != 0) {
    exit_code = stopped_by(exit_code);
    return hosts;
  }
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (hosts.is_there(i)) continue;
    log_error("host {}: {}", hosts.name(i), hosts.problem(i));
    exit_code = static_cast<int>(ExitCode::kDevice);
  }
  return hosts;
}

int slots_of(const RemoteHosts& hosts, const LaunchOptions& options) {
  int slots = 0;
  for (const auto& spec : specs_of(hosts, options)) slots += spec.slots;
  return slots;
}

int slots_of(const RemoteHosts& hosts, const LaunchOptions& options, std::size_t host) {
  return specs_of(hosts, options)[host].slots;
}

GatheredHosts gather_hosts(RemoteHosts& hosts, const LaunchOptions& options, SignalQueue& signals) {
  for (std::size_t i = 0; i < hosts.size(); ++i)
    if (options.ranks_for == RanksFor::kGpus && hosts.spec(i).slots == 0 && hosts.greeting(i).gpus == 0)
      throw UsageError(fmt::format("-n gpu: there is no GPU on {} that the program may use", hosts.name(i)),
                       "give it a number of ranks, as HOST:2, or leave it out");
  GatheredHosts gathered = place(hosts, specs_of(hosts, options), options.ranks);
  for (std::size_t i = 0; i < hosts.size(); ++i)
    if (options.max_restarts == 0 && std::ranges::find(gathered.hosts, i) == gathered.hosts.end()) hosts.dismiss(i);
  Problems problems;
  if (const int signal = make_ready(hosts, options, signals, gathered, problems); signal != 0)
    gathered.exit_code = stopped_by(signal);
  std::ranges::sort(problems);
  for (const auto& [host, problem] : problems) {
    log_error("host {}: {}", hosts.name(host), problem);
    gathered.exit_code = static_cast<int>(ExitCode::kDevice);
  }
  return gathered;
}

GatheredHosts gather_again(RemoteHosts& hosts, const LaunchOptions& options, int most, int least,
                           SignalQueue& signals) {
  for (;;) {
    const auto specs = specs_of(hosts, options);
    int slots = 0;
    for (const auto& spec : specs) slots += spec.slots;
    if (slots < least) return {};
    GatheredHosts gathered = place(hosts, specs, std::min(most, slots));
    Problems problems;
    if (const int signal = make_ready(hosts, options, signals, gathered, problems); signal != 0) {
      gathered.exit_code = 128 + signal;
      return gathered;
    }
    if (problems.empty()) return gathered;
    for (const auto& [host, problem] : problems)
      if (hosts.is_there(host)) hosts.fail(host, problem);
    // Those that are ready have a JobSetup that is void now.
    hosts.conclude();
    serve_hosts(hosts, Clock::now() + duration_of(kReadySeconds), signals, [&] {
      hosts.take_lost();
      return hosts.all_concluded();
    });
    hosts.end_attempt();
  }
}

}  // namespace lockstep::launcher
