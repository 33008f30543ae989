// A rank that keeps its peers busy: one barrier after the other, for at most 20 s. Exits well if it gets through.
#include <mpi.h>
#include <time.h>

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const struct timespec pause = {0, 1000000};
  for (int i = 0; i < 20000; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    nanosleep(&pause, NULL);
  }
  MPI_Finalize();
  return 0;
}
