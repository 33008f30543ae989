// Streams of TCP, and names and addresses of hosts.
#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "process.h"

using namespace lockstep::simulation;

namespace {

// Streams of TCP are sockets of this machine's own, with host and port as a name. On one host, what is sent is there at
// once.

sockaddr_in address_of(const sockaddr* given) {
  sockaddr_in address = {};
  std::memcpy(&address, given, sizeof address);
  return address;
}
in_addr address_of_host(int host) { return {htonl(0x0a000000u + static_cast<std::uint32_t>(host))}; }
bool is_loopback(const sockaddr_in& address) { return ntohl(address.sin_addr.s_addr) >> 24 == 127; }
/// Host 0: there is none at that address.
Place place_of(const sockaddr_in& address) {
  const std::uint32_t number = ntohl(address.sin_addr.s_addr);
  const int port = ntohs(address.sin_port);
  if (number == 0 || is_loopback(address)) return {own_host(), port};
  return {number > 0x0a000000 && number <= 0x0a000000 + kMostHosts ? static_cast<int>(number - 0x0a000000) : 0, port};
}
bool listens_at(Place place) {
  for (std::uint32_t i = 0; i < world->listener_count; ++i)
    if (world->listeners[i].place == place) return true;
  return false;
}
int give_address(const sockaddr_in& address, sockaddr* out, socklen_t* length) {
  if (out == nullptr || length == nullptr) return 0;
  std::memcpy(out, &address, *length < sizeof address ? *length : sizeof address);
  *length = sizeof address;
  return 0;
}
int next_port() { return static_cast<int>(30000 + world->next_port++); }

}  // namespace

namespace lockstep::simulation {

/// What a program finds open when it begins.
void adopt_streams() {
  constexpr int kMostInherited = 64;
  for (int fd = 0; fd < kMostInherited; ++fd) {
    sockaddr_un own = {}, peer = {};
    socklen_t own_length = sizeof own, peer_length = sizeof peer;
    Place here, there;
    if (raw_syscall(SYS_getsockname, fd, reinterpret_cast<long>(&own), reinterpret_cast<long>(&own_length)) < 0 ||
        own.sun_family != AF_UNIX || !World::read_name(own, here))
      continue;
    files[fd] = {.kind = File::kStream};
    files[fd].own = {.sin_family = AF_INET,
                     .sin_port = htons(static_cast<std::uint16_t>(here.port)),
                     .sin_addr = address_of_host(here.host),
                     .sin_zero = {}};
    if (raw_syscall(SYS_getpeername, fd, reinterpret_cast<long>(&peer), reinterpret_cast<long>(&peer_length)) >= 0 &&
        World::read_name(peer, there))
      files[fd].far = there.host > static_cast<int>(kMostHosts);
  }
}

void close_stream(int fd) {
  if (!files[fd].listens) return;
  const Place place = place_of(files[fd].own);
  world->stop_listening(0, &place);
}

}  // namespace lockstep::simulation

extern "C" {

// Streams.

int socket(int family, int type, int protocol) noexcept {
  const int kind = type & 0xf;
  if (!simulated() || (family != AF_INET && family != AF_INET6) || (kind != SOCK_STREAM && kind != SOCK_DGRAM))
    return static_cast<int>(result_of(raw_syscall(SYS_socket, family, type, protocol)));
  if (family == AF_INET6) {  // a machine without
    errno = EAFNOSUPPORT;
    return -1;
  }
  const int fd = static_cast<int>(result_of(raw_syscall(SYS_socket, AF_UNIX, type, 0)));
  if (fd >= kMostFiles) World::fail("simulation: too many files\n");
  if (fd >= 0) {
    files[fd] = {.kind = File::kStream, .is_datagram = kind == SOCK_DGRAM};
    files[fd].own.sin_family = files[fd].peer.sin_family = AF_INET;
  }
  return fd;
}
int bind(int fd, const sockaddr* address, socklen_t length) noexcept {
  if (!simulated() || !is_stream(fd))
    return static_cast<int>(result_of(raw_syscall(SYS_bind, fd, reinterpret_cast<long>(address), length)));
  sockaddr_in wanted = address_of(address);
  if (wanted.sin_port == 0) wanted.sin_port = htons(static_cast<std::uint16_t>(next_port()));
  const Place place = place_of(wanted);
  if (place.host != own_host() || listens_at(place)) {
    errno = place.host != own_host() ? EADDRNOTAVAIL : EADDRINUSE;
    return -1;
  }
  files[fd].own = wanted;
  return 0;
}
int listen(int fd, int backlog) noexcept {
  if (!simulated() || !is_stream(fd)) return static_cast<int>(result_of(raw_syscall(SYS_listen, fd, backlog)));
  if (files[fd].own.sin_port == 0) files[fd].own.sin_port = htons(static_cast<std::uint16_t>(next_port()));
  const Place place = place_of(files[fd].own);
  if (!files[fd].listens) {
    socklen_t length;
    const sockaddr_un name = world->name_of(place, length);
    if (const long code = raw_syscall(SYS_bind, fd, reinterpret_cast<long>(&name), length); code < 0)
      return static_cast<int>(result_of(code));
    if (world->listener_count == kMostListeners) World::fail("simulation: too many listeners\n");
    world->listeners[world->listener_count++] = {place, static_cast<int>(raw_syscall(SYS_getpid))};
    files[fd].listens = true;
  }
  world->change();
  return static_cast<int>(result_of(raw_syscall(SYS_listen, fd, backlog)));
}
int connect(int fd, const sockaddr* address, socklen_t length) {
  if (!simulated() || !is_stream(fd)) {
    if (simulated()) {
      maybe_pass("connect");
      world->change();
    }
    return static_cast<int>(result_of(raw_syscall(SYS_connect, fd, reinterpret_cast<long>(address), length)));
  }
  maybe_pass("connect");
  File& file = files[fd];
  file.peer = address_of(address);
  const Place there = place_of(file.peer);
  if (file.own.sin_port == 0) file.own.sin_port = htons(static_cast<std::uint16_t>(next_port()));
  file.own.sin_addr = is_loopback(file.peer) ? file.peer.sin_addr : address_of_host(own_host());
  if (file.is_datagram) return 0;
  if (there.host == 0) {
    errno = EHOSTUNREACH;
    return -1;
  }
  file.far = there.host != own_host();
  if (file.far && !world->lost[there.host] && !listens_at(there)) {
    errno = ECONNREFUSED;
    return -1;
  }
  // Who accepts finds this end's place in the name of the socket.
  const Place here = place_of(file.own);
  socklen_t own_length, peer_length;
  const sockaddr_un own = world->name_of(here, own_length),
                    peer = world->name_of(file.far ? kSwitch : there, peer_length);
  raw_syscall(SYS_bind, fd, reinterpret_cast<long>(&own), own_length);
  long code = 0;
  look_until(kNever, "connect", [&] {
    const long flags = raw_syscall(SYS_fcntl, fd, F_GETFL);
    raw_syscall(SYS_fcntl, fd, F_SETFL, flags | O_NONBLOCK);
    code = raw_syscall(SYS_connect, fd, reinterpret_cast<long>(&peer), peer_length);
    raw_syscall(SYS_fcntl, fd, F_SETFL, flags);
    return code != -EAGAIN;
  });
  if (code == 0 && file.far) {
    if (world->call_count == kMostCalls) World::fail("simulation: too many calls\n");
    world->calls[world->call_count++] = {here, there};
    world->traffic = true;
  }
  world->change();
  return static_cast<int>(result_of(code));
}
int accept4(int fd, sockaddr* address, socklen_t* length, int flags) {
  if (simulated()) {
    maybe_pass("accept");
    if (blocks(fd)) await(fd, POLLIN, "accept");
    world->change();
  }
  if (!simulated() || !is_stream(fd))
    return static_cast<int>(result_of(
        raw_syscall(SYS_accept4, fd, reinterpret_cast<long>(address), reinterpret_cast<long>(length), flags)));
  sockaddr_un name = {};
  socklen_t name_length = sizeof name;
  const int made = static_cast<int>(result_of(
      raw_syscall(SYS_accept4, fd, reinterpret_cast<long>(&name), reinterpret_cast<long>(&name_length), flags)));
  if (made < 0) return made;
  Place there;
  World::read_name(name, there);
  File& file = files[made];
  file = {.kind = File::kStream, .own = files[fd].own};
  file.far = there.host > static_cast<int>(kMostHosts);
  const int host = file.far ? there.host - kByTheSwitch : there.host;
  file.peer.sin_family = AF_INET;
  file.peer.sin_port = htons(static_cast<std::uint16_t>(there.port));
  file.peer.sin_addr = file.far ? address_of_host(host) : in_addr{htonl(INADDR_LOOPBACK)};
  if (file.own.sin_addr.s_addr == 0) file.own.sin_addr = file.far ? address_of_host(own_host()) : file.peer.sin_addr;
  give_address(file.peer, address, length);
  return made;
}
int accept(int fd, sockaddr* address, socklen_t* length) { return ::accept4(fd, address, length, 0); }
int getsockname(int fd, sockaddr* address, socklen_t* length) noexcept {
  if (simulated() && is_stream(fd)) return give_address(files[fd].own, address, length);
  return static_cast<int>(
      result_of(raw_syscall(SYS_getsockname, fd, reinterpret_cast<long>(address), reinterpret_cast<long>(length))));
}
int getpeername(int fd, sockaddr* address, socklen_t* length) noexcept {
  if (simulated() && is_stream(fd) && files[fd].peer.sin_port != 0)
    return give_address(files[fd].peer, address, length);
  return static_cast<int>(
      result_of(raw_syscall(SYS_getpeername, fd, reinterpret_cast<long>(address), reinterpret_cast<long>(length))));
}
int setsockopt(int fd, int level, int option, const void* value, socklen_t length) noexcept {
  if (simulated() && is_stream(fd) && (level != SOL_SOCKET || option == SO_KEEPALIVE || option == SO_REUSEADDR))
    return 0;
  return static_cast<int>(
      result_of(raw_syscall(SYS_setsockopt, fd, level, option, reinterpret_cast<long>(value), length)));
}

// Names and addresses.

int gethostname(char* name, std::size_t length) noexcept {
  if (!simulated()) return REAL(gethostname)(name, length);
  std::snprintf(name, length, "host%d", own_host());
  return 0;
}
int getaddrinfo(const char* name, const char* service, const addrinfo* hints, addrinfo** found) {
  if (!simulated()) return REAL(getaddrinfo)(name, service, hints, found);
  in_addr address = {htonl(INADDR_LOOPBACK)};
  int host = 0;
  if (name == nullptr || std::strcmp(name, "localhost") == 0) {
  } else if (std::sscanf(name, "host%d", &host) == 1 && host >= 1 && host <= static_cast<int>(kMostHosts)) {
    address = address_of_host(host);
  } else if (::inet_pton(AF_INET, name, &address) != 1) {
    return EAI_NONAME;
  }
  struct Found {
    addrinfo info;
    sockaddr_in address;
  };
  auto* const one = static_cast<Found*>(std::calloc(1, sizeof(Found)));
  one->address.sin_family = AF_INET;
  one->address.sin_addr = address;
  one->address.sin_port = htons(static_cast<std::uint16_t>(service != nullptr ? std::atoi(service) : 0));
  one->info = {.ai_flags = 0,
               .ai_family = AF_INET,
               .ai_socktype = hints != nullptr ? hints->ai_socktype : SOCK_STREAM,
               .ai_protocol = 0,
               .ai_addrlen = sizeof one->address,
               .ai_addr = reinterpret_cast<sockaddr*>(&one->address),
               .ai_canonname = nullptr,
               .ai_next = nullptr};
  *found = &one->info;
  return 0;
}
void freeaddrinfo(addrinfo* found) noexcept {
  if (!simulated()) return REAL(freeaddrinfo)(found);
  std::free(found);
}
int getifaddrs(ifaddrs** found) noexcept {
  if (!simulated()) return REAL(getifaddrs)(found);
  struct Interfaces {
    ifaddrs list[2];
    sockaddr_in addresses[2], masks[2];
  };
  static char loopback[] = "lo", ethernet[] = "eth0";
  auto* const all = static_cast<Interfaces*>(std::calloc(1, sizeof(Interfaces)));
  for (int i : {0, 1}) {
    all->addresses[i].sin_family = all->masks[i].sin_family = AF_INET;
    all->addresses[i].sin_addr = i == 0 ? in_addr{htonl(INADDR_LOOPBACK)} : address_of_host(own_host());
    all->masks[i].sin_addr.s_addr = htonl(i == 0 ? 0xff000000 : 0xffffff00);
    all->list[i].ifa_next = i == 0 ? &all->list[1] : nullptr;
    all->list[i].ifa_name = i == 0 ? loopback : ethernet;
    all->list[i].ifa_flags = IFF_UP | IFF_RUNNING | (i == 0 ? IFF_LOOPBACK : IFF_BROADCAST);
    all->list[i].ifa_addr = reinterpret_cast<sockaddr*>(&all->addresses[i]);
    all->list[i].ifa_netmask = reinterpret_cast<sockaddr*>(&all->masks[i]);
  }
  *found = all->list;
  return 0;
}
void freeifaddrs(ifaddrs* found) noexcept {
  if (!simulated()) return REAL(freeifaddrs)(found);
  std::free(found);
}
// std::random_device, which asks the processor.
unsigned int random_device_value(void*) asm("_ZNSt13random_device9_M_getvalEv");
unsigned int random_device_value(void*) {
  unsigned int value = 0;
  ::getrandom(&value, sizeof value, 0);
  return value;
}

}  // extern "C"
