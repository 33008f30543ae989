#include "launcher/hosts/shared_directory.h"

#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

namespace lockstep::launcher {
namespace {

namespace fs = std::filesystem;

constexpr auto kAnswerTakes = std::chrono::seconds(5);

/// What the hosts, this one too, say to it; nothing from those that say nothing in time.
std::vector<std::optional<bool>> ask(const std::vector<std::size_t>& whom, const Look& look, RemoteHosts& hosts,
                                     SignalQueue& signals) {
  std::vector<std::optional<bool>> answers(hosts.size());
  std::size_t missing = 0;
  for (const std::size_t host : whom) {
    if (hosts.is_own(host)) {
      answers[host] = look_here(look, "");
    } else {
      hosts.send(host, look);
      ++missing;
    }
  }
  serve_hosts(
      hosts, Clock::now() + kAnswerTakes, signals, [&] { return missing == 0; },
      [&](std::size_t host, const HostMessage& message) {
        const auto* const looked = std::get_if<Looked>(&message);
        if (looked == nullptr) return;
        answers[host] = looked->there;
        --missing;
      });
  return answers;
}

}  // namespace

bool look_here(const Look& look, const std::string& directory) {
  const fs::path path = fs::path(directory) / look.path;
  std::error_code error;
  switch (look.what) {
    case Look::What::kMake: {
      fs::create_directories(path.parent_path(), error);
      return bool(std::ofstream(path) << std::flush);
    }
    case Look::What::kSee: return fs::exists(path, error);
    case Look::What::kRemove: return fs::remove(path, error);
  }
  return false;
}

std::vector<std::string> hosts_that_do_not_see(const std::string& path, RemoteHosts& hosts,
                                               const GatheredHosts& gathered, SignalQueue& signals) {
  const std::string file = path + "/.probe-" + gathered.token;
  const std::vector<std::size_t> first = {gathered.hosts.front()};
  const std::vector<std::size_t> others(gathered.hosts.begin() + 1, gathered.hosts.end());
  std::vector<std::string> blind;
  if (!ask(first, {Look::What::kMake, file}, hosts, signals)[first[0]].value_or(false)) return blind;
  const auto answers = ask(others, {Look::What::kSee, file}, hosts, signals);
  for (const std::size_t host : others)
    if (answers[host] == false) blind.push_back(hosts.name(host));
  ask(first, {Look::What::kRemove, file}, hosts, signals);
  return blind;
}

}  // namespace lockstep::launcher
