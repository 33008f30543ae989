// What waits for descriptors, reads and writes.
#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/socket.h>

#include <cstdarg>

#include "process.h"

using namespace lockstep::simulation;

extern "C" {

// Descriptors.

int poll(pollfd* entries, nfds_t count, int timeout_ms) {
  if (!simulated()) return REAL(poll)(entries, count, timeout_ms);
  maybe_pass("poll");
  return poll_until(after_ms(timeout_ms), "poll", [&] { return ready(entries, count); });
}
int ppoll(pollfd* entries, nfds_t count, const timespec* timeout, const sigset_t*) {
  return ::poll(entries, count, timeout == nullptr ? -1 : static_cast<int>(ns_of(*timeout) / 1'000'000));
}
int epoll_wait(int fd, epoll_event* events, int most, int timeout_ms) {
  if (!simulated()) return REAL(epoll_wait)(fd, events, most, timeout_ms);
  maybe_pass("epoll_wait");
  return poll_until(after_ms(timeout_ms), "epoll_wait", [&] {
    return static_cast<int>(raw_syscall(SYS_epoll_wait, fd, reinterpret_cast<long>(events), most, 0));
  });
}

ssize_t read(int fd, void* bytes, std::size_t count) {
  if (simulated()) {
    run_timers();
    if (blocks(fd)) await(fd, POLLIN, "read");
    world->change();
  }
  return result_of(raw_syscall(SYS_read, fd, reinterpret_cast<long>(bytes), static_cast<long>(count)));
}
ssize_t write(int fd, const void* bytes, std::size_t count) {
  if (!simulated())
    return result_of(raw_syscall(SYS_write, fd, reinterpret_cast<long>(bytes), static_cast<long>(count)));
  maybe_pass("write");
  if (is_full(fd)) {
    errno = ENOSPC;
    return -1;
  }
  send_away(fd);
  if (!blocks(fd) || count == 0) {
    world->change();
    return result_of(raw_syscall(SYS_write, fd, reinterpret_cast<long>(bytes), static_cast<long>(count)));
  }
  // A pipe that is writable takes so many bytes without waiting.
  constexpr std::size_t kAtOnce = 4096;
  std::size_t done = 0;
  while (done < count) {
    await(fd, POLLOUT, "write");
    const std::size_t piece = count - done < kAtOnce ? count - done : kAtOnce;
    const long written =
        raw_syscall(SYS_write, fd, reinterpret_cast<long>(bytes) + static_cast<long>(done), static_cast<long>(piece));
    if (written < 0) {
      if (done > 0) break;
      return result_of(written);
    }
    done += static_cast<std::size_t>(written);
    world->change();
    send_away(fd);
  }
  return static_cast<ssize_t>(done);
}
static void before_transfer(int fd, int flags, short events, const char* call) {
  if (!simulated()) return;
  maybe_pass(call);
  if (blocks(fd) && (flags & MSG_DONTWAIT) == 0) await(fd, events, call);
  world->change();
  if (events == POLLOUT) send_away(fd);
}
ssize_t recv(int fd, void* bytes, std::size_t count, int flags) {
  before_transfer(fd, flags, POLLIN, "recv");
  return result_of(raw_syscall(SYS_recvfrom, fd, reinterpret_cast<long>(bytes), static_cast<long>(count), flags));
}
ssize_t recvmsg(int fd, msghdr* message, int flags) {
  before_transfer(fd, flags, POLLIN, "recvmsg");
  return result_of(raw_syscall(SYS_recvmsg, fd, reinterpret_cast<long>(message), flags));
}
ssize_t send(int fd, const void* bytes, std::size_t count, int flags) {
  before_transfer(fd, flags, POLLOUT, "send");
  return result_of(raw_syscall(SYS_sendto, fd, reinterpret_cast<long>(bytes), static_cast<long>(count), flags));
}
ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  before_transfer(fd, flags, POLLOUT, "sendmsg");
  return result_of(raw_syscall(SYS_sendmsg, fd, reinterpret_cast<long>(message), flags));
}
int shutdown(int fd, int how) noexcept {
  if (simulated()) {
    world->change();
    send_away(fd);
  }
  return static_cast<int>(result_of(raw_syscall(SYS_shutdown, fd, how)));
}
int close(int fd) {
  if (simulated()) {
    if (is_stream(fd)) close_stream(fd);
    world->change();
    maybe_pass("close");
    send_away(fd);
  }
  forget(fd);
  return static_cast<int>(result_of(raw_syscall(SYS_close, fd)));
}
static int duplicated(int from, long made) {
  if (from >= 0 && from < kMostFiles && made >= 0 && made < kMostFiles && from != made) files[made] = files[from];
  if (simulated()) world->change();
  return static_cast<int>(result_of(made));
}
int dup(int fd) noexcept { return duplicated(fd, raw_syscall(SYS_dup, fd)); }
int dup2(int from, int to) noexcept { return duplicated(from, raw_syscall(SYS_dup2, from, to)); }
int dup3(int from, int to, int flags) noexcept { return duplicated(from, raw_syscall(SYS_dup3, from, to, flags)); }
int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  const long argument = va_arg(arguments, long);
  va_end(arguments);
  const long result = raw_syscall(SYS_fcntl, fd, command, argument);
  return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? duplicated(fd, result)
                                                          : static_cast<int>(result_of(result));
}
int flock(int fd, int operation) noexcept {
  long code = 0;
  const auto look = [&] { return (code = raw_syscall(SYS_flock, fd, operation | LOCK_NB)) != -EWOULDBLOCK; };
  if (!simulated()) return static_cast<int>(result_of(raw_syscall(SYS_flock, fd, operation)));
  if ((operation & LOCK_NB) != 0)
    look();
  else
    look_until(kNever, "flock", look);
  world->change();
  return static_cast<int>(result_of(code));
}

}  // extern "C"
