#include "launcher/hosts/local_addresses.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/network.h"
#include "base/scope.h"
#include "launcher/process.h"

namespace lockstep::launcher {
namespace {

bool resolves_to_this_host(const std::string& name, std::span<const NetworkInterface> interfaces) {
  return std::ranges::any_of(resolve(name, 0).addresses, [&](const SocketAddress& address) {
    return address.is_loopback() || std::ranges::any_of(interfaces, [&](const NetworkInterface& one) {
             return one.address.has_host_of(address);
           });
  });
}

bool is_called(const std::string& name) {
  if (name == "localhost" || name.starts_with("localhost.")) return true;
  const std::string full = system_name();
  return name == full || name == full.substr(0, full.find('.'));
}

struct Answer {
  std::int32_t index;
  std::int32_t own;
};

[[noreturn]] void look_up(std::span<const std::string> names, const std::vector<bool>& known,
                          std::span<const NetworkInterface> interfaces, int output) noexcept {
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (known[i]) continue;
    threads.emplace_back([&, i] {
      const Answer answer{static_cast<std::int32_t>(i), resolves_to_this_host(names[i], interfaces)};
      [[maybe_unused]] const auto sent = ::write(output, &answer, sizeof answer);
    });
  }
  for (auto& thread : threads) thread.join();
  ::_exit(0);
}

constexpr int kLowest = 20000, kHighest = 29999;
constexpr int kTries = 100;

bool is_free(int port) {
  const UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return socket && ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
         ::listen(socket.get(), 1) == 0;
}

}  // namespace

std::string system_name() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  const bool known = ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != '\0';
  return known ? name.data() : "localhost";
}

std::vector<bool> local_addresses(std::span<const std::string> names, Deadline deadline) {
  std::vector<bool> own(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) own[i] = is_called(names[i]);
  if (std::ranges::all_of(own, [](bool known) { return known; })) return own;

  const std::vector<NetworkInterface> interfaces = list_interfaces();
  int ends[2];
  check_system(::pipe2(ends, O_CLOEXEC) == 0, "making a pipe");
  UniqueFd input(ends[0]), output(ends[1]);
  const pid_t pid = ::fork();
  check_system(pid >= 0, "starting a process");
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    look_up(names, own, interfaces, output.get());
  }
  output.reset();
  for (;;) {
    pollfd entry = {input.get(), POLLIN, 0};
    const auto left = std::chrono::ceil<Millis>(deadline.remaining());
    const int ready = ::poll(&entry, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) break;
    Answer answer;
    if (::read(input.get(), &answer, sizeof answer) != static_cast<ssize_t>(sizeof answer)) break;  // all are answered
    own[static_cast<std::size_t>(answer.index)] = answer.own != 0;
  }
  ::kill(pid, SIGKILL);
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  return own;
}

int find_free_port() {
  std::random_device random;
  std::uniform_int_distribution<int> ports(kLowest, kHighest);
  for (int i = 0; i < kTries; ++i)
    if (const int port = ports(random); is_free(port)) return port;
  throw DeviceError(fmt::format("no port from {} to {} is free", kLowest, kHighest), "end what holds them");
}

}  // namespace lockstep::launcher
