// A convolution and its gradients by plain sums, in f64: what kernels are compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "lockstep/nn/ops/conv.h"
#include "tests/nn/values.h"

namespace lockstep::nn::testing {

template <class T>
struct ConvResults {
  std::vector<T> y, dx, dw, db;
  friend bool operator==(const ConvResults&, const ConvResults&) = default;
};

inline ConvResults<double> plain_conv(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& dy,
                                      const Window& window) {
  const std::int64_t height = x.size(1), width = x.size(2), in = x.size(3), out = w.size(0);
  const std::int64_t taps = w.size(1) * w.size(2), y_height = dy.size(1), y_width = dy.size(2);
  const auto zeros = [](const Tensor& like) { return std::vector<double>(static_cast<std::size_t>(like.count())); };
  ConvResults<double> made{zeros(dy), zeros(x), zeros(w), zeros(b)};
  for (std::int64_t pixel = 0; pixel < dy.count() / out; ++pixel)
    for (std::int64_t o = 0; o < out; ++o) {
      const std::int64_t image = pixel / (y_height * y_width), row = pixel / y_width % y_height,
                         column = pixel % y_width, at_y = pixel * out + o;
      const double gradient = at(dy, at_y);
      made.db[static_cast<std::size_t>(o)] += gradient;
      double sum = at(b, o);
      for (std::int64_t tap = 0; tap < taps; ++tap) {
        const std::int64_t i = row * window.stride[0] + tap / w.size(2) - window.padding[0],
                           j = column * window.stride[1] + tap % w.size(2) - window.padding[1];
        if (i < 0 || i >= height || j < 0 || j >= width) continue;
        const std::int64_t at_x = ((image * height + i) * width + j) * in, at_w = (o * taps + tap) * in;
        for (std::int64_t c = 0; c < in; ++c) {
          sum += at(x, at_x + c) * at(w, at_w + c);
          made.dx[static_cast<std::size_t>(at_x + c)] += gradient * at(w, at_w + c);
          made.dw[static_cast<std::size_t>(at_w + c)] += gradient * at(x, at_x + c);
        }
      }
      made.y[static_cast<std::size_t>(at_y)] = sum;
    }
  return made;
}

/// The largest difference as a share of the largest wanted number.
inline double distance_of(const std::vector<double>& wanted, const std::vector<float>& made) {
  double worst = 0.0, largest = 0.0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    worst = std::max(worst, std::isfinite(made[i]) ? std::abs(wanted[i] - static_cast<double>(made[i])) : 1e9);
    largest = std::max(largest, std::abs(wanted[i]));
  }
  return worst / largest;
}

}  // namespace lockstep::nn::testing
