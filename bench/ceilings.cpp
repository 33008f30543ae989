#include "bench/ceilings.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "lockstep/base/deadline.h"
#include "lockstep/base/device.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::bench {
namespace {

using devices::MeasuredRates;
using nn::Shape;
using nn::Tensor;

constexpr std::int64_t kMostCopied = std::int64_t{1} << 29, kMostCopiedByCpu = std::int64_t{1} << 28;  // bytes
constexpr std::int64_t kLeastCopied = std::int64_t{1} << 16;
constexpr std::int64_t kMostWidth = 8192, kLeastWidth = 64;
constexpr double kLongest = 0.1, kTry = 0.02;  // seconds
constexpr int kTries = 3;

/// Waits for all that was given to the device.
void wait(nn::Backend& backend, const Tensor& any) {
  std::array<std::byte, 1> one{};
  backend.download(any, one);
}

/// Seconds of a `call`, of `calls` that are given one after the other.
double timed(nn::Backend& backend, const Tensor& result, FunctionRef<void()> call, int calls) {
  wait(backend, result);
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  wait(backend, result);
  return seconds_between(begin, Clock::now()) / calls;
}

/// From -1 to 1: what zeros would make of a GPU's power is not what training makes of it.
Tensor random(nn::Backend& backend, std::int64_t count, DType dtype) {
  std::mt19937 generator(1);
  const std::int64_t some = std::min<std::int64_t>(count, 1 << 14);
  std::vector<float> values(static_cast<std::size_t>(some));
  for (float& value : values) value = static_cast<float>(generator()) * 0x1p-31f - 1.0f;
  const Tensor made = backend.empty({count}, dtype), first = made.slice(0, some);
  backend.pointwise().cast(backend.from_host(values.data(), {some}, DType::kF32), first);
  for (std::int64_t at = some; at < count;) {
    const std::int64_t more = std::min(at, count - at);
    backend.pointwise().copy(made.slice(0, more), made.slice(at, at + more));
    at += more;
  }
  return made;
}

/// Work whose size can be chosen, and the tensor that it writes.
struct Load {
  Tensor result;
  std::function<void()> call;
};

struct Timing {
  std::int64_t size = 0;
  double seconds = 0;  // of a call: the least of some tries
};

/// Of loads from size `least` on, each `factor` times the one before and `work` times its work: the largest that is not
/// above `most`, fits, and does not take long.
template <class MakeLoad>
Timing time_largest(nn::Backend& backend, std::int64_t least, std::int64_t most, std::int64_t factor, double work,
                    MakeLoad&& make) {
  Timing timing{.size = least};
  Load load;
  const auto once = [&](std::int64_t size) {
    load = {};
    load = make(size);
    load.call();  // makes what stays
    timing = {size, timed(backend, load.result, load.call, 1)};
    // Not the last one because another program ran just then.
    for (int i = 1; i < kTries && timing.seconds * work >= kLongest; ++i)
      timing.seconds = std::min(timing.seconds, timed(backend, load.result, load.call, 1));
  };
  once(least);
  while (timing.seconds * work < kLongest && timing.size * factor <= most) {
    const std::int64_t before = timing.size;
    try {
      once(before * factor);
    } catch (const OutOfMemoryError&) {
      once(before);
      break;
    }
  }
  const int calls = static_cast<int>(std::clamp(kTry / std::max(timing.seconds, 1e-7), 1.0, 1000.0));
  for (int i = 0; i < kTries; ++i)
    timing.seconds = std::min(timing.seconds, timed(backend, load.result, load.call, calls));
  return timing;
}

std::int64_t spare_bytes(nn::Backend& backend) {
  const auto free = backend.free_bytes();
  return free ? static_cast<std::int64_t>(*free / 4) : std::numeric_limits<std::int64_t>::max();
}

void measure_copy(nn::Backend& backend, int threads, MeasuredRates& rates) {
  const bool cpu = backend.device().kind == DeviceKind::kCpu;
  const std::int64_t most = std::min(cpu ? kMostCopiedByCpu : kMostCopied, spare_bytes(backend) / 2);
  const std::int64_t rows = cpu ? threads : 1;  // on the CPU each thread copies one
  const auto columns_of = [&](std::int64_t bytes) { return bytes / 4 / rows; };
  const Timing timing = time_largest(backend, kLeastCopied, most, 4, 4, [&](std::int64_t bytes) {
    const Tensor from = random(backend, rows * columns_of(bytes), DType::kF32).reshaped({rows, columns_of(bytes)});
    const Tensor to = backend.empty(from.shape());
    return Load{to, [&backend, cpu, from, to] {
                  if (cpu)
                    backend.pointwise().copy_rows(from, to);
                  else
                    backend.pointwise().copy(from, to);
                }};
  });
  rates.copy_bytes = 4 * rows * columns_of(timing.size);
  rates.copy_bytes_per_s = 2.0 * static_cast<double>(rates.copy_bytes) / timing.seconds;
}

void measure_product(nn::Backend& backend, DType dtype, const std::string& name, MeasuredRates& rates) {
  const double fits =
      std::sqrt(static_cast<double>(spare_bytes(backend)) / (3.0 * static_cast<double>(size_of(dtype))));
  const auto most = static_cast<std::int64_t>(std::min(fits, static_cast<double>(kMostWidth)));
  const Timing timing = time_largest(backend, kLeastWidth, most, 2, 8, [&](std::int64_t n) {
    const Tensor x = random(backend, n * n, dtype).reshaped({n, n}), w = random(backend, n * n, dtype).reshaped({n, n});
    const Tensor y = backend.empty({n, n}, dtype);
    return Load{y, [&backend, x, w, y] { backend.linear().forward(x, w, {}, nn::Epilogue::kNone, y); }};
  });
  rates.products.push_back({name, timing.size, 2e-12 * std::pow(static_cast<double>(timing.size), 3) / timing.seconds});
}

DType type_of(Precision precision) {
  switch (precision) {
    case Precision::kBF16: return DType::kBF16;
    case Precision::kFp16: return DType::kF16;
    default: return DType::kF32;
  }
}

/// `measure`, and what it throws as the problem of `device`.
template <class Measure>
MeasuredRates measured_or_problem(const std::string& device, Measure&& measure) {
  MeasuredRates rates;
  try {
    measure(rates);
  } catch (const Error& error) {
    rates.problem = devices::Problem{error.what(), error.remedy()};
  }
  rates.device = device;
  return rates;
}

}  // namespace

std::string precision_name(Precision precision, DeviceKind kind, bool tf32) {
  if (precision != Precision::kF32) return name_of(precision);
  return kind == DeviceKind::kCuda && tf32 ? "tf32" : "f32";
}

MeasuredRates measure_rates(nn::Backend& backend, const std::vector<Precision>& precisions, bool tf32, int threads) {
  MeasuredRates rates;
  rates.device = to_string(backend.device());
  if (backend.device().kind == DeviceKind::kCpu) {
    rates.threads = threads;
    rates.core_flops = core_multiply_add_rate();
  }
  {
    // With memory of its own, which the device has back afterwards.
    const auto stream = backend.make_stream(threads);
    measure_copy(*stream, threads, rates);
    for (const Precision precision : precisions)
      if (stream->computes_in(type_of(precision)))
        measure_product(*stream, type_of(precision), precision_name(precision, backend.device().kind, tf32), rates);
  }
  backend.move_to_this_thread();
  return rates;
}

std::vector<MeasuredRates> measure_machine(int threads) {
  std::vector<MeasuredRates> all;
  for (int gpu = 0; gpu < probe_cuda().devices; ++gpu)
    all.push_back(measured_or_problem(to_string(Device{DeviceKind::kCuda, gpu}), [&](MeasuredRates& rates) {
      rates = measure_rates(*nn::make_cuda_backend({.device = gpu}), {Precision::kBF16, Precision::kF32}, false, 1);
      const auto tf32 = nn::make_cuda_backend({.device = gpu, .tf32 = true});
      measure_product(*tf32, DType::kF32, "tf32", rates);
    }));
  all.push_back(measured_or_problem("cpu", [&](MeasuredRates& rates) {
    rates = measure_rates(*nn::make_cpu_backend(threads), {Precision::kBF16, Precision::kF32}, false, threads);
  }));
  return all;
}

}  // namespace lockstep::bench
