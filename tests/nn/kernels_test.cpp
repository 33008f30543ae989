// The CPU's kernels against plain loops in f64, with one and with two threads.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "tests/nn/operator_cases.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

constexpr std::int64_t kSizes[] = {1, 3, 7, 17, 33};

// Relative to the largest value, at least 1: all compared values are sums of products of numbers up to 1.
void expect_close(const std::vector<double>& expected, const Tensor& actual, double tolerance = 2e-5) {
  ASSERT_EQ(static_cast<std::int64_t>(expected.size()), actual.count());
  double largest = 1.0;
  for (const double v : expected) largest = std::max(largest, std::abs(v));
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(expected[i], at(actual, static_cast<std::int64_t>(i)), tolerance * largest) << "element " << i;
}

class Kernels : public CpuKernelTest {};

TEST_P(Kernels, Linear) {
  for (const std::int64_t n : kSizes)
    for (const std::int64_t in : kSizes)
      for (const std::int64_t out : kSizes) {
        SCOPED_TRACE(fmt::format("n {} in {} out {}", n, in, out));
        const Tensor x = random({n, in}, 1), w = random({out, in}, 2), b = random({out}, 3), dy = random({n, out}, 4);
        std::vector<double> y, y_no_bias, y_relu, dx, dw(static_cast<std::size_t>(out * in)), db;
        for (std::int64_t i = 0; i < n; ++i)
          for (std::int64_t o = 0; o < out; ++o) {
            double sum = 0;
            for (std::int64_t k = 0; k < in; ++k) sum += at(x, i * in + k) * at(w, o * in + k);
            y_no_bias.push_back(sum);
            y.push_back(sum + at(b, o));
            y_relu.push_back(std::max(0.0, y.back()));
          }
        for (std::int64_t i = 0; i < n; ++i)
          for (std::int64_t k = 0; k < in; ++k) {
            double sum = 0;
            for (std::int64_t o = 0; o < out; ++o) sum += at(dy, i * out + o) * at(w, o * in + k);
            dx.push_back(sum);
          }
        for (std::int64_t o = 0; o < out; ++o) {
          double sum = 0;
          for (std::int64_t i = 0; i < n; ++i) sum += at(dy, i * out + o);
          db.push_back(sum);
          for (std::int64_t k = 0; k < in; ++k)
            for (std::int64_t i = 0; i < n; ++i)
              dw[static_cast<std::size_t>(o * in + k)] += at(dy, i * out + o) * at(x, i * in + k);
        }
        auto& linear = backend->linear();
        const Tensor out_y = unset({n, out}), out_dx = unset({n, in}), out_dw = unset({out, in}), out_db = unset({out});
        linear.forward(x, w, b, Epilogue::kNone, out_y);
        expect_close(y, out_y);
        linear.forward(x, w, Tensor(), Epilogue::kNone, out_y);
        expect_close(y_no_bias, out_y);
        linear.forward(x, w, b, Epilogue::kRelu, out_y);
        expect_close(y_relu, out_y);
        linear.backward_input(dy, w, out_dx);
        expect_close(dx, out_dx);
        linear.backward_weight(x, dy, false, out_dw);
        expect_close(dw, out_dw);
        linear.backward_bias(dy, false, out_db);
        expect_close(db, out_db);
        linear.backward_weight(x, dy, true, out_dw);
        linear.backward_bias(dy, true, out_db);
        for (double& v : dw) v *= 2;
        for (double& v : db) v *= 2;
        expect_close(dw, out_dw);
        expect_close(db, out_db);
      }
}

// All of a convolution, from one loop over its terms.
struct ConvReference {
  std::vector<double> y, dx, dw, db;

  ConvReference(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& dy, const Window& window)
      : y(static_cast<std::size_t>(dy.count())),
        dx(static_cast<std::size_t>(x.count())),
        dw(static_cast<std::size_t>(w.count())),
        db(static_cast<std::size_t>(b.count())) {
    for (std::int64_t n = 0; n < dy.size(0); ++n)
      for (std::int64_t i = 0; i < dy.size(1); ++i)
        for (std::int64_t j = 0; j < dy.size(2); ++j)
          for (std::int64_t o = 0; o < dy.size(3); ++o) {
            const std::int64_t yi = ((n * dy.size(1) + i) * dy.size(2) + j) * dy.size(3) + o;
            y[static_cast<std::size_t>(yi)] += at(b, o);
            db[static_cast<std::size_t>(o)] += at(dy, yi);
            for (std::int64_t ki = 0; ki < w.size(1); ++ki)
              for (std::int64_t kj = 0; kj < w.size(2); ++kj) {
                const std::int64_t h = i * window.stride[0] + ki - window.padding[0];
                const std::int64_t v = j * window.stride[1] + kj - window.padding[1];
                if (h < 0 || h >= x.size(1) || v < 0 || v >= x.size(2)) continue;
                const std::int64_t first = o / (w.size(0) / (x.size(3) / w.size(3))) * w.size(3);  // of o's group
                for (std::int64_t c = 0; c < w.size(3); ++c) {
                  const std::int64_t xi = ((n * x.size(1) + h) * x.size(2) + v) * x.size(3) + first + c;
                  const std::int64_t wi = ((o * w.size(1) + ki) * w.size(2) + kj) * w.size(3) + c;
                  y[static_cast<std::size_t>(yi)] += at(x, xi) * at(w, wi);
                  dx[static_cast<std::size_t>(xi)] += at(dy, yi) * at(w, wi);
                  dw[static_cast<std::size_t>(wi)] += at(dy, yi) * at(x, xi);
                }
              }
          }
  }
};

TEST_P(Kernels, Conv) {
  struct Case {
    Shape x;
    std::int64_t out;
    Window window;
    std::int64_t groups = 1;
  };
  const Case cases[] = {
      {{2, 7, 7, 3}, 5, {{3, 3}, {1, 1}, {1, 1}}},
      {{1, 17, 17, 1}, 33, {{3, 3}, {2, 2}, {1, 1}}},
      {{3, 7, 3, 17}, 7, {{3, 3}, {1, 1}, {0, 0}}},
      {{1, 33, 7, 3}, 17, {{5, 5}, {2, 3}, {2, 2}}},
      {{7, 3, 3, 33}, 17, {{1, 1}, {1, 1}, {0, 0}}},
      {{1, 1, 1, 1}, 1, {{1, 1}, {1, 1}, {0, 0}}},
      {{1, 1, 1, 3}, 3, {{3, 3}, {1, 1}, {1, 1}}},
      {{2, 8, 8, 16}, 32, {{3, 3}, {2, 2}, {0, 0}}},
      {{2, 8, 8, 32}, 64, {{3, 3}, {1, 1}, {1, 1}}},
      {{1, 7, 17, 3}, 1, {{1, 7}, {1, 1}, {0, 3}}},
      {{2, 6, 6, 48}, 96, {{3, 3}, {1, 1}, {1, 1}}},
      {{9, 7, 5, 64}, 80, {{3, 3}, {1, 1}, {1, 1}}},  // Winograd
      {{8, 8, 8, 64}, 64, {{3, 3}, {1, 1}, {1, 1}}},
      {{8, 9, 8, 64}, 66, {{3, 3}, {1, 1}, {1, 1}}},
      // In groups; what would else be Winograd's, or a product; depthwise, with two filters of each channel as well.
      {{2, 7, 7, 6}, 4, {{3, 3}, {1, 1}, {1, 1}}, 2},
      {{3, 7, 3, 21}, 14, {{3, 3}, {1, 1}, {0, 0}}, 7},
      {{1, 17, 9, 48}, 32, {{5, 3}, {2, 3}, {2, 1}}, 4},
      {{8, 8, 8, 64}, 64, {{3, 3}, {1, 1}, {1, 1}}, 2},
      {{2, 9, 7, 64}, 96, {{1, 1}, {1, 1}, {0, 0}}, 2},
      {{2, 9, 7, 128}, 64, {{3, 3}, {2, 2}, {1, 1}}, 2},
      {{2, 7, 7, 5}, 5, {{3, 3}, {1, 1}, {1, 1}}, 5},
      {{1, 17, 13, 33}, 33, {{3, 3}, {2, 2}, {1, 1}}, 33},
      {{3, 14, 14, 96}, 96, {{3, 3}, {2, 2}, {1, 1}}, 96},
      {{2, 8, 8, 64}, 64, {{3, 3}, {1, 1}, {1, 1}}, 64},
      {{1, 5, 9, 7}, 14, {{5, 5}, {1, 2}, {2, 2}}, 7},
      {{1, 1, 1, 3}, 3, {{1, 1}, {1, 1}, {0, 0}}, 3},
  };
  for (const auto& [shape, out, window, groups] : cases) {
    SCOPED_TRACE(fmt::format("{} in {} groups", to_string(shape), groups));
    const Shape y_shape = {shape[0], window.output_extent(0, shape[1]), window.output_extent(1, shape[2]), out};
    const Tensor x = random(shape, 1), w = random({out, window.kernel[0], window.kernel[1], shape[3] / groups}, 2);
    const Tensor b = random({out}, 3), dy = random(y_shape, 4);
    ConvReference reference(x, w, b, dy, window);
    auto& conv = backend->conv();
    const Tensor y = unset(y_shape), dx = unset(shape), dw = unset(w.shape()), db = unset({out});
    conv.forward(x, w, 1, b, window, Epilogue::kNone, y);
    expect_close(reference.y, y);
    conv.forward(x, w, 1, b, window, Epilogue::kRelu, y);
    auto rectified = reference.y;
    for (double& v : rectified) v = std::max(0.0, v);
    expect_close(rectified, y);
    conv.backward_input(dy, w, 1, window, dx);
    expect_close(reference.dx, dx);
    conv.backward_weight(x, dy, window, false, dw, false, db);
    expect_close(reference.dw, dw);
    expect_close(reference.db, db);
    conv.backward_weight(x, dy, window, true, dw, true, db);
    conv.backward_weight(x, dy, window, true, dw, false, Tensor());
    for (double& v : reference.dw) v *= 3;
    for (double& v : reference.db) v *= 2;
    expect_close(reference.dw, dw);
    expect_close(reference.db, db);
    conv.backward_weight(x, dy, window, false, dw, true, db);  // one of each
    for (double& v : reference.dw) v /= 3;
    for (double& v : reference.db) v *= 1.5;
    expect_close(reference.dw, dw);
    expect_close(reference.db, db);
    // Packed weights follow the version.
    for (float& v : w.span<float>()) v = -v;
    conv.forward(x, w, 2, b, window, Epilogue::kNone, y);
    conv.backward_input(dy, w, 2, window, dx);
    for (std::size_t i = 0; i < reference.y.size(); ++i) {
      const double bias = at(b, static_cast<std::int64_t>(i) % out);
      reference.y[i] = 2 * bias - reference.y[i];
    }
    for (double& v : reference.dx) v = -v;
    expect_close(reference.y, y);
    expect_close(reference.dx, dx);
  }
}

TEST_P(Kernels, Pool) {
  const std::pair<Shape, Window> cases[] = {
      {{2, 8, 8, 3}, {{2, 2}, {2, 2}, {0, 0}}},   {{1, 7, 17, 33}, {{3, 3}, {2, 2}, {1, 1}}},
      {{3, 7, 7, 1}, {{2, 2}, {2, 2}, {0, 0}}},   {{1, 3, 3, 17}, {{3, 3}, {1, 1}, {1, 1}}},
      {{1, 33, 3, 7}, {{5, 3}, {4, 1}, {2, 0}}},  {{1, 1, 1, 1}, {{1, 1}, {1, 1}, {0, 0}}},
      {{1, 17, 17, 3}, {{2, 2}, {3, 3}, {0, 0}}}, {{2, 33, 17, 3}, {{17, 16}, {16, 1}, {0, 8}}},
      {{2, 6, 4, 300}, {{2, 2}, {2, 2}, {0, 0}}}, {{2, 7, 5, 300}, {{3, 2}, {2, 2}, {0, 0}}},
  };
  for (const auto& [shape, window] : cases)
    for (const PoolKind kind : {PoolKind::kMax, PoolKind::kAverage}) {
      SCOPED_TRACE(to_string(shape) + (kind == PoolKind::kMax ? " max" : " average"));
      const Shape y_shape = {shape[0], window.output_extent(0, shape[1]), window.output_extent(1, shape[2]), shape[3]};
      // Negative everywhere: padding must not win a maximum.
      Tensor x = shuffled_grid(*backend, shape, 1);
      for (float& v : x.span<float>()) v = v * 0.01f - 5.0f;
      const Tensor dy = random(y_shape, 2);
      std::vector<double> y, dx(static_cast<std::size_t>(x.count()));
      for (std::int64_t n = 0; n < y_shape[0]; ++n)
        for (std::int64_t i = 0; i < y_shape[1]; ++i)
          for (std::int64_t j = 0; j < y_shape[2]; ++j)
            for (std::int64_t c = 0; c < y_shape[3]; ++c) {
              const double g = at(dy, static_cast<std::int64_t>(y.size()));
              const double share = 1.0 / static_cast<double>(window.kernel[0] * window.kernel[1]);
              double best = -1e30, sum = 0;
              std::size_t best_at = 0;
              for (std::int64_t ki = 0; ki < window.kernel[0]; ++ki)
                for (std::int64_t kj = 0; kj < window.kernel[1]; ++kj) {
                  const std::int64_t h = i * window.stride[0] + ki - window.padding[0];
                  const std::int64_t v = j * window.stride[1] + kj - window.padding[1];
                  if (h < 0 || h >= shape[1] || v < 0 || v >= shape[2]) continue;
                  const std::int64_t xi = ((n * shape[1] + h) * shape[2] + v) * shape[3] + c;
                  sum += at(x, xi);
                  if (kind == PoolKind::kAverage) dx[static_cast<std::size_t>(xi)] += g * share;
                  if (at(x, xi) > best) {
                    best = at(x, xi);
                    best_at = static_cast<std::size_t>(xi);
                  }
                }
              if (kind == PoolKind::kMax) dx[best_at] += g;
              y.push_back(kind == PoolKind::kMax ? best : sum * share);
            }
      const Tensor out_y = unset(y_shape), out_dx = unset(shape);
      auto& pool = backend->pool();
      if (kind == PoolKind::kAverage) {
        pool.average_forward(x, window, out_y);
        expect_close(y, out_y);
        pool.average_backward(dy, window, out_dx);
      } else {
        const Tensor choices = backend->empty(y_shape, PoolKernels::choice_type(window));
        pool.max_forward(x, window, Epilogue::kNone, out_y, choices);
        expect_close(y, out_y);
        pool.max_backward(dy, choices, window, out_dx);
      }
      expect_close(dx, out_dx);
    }
}

TEST_P(Kernels, AdaptivePool) {
  const std::pair<Shape, Shape> cases[] = {
      {{2, 8, 8, 3}, {2, 4, 2, 3}},   {{1, 7, 7, 5}, {1, 7, 7, 5}},       {{3, 1, 1, 9}, {3, 7, 7, 9}},
      {{2, 2, 3, 17}, {2, 7, 5, 17}}, {{1, 10, 7, 4}, {1, 7, 7, 4}},      {{1, 13, 6, 1}, {1, 1, 1, 1}},
      {{2, 5, 33, 3}, {2, 3, 7, 3}},  {{1, 14, 14, 512}, {1, 7, 7, 512}},
  };
  for (const auto& [shape, y_shape] : cases) {
    SCOPED_TRACE(to_string(shape) + " to " + to_string(y_shape));
    const Tensor x = random(shape, 1), dy = random(y_shape, 2);
    std::vector<double> y, dx(static_cast<std::size_t>(x.count()));
    for (std::int64_t n = 0; n < y_shape[0]; ++n)
      for (std::int64_t i = 0; i < y_shape[1]; ++i)
        for (std::int64_t j = 0; j < y_shape[2]; ++j)
          for (std::int64_t c = 0; c < y_shape[3]; ++c) {
            std::vector<std::size_t> inside;  // as the definition has it, in real numbers
            for (std::int64_t h = 0; h < shape[1]; ++h)
              for (std::int64_t w = 0; w < shape[2]; ++w)
                if ((h + 1) * y_shape[1] > i * shape[1] && h * y_shape[1] < (i + 1) * shape[1] &&
                    (w + 1) * y_shape[2] > j * shape[2] && w * y_shape[2] < (j + 1) * shape[2])
                  inside.push_back(static_cast<std::size_t>(((n * shape[1] + h) * shape[2] + w) * shape[3] + c));
            const double g = at(dy, static_cast<std::int64_t>(y.size()));
            double sum = 0;
            for (const std::size_t xi : inside) {
              sum += at(x, static_cast<std::int64_t>(xi));
              dx[xi] += g / static_cast<double>(inside.size());
            }
            y.push_back(sum / static_cast<double>(inside.size()));
          }
    const Tensor out_y = unset(y_shape), out_dx = unset(shape);
    backend->pool().adaptive_average_forward(x, out_y);
    expect_close(y, out_y);
    backend->pool().adaptive_average_backward(dy, out_dx);
    expect_close(dx, out_dx);
  }
}

// Choices, ties and all: the same as one kernel after the other.
TEST_P(Kernels, MaxPoolTakesReluAlong) {
  for (const Window window : {Window{{2, 2}, {2, 2}, {0, 0}}, Window{{3, 3}, {2, 2}, {1, 1}}}) {
    const Shape shape = {3, 9, 8, 21};
    const Shape y_shape = {shape[0], window.output_extent(0, shape[1]), window.output_extent(1, shape[2]), shape[3]};
    const Tensor x = random(shape, 1), dy = random(y_shape, 2), rectified = unset(shape);
    for (std::int64_t i = 0; i < x.count(); i += 3) x.f32()[i] = 0.25f;  // ties
    for (std::int64_t i = 0; i < x.count(); i += 5) x.f32()[i] = -1.0f;  // whole windows below zero
    auto& pool = backend->pool();
    const Tensor y = unset(y_shape), dx = unset(shape), one_y = unset(y_shape), one_dx = unset(shape);
    const Tensor choices = backend->empty(y_shape, DType::kU8);
    backend->pointwise().unary(UnaryOp::kRelu, x, rectified);
    pool.max_forward(rectified, window, Epilogue::kNone, y, choices);
    pool.max_backward(dy, choices, window, dx);
    backend->pointwise().unary_backward(UnaryOp::kRelu, {}, rectified, dx, dx);
    pool.max_forward(x, window, Epilogue::kRelu, one_y, choices);
    pool.max_backward(dy, choices, window, one_dx);
    EXPECT_EQ(values_of(one_y), values_of(y));
    EXPECT_EQ(values_of(one_dx), values_of(dx));
    pool.max_forward(x, window, Epilogue::kRelu, one_y, {});
    EXPECT_EQ(values_of(one_y), values_of(y));
  }
}

TEST_P(Kernels, MaxPoolKeepsNaN) {
  for (const Window window : {Window{{2, 2}, {2, 2}, {0, 0}}, Window{{3, 3}, {1, 1}, {1, 1}}})
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
      for (std::int64_t place = 0; place < 16; ++place) {
        const Tensor x = random({1, 4, 4, 3}, 1);
        x.f32()[3 * place + 1] = std::numeric_limits<float>::quiet_NaN();
        const std::int64_t out = window.output_extent(0, 4);
        const Tensor y = unset({1, out, out, 3});
        backend->pointwise().fill(y, 0.0f);
        backend->pool().max_forward(x, window, epilogue, y, {});
        for (std::int64_t i = 0; i < out; ++i)
          for (std::int64_t j = 0; j < out; ++j) {
            const std::int64_t h = place / 4 - i * window.stride[0] + window.padding[0];
            const std::int64_t w = place % 4 - j * window.stride[1] + window.padding[1];
            const bool inside = h >= 0 && h < window.kernel[0] && w >= 0 && w < window.kernel[1];
            for (std::int64_t c = 0; c < 3; ++c)
              EXPECT_EQ(std::isnan(y.f32()[(i * out + j) * 3 + c]), inside && c == 1) << place << " " << i << " " << j;
          }
      }
}

TEST_P(Kernels, BatchNorm) {
  constexpr double kEps = 1e-5, kMomentum = 0.1;
  for (const std::int64_t rows : {2, 3, 7, 33})
    for (const std::int64_t channels : kSizes) {
      SCOPED_TRACE(fmt::format("{} rows, {} channels", rows, channels));
      const Tensor x = random({rows, channels}, 1), dy = random({rows, channels}, 4);
      const Tensor gamma = random({channels}, 2), beta = random({channels}, 3);
      const Tensor running_mean = random({channels}, 5), running_var = backend->empty({channels});
      backend->pointwise().fill(running_var, 0.8f);
      std::vector<double> y(static_cast<std::size_t>(x.count())), inferred = y, dx = y, mean, var, moved_mean,
                                                                  moved_var, dgamma, dbeta;
      const auto m = static_cast<double>(rows);
      for (std::int64_t c = 0; c < channels; ++c) {
        double sum = 0, squares = 0, sum_dy = 0, sum_dy_xhat = 0;
        for (std::int64_t r = 0; r < rows; ++r) sum += at(x, r * channels + c);
        for (std::int64_t r = 0; r < rows; ++r) squares += std::pow(at(x, r * channels + c) - sum / m, 2);
        mean.push_back(sum / m);
        var.push_back(squares / m);
        moved_mean.push_back((1 - kMomentum) * at(running_mean, c) + kMomentum * sum / m);
        moved_var.push_back((1 - kMomentum) * at(running_var, c) + kMomentum * squares / (m - 1));
        const double scale = 1 / std::sqrt(var.back() + kEps);
        const auto xhat = [&](std::int64_t r) { return (at(x, r * channels + c) - mean.back()) * scale; };
        for (std::int64_t r = 0; r < rows; ++r) {
          sum_dy += at(dy, r * channels + c);
          sum_dy_xhat += at(dy, r * channels + c) * xhat(r);
        }
        dgamma.push_back(sum_dy_xhat);
        dbeta.push_back(sum_dy);
        for (std::int64_t r = 0; r < rows; ++r) {
          const auto i = static_cast<std::size_t>(r * channels + c);
          y[i] = xhat(r) * at(gamma, c) + at(beta, c);
          inferred[i] =
              (at(x, r * channels + c) - at(running_mean, c)) / std::sqrt(at(running_var, c) + kEps) * at(gamma, c) +
              at(beta, c);
          dx[i] = at(gamma, c) * scale * (at(dy, r * channels + c) - sum_dy / m - xhat(r) * sum_dy_xhat / m);
        }
      }
      auto& norm = backend->norm();
      const Tensor out = unset({rows, channels}), out_mean = unset({channels}), out_var = unset({channels});
      norm.forward_infer(x, gamma, beta, running_mean, running_var, kEps, out);
      expect_close(inferred, out);
      norm.forward_train(x, gamma, beta, kEps, out, out_mean, out_var);
      expect_close(y, out, 1e-4);
      expect_close(mean, out_mean);
      expect_close(var, out_var);
      const Tensor out_dx = unset({rows, channels}), out_dgamma = unset({channels}), out_dbeta = unset({channels});
      norm.backward(x, dy, gamma, out_mean, out_var, false, kEps, out_dx, out_dgamma, out_dbeta);
      expect_close(dx, out_dx, 1e-3);  // two rows that are almost equal
      expect_close(dgamma, out_dgamma, 1e-4);
      expect_close(dbeta, out_dbeta);
      // The same with the fused operation after it: the same numbers as in two steps.
      struct After {
        Epilogue activation;
        UnaryOp op;
        bool added;
      };
      for (const auto& [activation, op, added] :
           {After{Epilogue::kRelu, UnaryOp::kRelu, false}, After{Epilogue::kRelu, UnaryOp::kRelu, true},
            After{Epilogue::kRelu6, UnaryOp::kRelu6, false}}) {
        const Tensor residual = added ? random({rows, channels}, 9) : Tensor(), fused = unset({rows, channels});
        const Tensor shift = unset({channels});  // so that some are above 6
        backend->operators().forward(Affine{1.0f, activation == Epilogue::kRelu6 ? 5.5f : 0.0f}, beta, shift);
        norm.forward_train(x, gamma, shift, kEps, out, out_mean, out_var);
        if (added) backend->pointwise().binary(BinaryOp::kAdd, out, residual, out);
        backend->pointwise().unary(op, out, out);
        norm.forward_train_relu(x, gamma, shift, kEps, activation, residual, fused, out_mean, out_var);
        expect_close(std::vector<double>(out.f32(), out.f32() + out.count()), fused, 1e-6);
        const Tensor masked = unset({rows, channels}), expected_dx = unset({rows, channels});
        const Tensor taken = random({rows, channels}, 10), in_place = unset({rows, channels});
        backend->pointwise().copy(taken, in_place);
        backend->pointwise().unary_backward(op, {}, fused, taken, masked);
        norm.backward(x, masked, gamma, out_mean, out_var, false, kEps, expected_dx, out_dgamma, out_dbeta);
        const auto wanted_dgamma = values_of(out_dgamma), wanted_dbeta = values_of(out_dbeta);
        norm.backward_relu(x, fused, activation, added, taken, gamma, shift, out_mean, out_var, kEps, out_dx,
                           out_dgamma, out_dbeta);
        EXPECT_EQ(values_of(taken), values_of(masked));
        EXPECT_EQ(values_of(out_dx), values_of(expected_dx));
        EXPECT_EQ(values_of(out_dgamma), wanted_dgamma);
        EXPECT_EQ(values_of(out_dbeta), wanted_dbeta);
        norm.backward_relu(x, fused, activation, added, in_place, gamma, shift, out_mean, out_var, kEps, in_place,
                           out_dgamma, out_dbeta);
        EXPECT_EQ(values_of(in_place), values_of(expected_dx));
      }
      norm.update_running(out_mean, out_var, rows, kMomentum, running_mean, running_var);
      expect_close(moved_mean, running_mean);
      expect_close(moved_var, running_var);
    }
}

TEST_P(Kernels, FunctionsOfElements) {
  for (const std::int64_t n : {1, 3, 7, 17, 33, 40000}) {  // the last is split over threads
    const Tensor x = unset({n}), y = unset({n}), z = unset({n});
    for_cases(kUnaryCases, [&](const UnaryCase& each, auto, const char*) {
      backend->operators().forward(Affine{each.spread, each.middle}, random({n}, 1), x);
      std::vector<double> expected;
      for (std::int64_t i = 0; i < n; ++i) expected.push_back(each.value(at(x, i)));
      backend->pointwise().unary(each.op, x, z);
      expect_close(expected, z);
    });
    backend->operators().forward(Affine{1.0f, 0.0f}, random({n}, 1), x);
    for_cases(kBinaryCases, [&](const BinaryCase& each, auto, const char*) {
      backend->operators().forward(Affine{1.0f, each.middle}, random({n}, 2), y);
      std::vector<double> expected;
      for (std::int64_t i = 0; i < n; ++i) expected.push_back(each.value(at(x, i), at(y, i)));
      backend->pointwise().binary(each.op, x, y, z);
      expect_close(expected, z);
    });
  }
}

TEST_P(Kernels, Operators) {
  for_operators([&](const OperatorCase& each, const auto& op) {
    for (const Shape& shape : each.shapes) {
      const Tensor x = random(shape, 1), y = unset(op.shape(shape));
      backend->operators().forward(op, x, y);
      const auto values = x.span<float>();
      expect_close(each.value({values.begin(), values.end()}, shape), y);
    }
  });
}

TEST_P(Kernels, Pointwise) {
  for (const std::int64_t n : {1, 3, 7, 17, 33, 40000}) {  // the last is split over threads
    const Tensor x = random({n}, 1), y = random({n}, 2), z = unset({n});
    auto& pointwise = backend->pointwise();
    std::vector<double> scaled, masked;
    for (std::int64_t i = 0; i < n; ++i) {
      scaled.push_back(at(y, i) - 0.5 * at(x, i));
      masked.push_back(at(x, i) > 0 ? at(y, i) : 0.0);
    }
    pointwise.unary_backward(UnaryOp::kRelu, {}, x, y, z);
    expect_close(masked, z);
    pointwise.copy(y, z);
    EXPECT_EQ(values_of(y), values_of(z));
    pointwise.add_to(x, -0.5f, z);
    expect_close(scaled, z);
    double squares = 0;
    for (std::int64_t i = 0; i < n; ++i) squares += at(x, i) * at(x, i);
    const Tensor total = backend->empty({}, DType::kF64), sums = backend->empty({norm_blocks(n)}, DType::kF64);
    const UpdateArrays arrays = {.count = n, .gradient = x.f32(), .sums = sums.data<double>()};
    backend->optim().squares(std::span(&arrays, 1));
    backend->optim().add_up(sums, total);
    EXPECT_NEAR(*total.data<double>(), squares, 1e-12 * squares);
  }
}

TEST_P(Kernels, SwapLastAxes) {
  for (const Shape& shape : {Shape{1, 1, 1}, Shape{3, 17, 33}, Shape{2, 16, 7}, Shape{33, 3, 40}}) {
    const Tensor x = random(shape, 1), y = unset({shape[0], shape[2], shape[1]});
    backend->pointwise().swap_last_axes(x, y);
    for (std::int64_t n = 0; n < shape[0]; ++n)
      for (std::int64_t r = 0; r < shape[1]; ++r)
        for (std::int64_t c = 0; c < shape[2]; ++c)
          ASSERT_EQ(x.f32()[(n * shape[1] + r) * shape[2] + c], y.f32()[(n * shape[2] + c) * shape[1] + r]);
  }
}

TEST_P(Kernels, Losses) {
  for (const std::int64_t n : kSizes)
    for (const std::int64_t k : kSizes) {
      const Tensor x = random({n, k}, 1), target = random({n, k}, 2), dx = unset({n, k}), totals = unset({2});
      const Tensor labels = backend->empty({n}, DType::kI32);
      std::vector<double> gradient2;
      double loss2 = 0;
      for (std::int64_t i = 0; i < n * k; ++i) {
        const double difference = at(x, i) - at(target, i);
        loss2 += difference * difference;
        gradient2.push_back(2 * difference * 0.3);
      }
      for (const double smoothing : {0.0, 0.1, 0.75}) {
        std::vector<double> gradient;
        double loss = 0, correct = 0;
        for (std::int64_t i = 0; i < n; ++i) {
          const std::int64_t label = i * 5 % k;
          labels.data<std::int32_t>()[i] = static_cast<std::int32_t>(label);
          double sum = 0;
          std::int64_t best = 0;
          for (std::int64_t j = 0; j < k; ++j) {
            sum += std::exp(at(x, i * k + j));
            if (at(x, i * k + j) > at(x, i * k + best)) best = j;
          }
          for (std::int64_t j = 0; j < k; ++j) {
            const double log_share = at(x, i * k + j) - std::log(sum);
            const double wanted = smoothing / static_cast<double>(k) + (j == label ? 1 - smoothing : 0.0);
            loss -= wanted * log_share;
            gradient.push_back(0.3 * (std::exp(log_share) - wanted));
          }
          correct += best == label ? 1 : 0;
        }
        const auto smooth = static_cast<float>(smoothing);
        backend->loss().cross_entropy(x, labels, 0.3f, smooth, totals, dx);
        expect_close({loss, correct}, totals);
        expect_close(gradient, dx);
        backend->loss().cross_entropy(x, labels, 0.3f, smooth, totals, Tensor());
        expect_close({loss, correct}, totals);
      }
      backend->loss().squared_error(x, target, 0.3f, totals, dx);
      expect_close({loss2, 0.0}, totals);
      expect_close(gradient2, dx);
    }
}

TEST_P(Kernels, LargeLogitsStayFinite) {
  const Tensor x = tensor_of(*backend, {2, 3}, {1e4f, -1e4f, 0.0f, -3e38f, 3e38f, 0.0f});
  const Tensor labels = backend->empty({2}, DType::kI32), totals = unset({2}), dx = unset({2, 3});
  labels.data<std::int32_t>()[0] = 0;
  labels.data<std::int32_t>()[1] = 1;
  backend->loss().cross_entropy(x, labels, 1.0f, 0.0f, totals, dx);
  EXPECT_EQ(values_of(totals), (std::vector<float>{0.0f, 2.0f}));
  EXPECT_EQ(values_of(dx), std::vector<float>(6, 0.0f));
}

// A model that has diverged must show: no kernel makes numbers of NaN.
TEST_P(Kernels, NanPasses) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
    for (const std::int64_t out : kSizes) {
      Tensor x = random({2, 7}, 1);
      x.f32()[3] = nan;
      const Tensor y = backend->empty({2, out});
      backend->linear().forward(x, random({out, 7}, 2), random({out}, 3), epilogue, y);
      Tensor image = random({1, 4, 4, 3}, 4);
      image.f32()[0] = nan;
      const Tensor image_y = backend->empty({1, 4, 4, out});
      backend->conv().forward(image, random({out, 3, 3, 3}, 5), 1, random({out}, 6), {{3, 3}, {1, 1}, {1, 1}}, epilogue,
                              image_y);
      for (std::int64_t o = 0; o < out; ++o) {
        EXPECT_TRUE(std::isnan(y.f32()[o])) << o << " of " << out;
        EXPECT_FALSE(std::isnan(y.f32()[out + o]));
        EXPECT_TRUE(std::isnan(image_y.f32()[o])) << o << " of " << out;
      }
    }
  const Tensor x = tensor_of(*backend, {3}, {nan, -1.0f, 2.0f}), y = unset({3});
  backend->pointwise().unary(UnaryOp::kRelu, x, y);
  EXPECT_TRUE(std::isnan(y.f32()[0]));
  EXPECT_EQ(y.f32()[1], 0.0f);
}

TEST_P(Kernels, NoSamples) {
  const Tensor x = backend->empty({0, 3}), dy = backend->empty({0, 5}), w = random({5, 3}, 1), b = random({5}, 2);
  const Tensor dw = unset({5, 3}), db = unset({5});
  backend->linear().forward(x, w, b, Epilogue::kRelu, dy);
  backend->linear().backward_input(dy, w, x);
  backend->linear().backward_weight(x, dy, false, dw);
  backend->linear().backward_bias(dy, false, db);
  EXPECT_EQ(values_of(dw), std::vector<float>(15, 0.0f));
  EXPECT_EQ(values_of(db), std::vector<float>(5, 0.0f));
  backend->linear().backward_weight(x, dy, true, w);
  EXPECT_EQ(values_of(w), values_of(random({5, 3}, 1)));

  const Window window = {{3, 3}, {1, 1}, {1, 1}};
  const Tensor image = backend->empty({0, 4, 4, 2}), dimage = backend->empty({0, 4, 4, 5}), v = random({5, 3, 3, 2}, 3);
  const Tensor dv = unset({5, 3, 3, 2});
  backend->pointwise().fill(db, 7.0f);
  backend->conv().forward(image, v, 1, b, window, Epilogue::kRelu, dimage);
  backend->conv().backward_input(dimage, v, 1, window, image);
  backend->conv().backward_weight(image, dimage, window, false, dv, false, db);
  EXPECT_EQ(values_of(dv), std::vector<float>(90, 0.0f));
  EXPECT_EQ(values_of(db), std::vector<float>(5, 0.0f));
  const Tensor no_choices = backend->empty(image.shape(), DType::kU8);
  backend->pool().max_forward(image, window, Epilogue::kRelu, image, no_choices);
  backend->pool().max_backward(image, no_choices, window, image);
  backend->pool().average_forward(image, window, image);
  backend->pool().average_backward(image, window, image);
  backend->pool().adaptive_average_forward(image, image);
  backend->pool().adaptive_average_backward(image, image);
  backend->norm().forward_infer(x, random({3}, 1), random({3}, 2), random({3}, 3), random({3}, 4), 1e-5, x);
  const Tensor totals = unset({2}), labels = backend->empty({0}, DType::kI32);
  backend->loss().cross_entropy(dy, labels, 1.0f, 0.0f, totals, dy);
  EXPECT_EQ(values_of(totals), (std::vector<float>{0.0f, 0.0f}));
}

INSTANTIATE_TEST_SUITE_P(Threads, Kernels, ::testing::Values(1, 2),
                         [](const auto& threads) { return "x" + std::to_string(threads.param); });

TEST(Backend, SaysWhatItIs) {
  EXPECT_EQ(make_cpu_backend(2)->describe(), "cpu, 2 threads, oneDNN " + onednn_version() + ", " + cpu_kernel_isa());
  EXPECT_THROW(make_cpu_backend(0), UsageError);
}

TEST(Window, ExtentsAndErrors) {
  const Window window = {{3, 3}, {2, 2}, {1, 1}};
  EXPECT_EQ(window.output_extent(0, 1), 1);
  EXPECT_EQ(window.output_extent(0, 7), 4);
  EXPECT_EQ(window.output_extent(1, 8), 4);
  EXPECT_THROW((Window{{3, 3}, {1, 1}, {0, 0}}).output_extent(0, 2), UsageError);
  EXPECT_THROW((Window{{0, 3}, {1, 1}, {0, 0}}).output_extent(0, 2), UsageError);
  EXPECT_THROW((Window{{1, 1}, {0, 1}, {0, 0}}).output_extent(0, 2), UsageError);
  EXPECT_THROW((Window{{1, 1}, {1, 1}, {-1, 0}}).output_extent(0, 2), UsageError);
}

}  // namespace
}  // namespace lockstep::nn
