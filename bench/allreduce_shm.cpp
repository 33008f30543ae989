// Allreduce in shared memory against MPI_Allreduce, interleaved in one run, so that both meet the same machine.
//   mpirun -np 2 build/allreduce_shm [largest bytes] [written] [alone]
// "written": each rank writes its bytes before each operation, as a backward pass does; else they lie where the
// operation before has left them. "alone": no MPI_Allreduce in between, which shares the caches.
// Times are the slowest rank's medians in microseconds, and rank 0's best in brackets.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/make_group.h"
#include "comm/world.h"

namespace {

using lockstep::Clock;
using lockstep::DType;
using lockstep::comm::Arena;
using lockstep::comm::ProcessGroup;
using lockstep::comm::ReduceOp;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double best(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

template <class Run>
double time_us(ProcessGroup& group, bool written, const Arena& arena, Run&& run) {
  if (written) std::memset(arena.data(), 0, arena.bytes());
  group.barrier().wait_host();
  const auto begin = Clock::now();
  run();
  return lockstep::seconds_between(begin, Clock::now()) * 1e6;
}

void run(std::size_t largest, bool written, bool alone) {
  const auto world = lockstep::comm::discover_world(lockstep::env);
  lockstep::comm::GroupOptions options;
  options.backend = lockstep::comm::GroupOptions::Backend::kShm;
  const auto group = lockstep::comm::make_group(world, options);
  if (world.rank == 0)
    std::printf("%10s %22s %22s %6s\n", "bytes", "shm", alone ? "" : "MPI_Allreduce", alone ? "" : "ratio");
  const std::size_t sizes[] = {4, 1024, 4096, 8192, 16384, 32768, 65536, 262144, 1048576, 8388608, 26214400, 104857600};
  for (const std::size_t bytes : sizes) {
    if (bytes > largest) break;
    // Memory of their own: what one leaves in the caches would help or hinder the other.
    const auto arena = group->allocate(bytes), other = group->allocate(bytes);
    const std::size_t count = bytes / sizeof(float);
    std::vector<double> ours, theirs;
    const int repeats = bytes < 100'000 ? 2000 : bytes < 2'000'000 ? 300 : bytes < 50'000'000 ? 40 : 10;
    for (int i = 0; i < repeats; ++i) {
      ours.push_back(time_us(*group, written, *arena, [&] {
        group->all_reduce({arena.get(), 0, count, DType::kF32}, ReduceOp::kSum).wait_host();
      }));
      if (alone) continue;
      theirs.push_back(time_us(*group, written, *other, [&] {
        MPI_Allreduce(MPI_IN_PLACE, other->data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      }));
    }
    // A rank that comes last finds the others' part done: the slowest rank's median counts.
    const auto slowest = [&](double mine) {
      for (const std::string& text : group->all_gather_text(std::to_string(mine)))
        mine = std::max(mine, lockstep::parse_double(text).value());
      return mine;
    };
    const double ours_us = slowest(median(ours));
    if (world.rank == 0 && alone) std::printf("%10zu %10.1f (%9.1f)\n", bytes, ours_us, best(ours));
    if (alone) continue;
    const double theirs_us = slowest(median(theirs));
    if (world.rank != 0) continue;
    std::printf("%10zu %10.1f (%9.1f) %10.1f (%9.1f) %6.2f\n", bytes, ours_us, best(ours), theirs_us, best(theirs),
                theirs_us / ours_us);
  }
  group->shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::size_t largest = 104857600;
    bool written = false, alone = false;
    for (const std::string& argument : std::vector<std::string>(argv + 1, argv + argc)) {
      const auto number = lockstep::parse_int(argument);
      if (number && *number > 0)
        largest = static_cast<std::size_t>(*number);
      else if (argument == "written")
        written = true;
      else if (argument == "alone")
        alone = true;
      else
        throw lockstep::UsageError("unknown argument " + argument, "use a number of bytes, written or alone");
    }
    run(largest, written, alone);
    return 0;
  } catch (const lockstep::Error& error) {
    lockstep::log_error("{}", error.line());
    return error.code();
  }
}
