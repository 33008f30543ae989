// Our allreduce against MPI_Allreduce, interleaved in one run, so that both meet the same machine.
//   mpirun -np 2 build/allreduce_mpi [thread|inline|alone [chunk bytes [chunks under way [small bytes]]]]
// Times are medians in microseconds, and the best in brackets. "alone" is inline without MPI_Allreduce, as is "thread",
// where another thread owns MPI.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/mpi/inline_group.h"
#include "comm/mpi/thread_group.h"
#include "comm/world.h"

namespace {

using lockstep::Clock;
using lockstep::DType;
using lockstep::comm::ProcessGroup;
using lockstep::comm::ReduceOp;
using lockstep::comm::Tuning;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

template <class Run>
double time_us(ProcessGroup& group, Run&& run) {
  group.barrier().wait_host();
  const auto begin = Clock::now();
  run();
  return lockstep::seconds_between(begin, Clock::now()) * 1e6;
}

double best(const std::vector<double>& values) { return *std::min_element(values.begin(), values.end()); }

void run(bool threaded, bool alone, const Tuning& tuning) {
  const auto world = lockstep::comm::discover_world(lockstep::env);
  const auto timeout = std::chrono::seconds(60);
  std::unique_ptr<ProcessGroup> group;
  if (threaded)
    group = std::make_unique<lockstep::comm::ThreadGroup>(world, timeout, tuning);
  else
    group = std::make_unique<lockstep::comm::InlineGroup>(world, timeout, tuning);
  if (world.rank == 0) std::printf("%10s %22s %22s %6s\n", "bytes", "ours", "MPI_Allreduce", "ratio");
  for (const std::size_t bytes :
       {4ul, 1024ul, 4096ul, 8192ul, 16384ul, 65536ul, 262144ul, 1048576ul, 8388608ul, 26214400ul}) {
    const auto arena = group->allocate(bytes);
    const std::size_t count = bytes / sizeof(float);
    std::vector<double> ours, theirs;
    const int repeats = bytes < 100000 ? 2000 : bytes < 2000000 ? 300 : 40;
    for (int i = 0; i < repeats; ++i) {
      ours.push_back(time_us(*group, [&] {
        group->all_reduce({arena.get(), 0, count, DType::kF32}, ReduceOp::kSum).wait_host();
      }));
      if (alone) continue;
      theirs.push_back(time_us(*group, [&] {
        MPI_Allreduce(MPI_IN_PLACE, arena->data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      }));
    }
    if (world.rank != 0) continue;
    std::printf("%10zu %10.1f (%9.1f)", bytes, median(ours), best(ours));
    if (!alone) std::printf(" %10.1f (%9.1f) %6.2f", median(theirs), best(theirs), median(ours) / median(theirs));
    std::printf("\n");
  }
  group->shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, std::size_t otherwise) {
    const auto value = argc > index ? lockstep::parse_int(argv[index]) : std::nullopt;
    return value && *value > 0 ? static_cast<std::size_t>(*value) : otherwise;
  };
  Tuning tuning;
  tuning.chunk_bytes = number(2, tuning.chunk_bytes);
  tuning.chunks_under_way = static_cast<std::uint32_t>(number(3, tuning.chunks_under_way));
  tuning.small_bytes = number(4, tuning.small_bytes);
  try {
    const std::string_view mode = argc > 1 ? argv[1] : "inline";
    run(mode == "thread", mode != "inline", tuning);
    return 0;
  } catch (const lockstep::Error& error) {
    lockstep::log_error("{}", error.line());
    return error.code();
  }
}
