#include "bench/allreduce.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/error.h"
#include "base/signals.h"
#include "bench/timings.h"
#include "comm/agree.h"
#include "lockstep/session/session.h"
#include "session/opening.h"

namespace lockstep::bench {
namespace {

constexpr double kRoundUs = 50;      // a round of small operations takes about this long: its clock is read twice
constexpr double kSizeUs = 250'000;  // all rounds of one size
constexpr int kFewestRounds = 5, kMostRounds = 1000;
constexpr int kWarmups = 3;

/// What rank `rank` puts in at `i`: small whole numbers, whose sums are exact in every type (bf16 and f16: rounded
/// once); of a product 1 and 2, and 1 of most ranks.
int contribution(std::size_t i, int rank, comm::ReduceOp op) {
  const auto number = static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 31);
  if (op != comm::ReduceOp::kProd) return number;
  return rank < 8 ? 1 + number % 2 : 1;
}

int expected(std::size_t i, comm::ReduceOp op, int world_size) {
  int result = contribution(i, 0, op);
  for (int rank = 1; rank < world_size; ++rank) {
    const int next = contribution(i, rank, op);
    if (op == comm::ReduceOp::kSum) result += next;
    if (op == comm::ReduceOp::kMin) result = std::min(result, next);
    if (op == comm::ReduceOp::kMax) result = std::max(result, next);
    if (op == comm::ReduceOp::kProd) result *= next;
  }
  return result;
}

template <class T>
T from_int(int value) {
  if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>)
    return T::from_float(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

/// Calls `run` with a value of the C++ type that `dtype` means.
template <class Run>
void with_type(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::kF32: return run(float{});
    case DType::kF64: return run(double{});
    case DType::kBF16: return run(BFloat16{});
    case DType::kF16: return run(Float16{});
    case DType::kI32: return run(std::int32_t{});
    case DType::kI64: return run(std::int64_t{});
    case DType::kU8: break;  // its sums overflow
  }
  LOCKSTEP_ASSERT(false, "no type for {}", name_of(dtype));
}

class AllReduceBenchmark {
 public:
  AllReduceBenchmark(comm::ProcessGroup& group, const AllReduceOptions& options) : group_(group), options_(options) {
    const auto most = static_cast<std::size_t>(sizes_of(options).back());
    source_ = group_.allocate(most);
    arena_ = group_.allocate(most);
  }

  AllReduceResult run(std::int64_t bytes) {
    AllReduceResult result{.bytes = bytes,
                           .count = bytes / static_cast<std::int64_t>(size_of(options_.dtype)),
                           .out_of_place = {},
                           .in_place = {}};
    const auto length = static_cast<std::size_t>(bytes);
    const comm::Region region{arena_.get(), 0, static_cast<std::size_t>(result.count), options_.dtype};
    const auto in_place = [&] { group_.all_reduce(region, options_.op).wait_host(); };
    const auto out_of_place = [&] {
      std::memcpy(arena_->data(), source_->data(), length);
      in_place();
    };
    result.out_of_place = measure(result, source_.get(), out_of_place);
    result.in_place = measure(result, arena_.get(), in_place);
    return result;
  }

 private:
  template <class Operation>
  Speed measure(const AllReduceResult& size, comm::Arena* input, Operation&& operation) {
    std::int64_t wrong = -1;
    if (options_.check) {
      fill(*input, static_cast<std::size_t>(size.count));
      operation();
      wrong = count_wrong(static_cast<std::size_t>(size.count));
    }
    // Zeros stay zeros however often they are summed, and take as long as any other number.
    std::memset(input->data(), 0, static_cast<std::size_t>(size.bytes));
    Speed speed = speed_of(time_us(operation), size.bytes, group_.size());
    speed.wrong = wrong;
    return speed;
  }

  template <class Operation>
  double time_us(Operation&& operation) {
    const auto round = [&](int repeats) {
      group_.barrier().wait_host();
      const auto begin = Clock::now();
      for (int i = 0; i < repeats; ++i) operation();
      return seconds_between(begin, Clock::now()) * 1e6 / repeats;
    };
    std::vector<double> tries;
    for (int i = 0; i < kWarmups; ++i) tries.push_back(round(1));
    // The same on every rank: the slowest one's.
    const double about = std::max(1e-3, median(comm::largest_of_ranks(group_, tries)));
    const int repeats = static_cast<int>(std::clamp(kRoundUs / about, 1.0, 1000.0));
    const double rounds = kSizeUs / (about * repeats);
    std::vector<double> times(options_.iterations > 0
                                  ? static_cast<std::size_t>(options_.iterations)
                                  : static_cast<std::size_t>(std::clamp<double>(rounds, kFewestRounds, kMostRounds)));
    for (double& time : times) {
      throw_if_stopped("measuring");
      time = round(repeats);
    }
    return median(comm::largest_of_ranks(group_, times));
  }

  void fill(const comm::Arena& arena, std::size_t count) {
    with_type(options_.dtype, [&]<class T>(T) {
      const auto values = arena.view<T>(0, count);
      for (std::size_t i = 0; i < count; ++i) values[i] = from_int<T>(contribution(i, group_.rank(), options_.op));
    });
  }

  std::int64_t count_wrong(std::size_t count) {
    std::int64_t wrong = 0;
    with_type(options_.dtype, [&]<class T>(T) {
      const auto values = arena_->view<T>(0, count);
      for (std::size_t i = 0; i < count; ++i) {
        const T wanted = from_int<T>(expected(i, options_.op, group_.size()));
        if (std::memcmp(&values[i], &wanted, sizeof(T)) != 0) ++wrong;
      }
    });
    const auto all = group_.all_gather_numbers(wrong);
    return std::accumulate(all.begin(), all.end(), std::int64_t{0});
  }

  comm::ProcessGroup& group_;
  const AllReduceOptions& options_;
  std::unique_ptr<comm::Arena> source_, arena_;
};

std::string heading(const AllReduceOptions& options) {
  switch (options.format) {
    case Format::kJson: return "";
    case Format::kCsv:
      return "bytes,count,dtype,op,out_of_place_time_us,out_of_place_algbw_gbs,out_of_place_busbw_gbs,"
             "out_of_place_wrong,time_us,algbw_gbs,busbw_gbs,wrong,world_size,backend\n";
    case Format::kTable: break;
  }
  return fmt::format("#{:>12} {:>12} {:>5} {:>6}   {:^39}   {:^39}\n", "", "", "", "", "out-of-place", "in-place") +
         fmt::format("#{:>12} {:>12} {:>5} {:>6}   {:>12} {:>9} {:>9} {:>6}   {:>12} {:>9} {:>9} {:>6}\n", "size",
                     "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw", "#wrong") +
         fmt::format("#{:>12} {:>12} {:>5} {:>6}   {:>12} {:>9} {:>9} {:>6}   {:>12} {:>9} {:>9} {:>6}\n", "(B)",
                     "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "");
}

void validate(const AllReduceOptions& options) {
  check_usage(options.min_bytes <= options.max_bytes, "--min is above --max", "give a range of sizes in bytes");
}

}  // namespace

Speed speed_of(double time_us, std::int64_t bytes, int world_size) {
  const double algbw = static_cast<double>(bytes) / std::max(time_us, 1e-3) * 1e-3;
  return {
      .time_us = time_us, .algbw_gbs = algbw, .busbw_gbs = algbw * 2.0 * (world_size - 1) / world_size, .wrong = -1};
}

std::vector<std::int64_t> sizes_of(const AllReduceOptions& options) {
  const auto element = static_cast<std::int64_t>(size_of(options.dtype));
  std::vector<std::int64_t> sizes;
  for (double bytes = static_cast<double>(options.min_bytes); bytes <= static_cast<double>(options.max_bytes);
       bytes *= options.factor) {
    const std::int64_t whole = std::max<std::int64_t>(element, static_cast<std::int64_t>(bytes) / element * element);
    if (sizes.empty() || sizes.back() != whole) sizes.push_back(whole);
  }
  return sizes;
}

std::string line_of(const AllReduceResult& r, const AllReduceOptions& options, const comm::ProcessGroup& group) {
  const char* dtype = name_of(options.dtype);
  const char* op = name_of(options.op);
  const Speed& out = r.out_of_place;
  const Speed& in = r.in_place;
  if (options.format == Format::kJson)
    return fmt::format(
        R"({{"bytes":{},"time_us":{:.3f},"algbw_gbs":{:.4f},"busbw_gbs":{:.4f},"wrong":{},"out_of_place_time_us":{:.3f},"out_of_place_algbw_gbs":{:.4f},"out_of_place_busbw_gbs":{:.4f},"out_of_place_wrong":{},"count":{},"dtype":"{}","op":"{}","world_size":{},"backend":"{}"}})"
        "\n",
        r.bytes, in.time_us, in.algbw_gbs, in.busbw_gbs, in.wrong, out.time_us, out.algbw_gbs, out.busbw_gbs, out.wrong,
        r.count, dtype, op, group.size(), group.name());
  if (options.format == Format::kCsv)
    return fmt::format("{},{},{},{},{:.3f},{:.4f},{:.4f},{},{:.3f},{:.4f},{:.4f},{},{},{}\n", r.bytes, r.count, dtype,
                       op, out.time_us, out.algbw_gbs, out.busbw_gbs, out.wrong, in.time_us, in.algbw_gbs, in.busbw_gbs,
                       in.wrong, group.size(), group.name());
  const auto wrong = [](const Speed& s) { return s.wrong < 0 ? std::string("N/A") : fmt::to_string(s.wrong); };
  return fmt::format(
      " {:>12} {:>12} {:>5} {:>6}   {:>12.2f} {:>9.2f} {:>9.2f} {:>6}   {:>12.2f} {:>9.2f} {:>9.2f} {:>6}\n", r.bytes,
      r.count, dtype, op, out.time_us, out.algbw_gbs, out.busbw_gbs, wrong(out), in.time_us, in.algbw_gbs, in.busbw_gbs,
      wrong(in));
}

int bench_allreduce(const AllReduceOptions& options, const std::optional<UsageError>& refusal) {
  watch_for_stops();
  const session::Session session = session::join_session(options.group, [&] {
    if (refusal) throw *refusal;
    validate(options);
  });
  comm::ProcessGroup& group = *session.group;
  comm::compare_manifests(group, {{"min", fmt::to_string(options.min_bytes)},
                                  {"max", fmt::to_string(options.max_bytes)},
                                  {"factor", fmt::to_string(options.factor)},
                                  {"iterations", fmt::to_string(options.iterations)},
                                  {"dtype", name_of(options.dtype)},
                                  {"op", comm::name_of(options.op)},
                                  {"check", fmt::to_string(options.check)}});

  std::int64_t wrong = 0;
  {
    AllReduceBenchmark benchmark(group, options);
    const auto print = [&](const std::string& text) {
      if (group.rank() != 0) return;
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
    };
    if (options.format == Format::kTable)
      print(fmt::format("# allreduce: {} rank{}, {}; a time is the median of rounds, a round's the slowest rank's\n",
                        group.size(), group.size() == 1 ? "" : "s", group.name()));
    print(heading(options));
    for (const std::int64_t bytes : sizes_of(options)) {
      const AllReduceResult result = benchmark.run(bytes);
      wrong += std::max<std::int64_t>(0, result.in_place.wrong) + std::max<std::int64_t>(0, result.out_of_place.wrong);
      print(line_of(result, options, group));
    }
  }
  comm::run_collectively(group, [&] { LOCKSTEP_ASSERT(wrong == 0, "{} elements are wrong", wrong); });
  group.shutdown();
  return 0;
}

}  // namespace lockstep::bench
