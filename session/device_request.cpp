#include "session/device_choice.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::session {
namespace {

constexpr std::string_view kCudaPrefix = "cuda:", kCpuPrefix = "cpu:";
constexpr std::int64_t kMostIndex = 4095;

std::vector<int> parse_indices(const std::string& text, std::string_view list) {
  std::vector<int> indices;
  for (const auto& piece : split(list, ',')) {
    const auto index = parse_int(piece);
    if (!index || *index < 0 || *index > kMostIndex)
      throw text.starts_with(kCpuPrefix)
          ? UsageError(fmt::format("--device {}: '{}' is no number of a CPU device", text, piece),
                       "write cpu, or cpu:0,1 for two devices on the CPU")
          : UsageError(
                fmt::format("--device {}: '{}' is no number of a GPU", text, piece),
                "write cuda, cuda:0,3 (GPU 0 for the first rank of each host, GPU 3 for the second) or cuda:free");
    indices.push_back(static_cast<int>(*index));
  }
  return indices;
}

std::string suggestion(const std::string& text) {
  if (text.starts_with("gpu")) return "did you mean 'cuda'?";
  const std::vector<std::string> known = {"auto", "cpu", "cuda", "cuda:free"};
  const auto near = nearest(text, known);
  return near ? fmt::format("did you mean '{}'?", *near) : "use auto, cpu, cpu:0,1, cuda, cuda:0,3 or cuda:free";
}

}  // namespace

DeviceRequest parse_device(const std::string& text) {
  using Kind = DeviceRequest::Kind;
  DeviceRequest request;
  if (text == "auto") return request;
  request.kind = Kind::kCpu;
  if (text == "cpu") return request;
  if (text.starts_with(kCpuPrefix)) {
    request.indices = parse_indices(text, std::string_view(text).substr(kCpuPrefix.size()));
    return request;
  }
  request.kind = Kind::kCuda;
  if (text == "cuda") return request;
  if (text == "cuda:free") {
    request.most_free = true;
    return request;
  }
  if (!text.starts_with(kCudaPrefix)) throw UsageError(fmt::format("unknown device '{}'", text), suggestion(text));
  request.indices = parse_indices(text, std::string_view(text).substr(kCudaPrefix.size()));
  return request;
}

/// A CPU device is made by being named: its number says no more than which rank, or which piece of a batch, it is for.
void check_cpu_numbers(const std::string& device, const DeviceRequest& request) {
  if (request.kind != DeviceRequest::Kind::kCpu || request.indices.empty()) return;
  const int most = *std::ranges::max_element(request.indices);
  if (std::cmp_less(most, request.indices.size())) return;
  throw UsageError(fmt::format("--device {}: there is no CPU device {} among {}", device, most, request.indices.size()),
                   "CPU devices are numbered from 0: write cpu, or cpu:0,1 for two of them");
}

void check_named_once(const std::string& device, const DeviceRequest& request, const std::string& remedy) {
  for (auto at = request.indices.begin(); at != request.indices.end(); ++at)
    if (std::find(request.indices.begin(), at, *at) != at)
      throw UsageError(fmt::format("--device {} names {} {} twice", device,
                                   request.kind == DeviceRequest::Kind::kCpu ? "CPU device" : "GPU", *at),
                       remedy);
}

}  // namespace lockstep::session
