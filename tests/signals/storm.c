// To be preloaded: a profiler's, or anybody's, timer. Every millisecond of time (STORM=time), or of computing (STORM=work),
// a handler runs on whatever stack there is, and fills as much of it as handlers do.
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

enum { kFrameBytes = 600 };
static volatile unsigned long times;

static void on_signal(int number) {
  volatile char frame[kFrameBytes];
  for (size_t i = 0; i < sizeof frame; ++i) frame[i] = (char)number;
  ++times;
}

__attribute__((constructor)) static void begin(void) {
  const char* const kind = getenv("STORM");
  if (kind == NULL) return;
  const int by_work = strcmp(kind, "work") == 0;
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
  const struct itimerval every = {{0, 1000}, {0, 1000}};
  sigaction(by_work ? SIGPROF : SIGALRM, &action, NULL);
  setitimer(by_work ? ITIMER_PROF : ITIMER_REAL, &every, NULL);
}
