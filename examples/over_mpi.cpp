// A program that uses MPI itself, and lockstep's collectives among the ranks of a communicator:
//   mpirun -np 4 over_mpi
#include <lockstep/comm.h>
#include <lockstep/comm/mpi.h>

#include <cstdio>
#include <vector>

void sum_in_halves() {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank < (size + 1) / 2 ? 0 : 1, rank, &half);
  const auto group = lockstep::comm::make_group(half);
  MPI_Comm_free(&half);

  std::vector<float> values(1000, static_cast<float>(rank));
  group->all_reduce(std::span(values));
  float least = 0;
  MPI_Allreduce(&values[0], &least, 1, MPI_FLOAT, MPI_MIN, MPI_COMM_WORLD);
  if (rank == 0)
    std::printf("%d of %d ranks: %g, the least sum: %g\n", group->size(), size, double{values[0]}, double{least});
  group->shutdown();
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int code = lockstep::run_main(sum_in_halves);
  MPI_Finalize();
  return code;
}
