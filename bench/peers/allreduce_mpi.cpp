// MPI_Allreduce, measured as `lockstep bench allreduce` measures ours: rounds of a barrier and then one operation, or
// for small sizes several; a round's time is the slowest rank's, the result the median over rounds. Nothing of lockstep
// is linked.
//   mpirun -np 2 build/allreduce_mpi BYTES…
// Rank 0 prints a line of JSON a size with the keys of `lockstep bench allreduce --json`.
#include <mpi.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

constexpr double kRoundUs = 50, kSizeUs = 250'000;  // as in bench/allreduce.cpp
constexpr int kFewestRounds = 5, kMostRounds = 1000, kWarmups = 3;

using Clock = std::chrono::steady_clock;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double slowest_median(std::vector<double> times) {
  MPI_Allreduce(MPI_IN_PLACE, times.data(), static_cast<int>(times.size()), MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return median(times);
}

template <class Operation>
double time_us(Operation&& operation) {
  const auto round = [&](int repeats) {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto begin = Clock::now();
    for (int i = 0; i < repeats; ++i) operation();
    return std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / repeats;
  };
  std::vector<double> tries;
  for (int i = 0; i < kWarmups; ++i) tries.push_back(round(1));
  const double about = std::max(1e-3, slowest_median(tries));
  const int repeats = static_cast<int>(std::clamp(kRoundUs / about, 1.0, 1000.0));
  const double rounds = std::clamp<double>(kSizeUs / (about * repeats), kFewestRounds, kMostRounds);
  std::vector<double> times(static_cast<std::size_t>(rounds));
  for (double& time : times) time = round(repeats);
  return slowest_median(times);
}

/// Elements that are not the sum of all ranks' `rank + i % 31`.
std::int64_t count_wrong(const std::vector<float>& sums, int world_size) {
  std::int64_t wrong = 0;
  const int ranks = world_size * (world_size - 1) / 2;
  for (std::size_t i = 0; i < sums.size(); ++i)
    wrong += sums[i] != static_cast<float>(ranks + world_size * static_cast<int>(i % 31));
  return wrong;
}

void measure(std::int64_t bytes, int rank, int world_size) {
  const auto count = static_cast<std::size_t>(bytes) / sizeof(float);
  std::vector<float> source(count), sums(count);
  for (std::size_t i = 0; i < count; ++i) source[i] = static_cast<float>(rank + static_cast<int>(i % 31));
  const auto sum = [&](const void* from) {
    MPI_Allreduce(from, sums.data(), static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  sum(source.data());
  std::int64_t wrong = count_wrong(sums, world_size);
  sums = source;
  sum(MPI_IN_PLACE);
  wrong += count_wrong(sums, world_size);
  MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);

  // Zeros stay zeros however often they are summed, and take as long as any other number.
  std::fill(source.begin(), source.end(), 0.0f);
  std::fill(sums.begin(), sums.end(), 0.0f);
  const double out_of_place = time_us([&] { sum(source.data()); });
  const double in_place = time_us([&] { sum(MPI_IN_PLACE); });
  if (rank != 0) return;
  const auto algbw = [&](double us) { return static_cast<double>(bytes) / std::max(us, 1e-3) * 1e-3; };
  const double bus = 2.0 * (world_size - 1) / world_size;
  std::printf(
      R"({"bytes":%lld,"time_us":%.3f,"algbw_gbs":%.4f,"busbw_gbs":%.4f,"out_of_place_time_us":%.3f,)"
      R"("out_of_place_algbw_gbs":%.4f,"out_of_place_busbw_gbs":%.4f,"wrong":%lld,"world_size":%d,"backend":"mpi"})"
      "\n",
      static_cast<long long>(bytes), in_place, algbw(in_place), bus * algbw(in_place), out_of_place,
      algbw(out_of_place), bus * algbw(out_of_place), static_cast<long long>(wrong), world_size);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::int64_t> sizes;
  for (int i = 1; i < argc; ++i) {
    std::int64_t bytes = 0;
    const char* const end = argv[i] + std::strlen(argv[i]);
    const auto [rest, error] = std::from_chars(argv[i], end, bytes);
    constexpr auto kElement = static_cast<std::int64_t>(sizeof(float));
    if (error != std::errc() || rest != end || bytes < kElement || bytes / kElement > INT_MAX)
      sizes.clear(), i = argc;
    else
      sizes.push_back(bytes / kElement * kElement);
  }
  if (sizes.empty()) {
    std::fprintf(stderr, "error: allreduce_mpi takes sizes in bytes, 4 or more → mpirun -np 2 allreduce_mpi 4096\n");
    return 2;
  }
  MPI_Init(&argc, &argv);
  int rank = 0, world_size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  for (const std::int64_t bytes : sizes) measure(bytes, rank, world_size);
  MPI_Finalize();
  return 0;
}
