#include "launcher/hosts/free_port.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <random>

#include "base/error.h"
#include "base/unique_fd.h"

namespace lockstep::launcher {
namespace {

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

int find_free_port() {
  std::random_device random;
  std::uniform_int_distribution<int> ports(kLowest, kHighest);
  for (int i = 0; i < kTries; ++i)
    if (const int port = ports(random); is_free(port)) return port;
  throw DeviceError(fmt::format("no port from {} to {} is free", kLowest, kHighest), "end what holds them");
}

}  // namespace lockstep::launcher
