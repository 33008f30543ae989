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
std::vector<std::optional<bool>> ask(const std::vector<std::size_t>& whom, const FileRequest& request,
                                     RemoteHosts& hosts, SignalQueue& signals) {
  std::vector<std::optional<bool>> answers(hosts.size());
  std::size_t missing = 0;
  for (const std::size_t host : whom) {
    if (hosts.is_own(host)) {
      answers[host] = handle_file_request(request, "");
    } else {
      hosts.send(host, request);
      ++missing;
    }
  }
  serve_hosts(
      hosts, Clock::now() + kAnswerTakes, signals, [&] { return missing == 0; },
      [&](std::size_t host, const HostMessage& message) {
        const auto* const reply = std::get_if<FileReply>(&message);
        if (reply == nullptr) return;
        answers[host] = reply->done;
        --missing;
      });
  return answers;
}

}  // namespace

bool handle_file_request(const FileRequest& request, const std::string& directory) {
  const fs::path path = fs::path(directory) / request.path;
  std::error_code error;
  switch (request.what) {
    case FileRequest::What::kCreate: {
      fs::create_directories(path.parent_path(), error);
      return bool(std::ofstream(path) << std::flush);
    }
    case FileRequest::What::kExists: return fs::exists(path, error);
    case FileRequest::What::kRemove: return fs::remove(path, error);
  }
  return false;
}

std::vector<std::string> hosts_that_do_not_see(const std::string& path, RemoteHosts& hosts,
                                               const GatheredHosts& gathered, SignalQueue& signals) {
  const std::string file = path + "/.probe-" + gathered.token;
  const std::vector<std::size_t> first = {gathered.hosts.front()};
  const std::vector<std::size_t> others(gathered.hosts.begin() + 1, gathered.hosts.end());
  std::vector<std::string> blind;
  if (!ask(first, {FileRequest::What::kCreate, file}, hosts, signals)[first[0]].value_or(false)) return blind;
  const auto answers = ask(others, {FileRequest::What::kExists, file}, hosts, signals);
  for (const std::size_t host : others)
    if (answers[host] == false) blind.push_back(hosts.name(host));
  ask(first, {FileRequest::What::kRemove, file}, hosts, signals);
  return blind;
}

}  // namespace lockstep::launcher
