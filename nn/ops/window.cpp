#include "base/error.h"
#include "lockstep/nn/ops/conv.h"

namespace lockstep::nn {

std::int64_t Window::output_extent(int axis, std::int64_t in) const {
  const auto a = static_cast<std::size_t>(axis);
  check_usage(kernel[a] >= 1 && stride[a] >= 1 && padding[a] >= 0,
              "a window with a kernel or stride below 1, or a negative padding",
              "give kernels and strides of at least 1, and paddings of at least 0");
  const std::int64_t room = in + 2 * padding[a] - kernel[a];
  if (room < 0)
    throw UsageError(fmt::format("a window of {}x{} does not fit an input of {} with padding {}", kernel[0], kernel[1],
                                 in, padding[a]),
                     "use a larger input or a smaller window");
  return room / stride[a] + 1;
}

}  // namespace lockstep::nn
