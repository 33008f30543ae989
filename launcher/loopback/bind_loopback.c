/* Loaded into mpirun by the launcher (LD_PRELOAD), where a job runs on one host: mpirun 4 listens at all addresses of the
 * host for daemons elsewhere, of which there are none, and has no setting for it. Where it asks for all addresses it gets
 * loopback's. Its children get none of this. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Puts back what the user has set. */
__attribute__((constructor)) static void forget(void) {
  const char* const users = getenv("LOCKSTEP_PRELOAD");
  if (users != NULL && *users != '\0')
    setenv("LD_PRELOAD", users, 1);
  else
    unsetenv("LD_PRELOAD");
  unsetenv("LOCKSTEP_PRELOAD");
}

__attribute__((visibility("default"))) int bind(int fd, const struct sockaddr* address, socklen_t length) {
  union {
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
  } own;
  if (address != NULL && address->sa_family == AF_INET && length >= sizeof own.v4) {
    memcpy(&own.v4, address, sizeof own.v4);
    if (own.v4.sin_addr.s_addr == htonl(INADDR_ANY)) {
      own.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return (int)syscall(SYS_bind, fd, &own.v4, sizeof own.v4);
    }
  }
  if (address != NULL && address->sa_family == AF_INET6 && length >= sizeof own.v6) {
    memcpy(&own.v6, address, sizeof own.v6);
    if (IN6_IS_ADDR_UNSPECIFIED(&own.v6.sin6_addr)) {
      own.v6.sin6_addr = in6addr_loopback;
      return (int)syscall(SYS_bind, fd, &own.v6, sizeof own.v6);
    }
  }
  return (int)syscall(SYS_bind, fd, address, length);
}
