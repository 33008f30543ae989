// A training that goes wrong on one rank, in the way that LOCKSTEP_TEST_FAULT names: "KIND:RANK[:MILLISECONDS]". It has
// the flags of `lockstep train`.
//   halt       its data set sleeps for so long (a minute) at the 200th sample that it reads: a slow disk
//   loop       it computes for so long there: an endless loop
//   unreadable each 200th sample that it reads throws IoError
//   nan        each 200th has a NaN
//   flip-weight     a bit of a weight flips in the rank's Nth forward pass (N in place of MILLISECONDS)
//   flip-activation a bit of an activation flips there
//   wrong-products  one activation of each 7th pass from there on is off by 2^-12 of it
//   slow-data  each of its samples takes so long
//   slow       each of its forward passes computes so much longer
//   neighbour  it and ten processes that compute share one processor
//   crash      writes to address 0 in the 10th forward pass
//   overflow   its stack is used up there
//   abort      calls abort() there
//   stop       stops itself there (SIGSTOP)
//   end        exits with code 0 there
// `faulty collectives` issues twenty collectives without a training. There,
//   skip       the 10th is never issued
//   extra      one more is issued after the 10th, which the others do not come to
#include <lockstep/trainer.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <thread>

#include "lockstep/base/env.h"
#include "lockstep/comm/world.h"

using namespace lockstep;
using std::chrono::milliseconds;

namespace {

struct Fault {
  std::string kind;
  int rank = -1;
  milliseconds time{};

  bool computes_wrongly() const { return kind.starts_with("flip-") || kind == "wrong-products"; }
};

Fault read_fault() {
  const std::string text = env("LOCKSTEP_TEST_FAULT").value_or("");
  const auto colon = text.find(':'), second = text.find(':', colon + 1);
  if (colon == std::string::npos) return {};
  return {text.substr(0, colon), std::atoi(text.c_str() + colon + 1),
          milliseconds(second == std::string::npos ? 60'000 : std::atoi(text.c_str() + second + 1))};
}

/// This rank's; the others have none.
const Fault& fault() {
  static const Fault all = read_fault();
  static const Fault mine = all.rank == comm::discover_world(env).rank ? all : Fault();
  return mine;
}

void compute_for(milliseconds time) {
  volatile double x = 1;
  for (const auto end = std::chrono::steady_clock::now() + time; std::chrono::steady_clock::now() < end;)
    for (int i = 0; i < 1000; ++i) x = x * 1.000001;
}

/// The same work however often others have the processor: so many ns of its time.
void compute(double ns) {
  const auto ran = [] {
    timespec now = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
  };
  for (const double end = ran() + ns; ran() < end;) continue;
}

int use_up_stack(int depth) {
  volatile char bytes[4096];
  bytes[0] = static_cast<char>(depth);
  if (depth < 0) return 0;  // never
  return use_up_stack(depth + 1) + bytes[0];
}

class Points final : public data::Dataset {
 public:
  explicit Points(std::uint64_t size) : Dataset({.name = "points", .size = size, .dims = {8}, .classes = 2}) {}
  void read(std::uint64_t index, std::span<float> x, std::int32_t& label) const override {
    const bool is_last = ++reads_ == 200;
    if (fault().kind == "slow-data") std::this_thread::sleep_for(fault().time);
    if (fault().kind == "halt" && is_last) std::this_thread::sleep_for(fault().time);
    if (fault().kind == "loop" && is_last) compute_for(fault().time);
    const bool is_bad = reads_ % 200 == 0;
    if (fault().kind == "unreadable" && is_bad)
      throw IoError("cannot read sample " + std::to_string(index), "mend the disk");
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((index + 1) * (i + 3) % 7) / 7;
    if (fault().kind == "nan" && is_bad) x[0] = std::numeric_limits<float>::quiet_NaN();
    label = static_cast<std::int32_t>(index % 2);
  }

 private:
  mutable std::atomic<int> reads_{0};
};

void share_processor() {
  cpu_set_t allowed, one;
  sched_getaffinity(0, sizeof allowed, &allowed);
  CPU_ZERO(&one);
  for (int cpu = CPU_SETSIZE - 1; cpu >= 0; --cpu)
    if (CPU_ISSET(cpu, &allowed)) {
      CPU_SET(cpu, &one);
      break;
    }
  sched_setaffinity(0, sizeof one, &one);
  for (int i = 0; i < 10; ++i)
    if (fork() == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) compute_for(std::chrono::minutes(1));
    }
}

class Net final : public nn::Module {
 public:
  explicit Net(nn::Context& context)
      : hidden_(register_module<nn::Linear>("hidden", context, 8, 64)),
        out_(register_module<nn::Linear>("out", context, 64, 2)) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    if (fault().kind == "slow") compute_for(fault().time);
    if (++passes_ == 1 && fault().kind == "neighbour") share_processor();
    if (passes_ == 10) go_wrong(fault().kind);
    if (fault().computes_wrongly()) return compute_wrongly(tape, x);
    compute(2e6);
    return out_.forward(tape, nn::relu(tape, hidden_.forward(tape, x)));
  }

 private:
  /// Passes of all copies of the module count.
  nn::Var compute_wrongly(nn::Tape& tape, nn::Var x) {
    static std::atomic<int> all = 0;
    const int pass = ++all - static_cast<int>(fault().time.count());
    const auto flip = [](float& value) {
      value = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) ^ 1u << 20);
    };
    if (fault().kind == "flip-weight" && pass == 0) flip(named_parameters().front().parameter->value().f32()[5]);
    const nn::Var middle = nn::relu(tape, hidden_.forward(tape, x));
    // Some element that is not 0.
    float* const values = middle.value().f32();
    float* const one = std::find_if(values, values + middle.value().count(), [](float value) { return value > 0; });
    if (fault().kind == "flip-activation" && pass == 0) flip(*one);
    if (fault().kind == "wrong-products" && pass >= 0 && pass % 7 == 0) *one *= 1 + 0x1p-12f;
    return out_.forward(tape, middle);
  }
  static void go_wrong(const std::string& kind) {
    if (kind == "crash") *static_cast<volatile int*>(nullptr) = 1;
    if (kind == "overflow") std::exit(use_up_stack(0));
    if (kind == "abort") std::abort();
    if (kind == "stop") std::raise(SIGSTOP);
    if (kind == "end") std::_Exit(0);
  }

  nn::Linear& hidden_;
  nn::Linear& out_;
  int passes_ = 0;
};

/// Twenty collectives, without a training.
int collectives() {
  const auto group = comm::make_group(comm::GroupOptions{.timeout_seconds = 3, .stall_warning_seconds = 1});
  const bool extra = read_fault().kind == "extra", skip = fault().kind == "skip";
  float value = 1;
  for (int i = 1; i <= 20; ++i) {
    if (i == 10 && skip) std::this_thread::sleep_for(std::chrono::minutes(1));
    group->all_reduce(std::span(&value, 1));
    if (i == 10 && fault().kind == "extra") group->barrier().wait_host();
    if (i == 10 && extra) std::this_thread::sleep_for(std::chrono::minutes(1));
  }
  group->shutdown();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    if (argc > 1 && std::string(argv[1]) == "collectives") return collectives();
    trainer::TrainConfig defaults;
    defaults.batch = 16;
    defaults.estimate_memory = !fault().computes_wrongly();
    return train(argc, argv, defaults,
                 {.model = nn::factory<Net>(),
                  .data = {.train = std::make_shared<Points>(100000), .validation = nullptr},
                  .loss = nullptr,
                  .name = "net"});
  });
}
