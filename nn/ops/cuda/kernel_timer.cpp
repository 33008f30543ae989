#include "nn/ops/cuda/kernel_timer.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/cuda/runtime.h"
#include "nn/ops/cuda/plan_choices.h"

namespace lockstep::nn::cuda {
namespace {

constexpr int kRounds = 3, kShortRuns = 4;
constexpr double kLongMs = 1.0;

double ms_of(const Context& context, int runs, FunctionRef<void()> run) {
  CudaEvent begin(CudaEvent::Timing::kOn), end(CudaEvent::Timing::kOn);
  const cudaStream_t stream = native(context.stream);
  begin.record(stream);
  for (int i = 0; i < runs; ++i) run();
  end.record(stream);
  end.synchronize();
  return CudaEvent::ms_between(begin, end) / runs;
}

}  // namespace

double seconds_of(Context& context, FunctionRef<void()> run) {
  const int runs = ms_of(context, 1, run) < kLongMs ? kShortRuns : 1;
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kRounds; ++round) least = std::min(least, ms_of(context, runs, run));
  return least * 1e-3;
}

std::size_t choose_kernel(Context& context, const std::string& problem, const std::vector<std::string>& names,
                          FunctionRef<double(std::size_t)> seconds_of_kernel) {
  if (names.size() == 1) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(native(context.stream), &status), "asking whether work is being captured");
  const std::string here = fmt::format("{}, {}", context.gpu, problem);
  if (status != cudaStreamCaptureStatusNone) return context.choices->noted(here, names);
  try {
    return context.choices->choose(here, names, seconds_of_kernel);
  } catch (const OutOfMemoryError&) {
    return 0;
  }
}

}  // namespace lockstep::nn::cuda
