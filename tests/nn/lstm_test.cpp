// LSTM on the CPU against plain loops in f64, the layer, and the products of a few rows beneath it.
#include "lockstep/nn/ops/lstm.h"
#include "base/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "lockstep/nn/models/models.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/panels.h"
#include "tests/nn/values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

using Numbers = std::vector<double>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
Numbers numbers_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto values = tensor.span<float>();
  return {values.begin(), values.end()};
}

struct Sizes {
  std::int64_t batch, steps, inputs, width;
  std::string text() const { return fmt::format("[{}, {}, {}] to {}", batch, steps, inputs, width); }
};
// Around a panel of 32 features, tiles of 8 rows and 256 inputs; one step, one sample, one of everything, and none.
const Sizes kLstmSizes[] = {{1, 1, 1, 1},  {2, 3, 5, 7},  {3, 4, 6, 31},  {1, 5, 4, 32},  {9, 2, 3, 33},
                            {4, 1, 9, 17}, {8, 3, 7, 64}, {17, 2, 5, 40}, {2, 2, 3, 270}, {0, 3, 5, 8}};

// Everything of a layer: forward, and the gradients of Σ dy y.
struct Reference {
  Numbers y, h, c, dx, dw_ih, dw_hh, db;

  Reference(const Sizes& s, const Tensor& x_tensor, const LstmWeights& weights, const LstmState& from,
            const Tensor& dy_tensor)
      : y(at(s.batch * s.steps * s.width)),
        h(at(s.batch * s.width)),
        c(h),
        dx(at(s.batch * s.steps * s.inputs)),
        dw_ih(at(4 * s.width * s.inputs)),
        dw_hh(at(4 * s.width * s.width)),
        db(at(4 * s.width)) {
    const Numbers x = numbers_of(x_tensor), w_ih = numbers_of(weights.w_ih), w_hh = numbers_of(weights.w_hh),
                  b_ih = numbers_of(weights.b_ih), b_hh = numbers_of(weights.b_hh), dy = numbers_of(dy_tensor),
                  h_first = numbers_of(from.h), c_first = numbers_of(from.c);
    const std::int64_t gates = 4 * s.width;
    const auto sigmoid = [](double v) { return 1.0 / (1.0 + std::exp(-v)); };
    for (std::int64_t b = 0; b < s.batch; ++b) {
      std::vector<Numbers> g(at(s.steps), Numbers(at(gates))), cs(at(s.steps + 1), Numbers(at(s.width))), hs = cs;
      for (std::int64_t u = 0; u < s.width; ++u) {
        if (from.h.defined()) hs[0][at(u)] = h_first[at(b * s.width + u)];
        if (from.c.defined()) cs[0][at(u)] = c_first[at(b * s.width + u)];
      }
      for (std::int64_t t = 0; t < s.steps; ++t) {
        for (std::int64_t k = 0; k < gates; ++k) {
          double sum = b_ih[at(k)] + b_hh[at(k)];
          for (std::int64_t i = 0; i < s.inputs; ++i)
            sum += x[at((b * s.steps + t) * s.inputs + i)] * w_ih[at(k * s.inputs + i)];
          for (std::int64_t i = 0; i < s.width; ++i) sum += hs[at(t)][at(i)] * w_hh[at(k * s.width + i)];
          g[at(t)][at(k)] = k / s.width == 2 ? std::tanh(sum) : sigmoid(sum);
        }
        for (std::int64_t u = 0; u < s.width; ++u) {
          const auto gate = [&](std::int64_t k) { return g[at(t)][at(k * s.width + u)]; };
          cs[at(t + 1)][at(u)] = gate(1) * cs[at(t)][at(u)] + gate(0) * gate(2);
          hs[at(t + 1)][at(u)] = gate(3) * std::tanh(cs[at(t + 1)][at(u)]);
          y[at((b * s.steps + t) * s.width + u)] = hs[at(t + 1)][at(u)];
        }
      }
      for (std::int64_t u = 0; u < s.width; ++u) {
        h[at(b * s.width + u)] = hs.back()[at(u)];
        c[at(b * s.width + u)] = cs.back()[at(u)];
      }
      Numbers dh(at(s.width)), dc(at(s.width)), d(at(gates));
      for (std::int64_t t = s.steps - 1; t >= 0; --t) {
        for (std::int64_t u = 0; u < s.width; ++u) {
          const auto gate = [&](std::int64_t k) { return g[at(t)][at(k * s.width + u)]; };
          dh[at(u)] += dy[at((b * s.steps + t) * s.width + u)];
          const double tanh_c = std::tanh(cs[at(t + 1)][at(u)]);
          const double dcell = dc[at(u)] + dh[at(u)] * gate(3) * (1 - tanh_c * tanh_c);
          d[at(u)] = dcell * gate(2) * gate(0) * (1 - gate(0));
          d[at(s.width + u)] = dcell * cs[at(t)][at(u)] * gate(1) * (1 - gate(1));
          d[at(2 * s.width + u)] = dcell * gate(0) * (1 - gate(2) * gate(2));
          d[at(3 * s.width + u)] = dh[at(u)] * tanh_c * gate(3) * (1 - gate(3));
          dc[at(u)] = dcell * gate(1);
        }
        std::fill(dh.begin(), dh.end(), 0.0);
        for (std::int64_t k = 0; k < gates; ++k) {
          db[at(k)] += d[at(k)];
          for (std::int64_t i = 0; i < s.inputs; ++i) {
            dw_ih[at(k * s.inputs + i)] += d[at(k)] * x[at((b * s.steps + t) * s.inputs + i)];
            dx[at((b * s.steps + t) * s.inputs + i)] += d[at(k)] * w_ih[at(k * s.inputs + i)];
          }
          for (std::int64_t i = 0; i < s.width; ++i) {
            dw_hh[at(k * s.width + i)] += d[at(k)] * hs[at(t)][at(i)];
            dh[at(i)] += d[at(k)] * w_hh[at(k * s.width + i)];
          }
        }
      }
    }
  }
};

void expect_close(const Numbers& expected, const Tensor& actual, const char* what, double added = 0.0,
                  double times = 1.0) {
  ASSERT_EQ(expected.size(), at(actual.count())) << what;
  double largest = 1.0;
  for (const double e : expected) largest = std::max(largest, std::abs(e));
  for (std::size_t i = 0; i < expected.size(); ++i)
    ASSERT_NEAR(times * expected[i] + added, static_cast<double>(actual.f32()[i]), 1e-5 * largest)
        << what << " element " << i;
}

class LstmKernels : public ::testing::TestWithParam<int> {
 protected:
  Tensor random(const Shape& shape, std::uint64_t seed) { return random_tensor(*backend, shape, seed); }
  LstmWeights weights_for(const Sizes& s) {
    // Small enough that the gates of wide layers are not all at their ends.
    const auto shrunk = [&](Tensor made) {
      for (float& v : made.span<float>()) v *= 2.0f / std::sqrt(static_cast<float>(s.width));
      return made;
    };
    return {.w_ih = shrunk(random({4 * s.width, s.inputs}, 1)),
            .w_hh = shrunk(random({4 * s.width, s.width}, 2)),
            .b_ih = random({4 * s.width}, 3),
            .b_hh = random({4 * s.width}, 4),
            .versions = {++version_, ++version_, ++version_, ++version_}};
  }
  Tensor unset(const Shape& shape) {
    const Tensor made = backend->empty(shape);
    for (float& v : made.span<float>()) v = std::nanf("");
    return made;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(GetParam());

 private:
  std::uint64_t version_ = 0;
};

TEST_P(LstmKernels, IsThatOfAPlainLoop) {
  for (const Sizes& s : kLstmSizes)
    for (const bool begins : {false, true}) {
      SCOPED_TRACE(s.text());
      const LstmWeights weights = weights_for(s);
      const Tensor x = random({s.batch, s.steps, s.inputs}, 5), dy = random({s.batch, s.steps, s.width}, 6);
      LstmState from;
      if (begins) from = {random({s.batch, s.width}, 7), random({s.batch, s.width}, 8)};
      const Reference expected(s, x, weights, from, dy);
      const Tensor y = unset(dy.shape()), dx = unset(x.shape());
      const LstmState to = {unset({s.batch, s.width}), unset({s.batch, s.width})};
      // Without what backward needs, the same.
      EXPECT_FALSE(backend->lstm().forward(x, weights, from, y, to, false).defined());
      expect_close(expected.y, y, "y of evaluation");
      const auto evaluated = values_of(y);
      const Tensor kept = backend->lstm().forward(x, weights, from, y, to, true);
      EXPECT_EQ(values_of(y), evaluated);
      expect_close(expected.h, to.h, "h");
      expect_close(expected.c, to.c, "c");
      const auto fresh = [&](float value) {
        LstmGradients gradients = {unset({4 * s.width, s.inputs}), unset({4 * s.width, s.width}), unset({4 * s.width}),
                                   unset({4 * s.width})};
        if (value != 0.0f) {
          gradients.accumulate = {true, true, true, true};
          for (const Tensor* const g : {&gradients.w_ih, &gradients.w_hh, &gradients.b_ih, &gradients.b_hh})
            backend->pointwise().fill(*g, value);
        }
        return gradients;
      };
      const auto expect_gradients = [&](const LstmGradients& gradients, double added) {
        expect_close(expected.dw_ih, gradients.w_ih, "dw_ih", added);
        expect_close(expected.dw_hh, gradients.w_hh, "dw_hh", added);
        expect_close(expected.db, gradients.b_ih, "db_ih", added);
        expect_close(expected.db, gradients.b_hh, "db_hh", added);
      };
      const LstmGradients gradients = fresh(0.0f), more = fresh(0.5f);
      backend->lstm().backward(x, weights, from, y, kept, dy, gradients, dx, [] {});
      expect_gradients(gradients, 0.0);
      expect_close(expected.dx, dx, "dx");
      const Tensor again = backend->lstm().forward(x, weights, from, y, {}, true);
      backend->lstm().backward(x, weights, from, y, again, dy, more, Tensor(), [] {});
      expect_gradients(more, 0.5);
    }
}

// What nobody wants is left out, and the rest is the same.
TEST_P(LstmKernels, ComputesTheGradientsThatAreWanted) {
  const Sizes s = {3, 4, 5, 33};
  const LstmWeights weights = weights_for(s);
  const Tensor x = random({s.batch, s.steps, s.inputs}, 5), dy = random({s.batch, s.steps, s.width}, 6);
  const Reference expected(s, x, weights, {}, dy);
  for (int wanted = 0; wanted < 32; ++wanted) {
    const Tensor y = unset(dy.shape());
    const Tensor kept = backend->lstm().forward(x, weights, {}, y, {}, true);
    LstmGradients gradients;
    if (wanted & 1) gradients.w_ih = unset({4 * s.width, s.inputs});
    if (wanted & 2) gradients.w_hh = unset({4 * s.width, s.width});
    if (wanted & 4) gradients.b_ih = unset({4 * s.width});
    if (wanted & 8) gradients.b_hh = unset({4 * s.width});
    const Tensor dx = wanted & 16 ? unset(x.shape()) : Tensor();
    backend->lstm().backward(x, weights, {}, y, kept, dy, gradients, dx, [] {});
    if (wanted & 1) expect_close(expected.dw_ih, gradients.w_ih, "dw_ih");
    if (wanted & 2) expect_close(expected.dw_hh, gradients.w_hh, "dw_hh");
    if (wanted & 4) expect_close(expected.db, gradients.b_ih, "db_ih");
    if (wanted & 8) expect_close(expected.db, gradients.b_hh, "db_hh");
    if (wanted & 16) expect_close(expected.dx, dx, "dx");
  }
}

// A sequence in pieces, each from the state that the one before has left.
TEST_P(LstmKernels, GoesOnFromItsState) {
  for (const Sizes& s : {Sizes{2, 7, 5, 19}, {1, 4, 3, 64}}) {
    const LstmWeights weights = weights_for(s);
    const Tensor x = random({s.batch, s.steps, s.inputs}, 5), whole = unset({s.batch, s.steps, s.width});
    backend->lstm().forward(x, weights, {}, whole, {}, false);
    for (const std::vector<std::int64_t>& pieces :
         {std::vector<std::int64_t>{s.steps - 1, 1}, {1, s.steps - 1}, std::vector<std::int64_t>(at(s.steps), 1)}) {
      LstmState state;
      std::int64_t begin = 0;
      for (const std::int64_t count : pieces) {
        const Tensor part = unset({s.batch, count, s.inputs}), y = unset({s.batch, count, s.width});
        for (std::int64_t b = 0; b < s.batch; ++b)
          std::copy_n(x.f32() + (b * s.steps + begin) * s.inputs, count * s.inputs, part.f32() + b * count * s.inputs);
        const LstmState next = {unset({s.batch, s.width}), unset({s.batch, s.width})};
        backend->lstm().forward(part, weights, state, y, next, false);
        for (std::int64_t b = 0; b < s.batch; ++b)
          for (std::int64_t i = 0; i < count * s.width; ++i)
            ASSERT_NEAR(whole.f32()[(b * s.steps + begin) * s.width + i], y.f32()[b * count * s.width + i], 1e-6f);
        state = next;
        begin += count;
      }
    }
  }
}

// Packed weights are those of the version.
TEST_P(LstmKernels, FollowsItsWeights) {
  const Sizes s = {2, 3, 4, 40};
  LstmWeights weights = weights_for(s);
  const Tensor x = random({s.batch, s.steps, s.inputs}, 5), dy = random({s.batch, s.steps, s.width}, 6);
  for (int round = 0; round < 3; ++round) {
    const Reference expected(s, x, weights, {}, dy);
    const Tensor y = unset(dy.shape()), dx = unset(x.shape());
    const Tensor kept = backend->lstm().forward(x, weights, {}, y, {}, true);
    backend->lstm().backward(x, weights, {}, y, kept, dy, {}, dx, [] {});
    expect_close(expected.y, y, "y");
    expect_close(expected.dx, dx, "dx");
    backend->pointwise().copy(random(weights.w_hh.shape(), static_cast<std::uint64_t>(10 + round)), weights.w_hh);
    ++weights.versions[1];
  }
}

// The same bits for any number of threads.
TEST(LstmThreads, DoNotChangeTheNumbers) {
  const Sizes s = {5, 6, 40, 130};
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3}) {
    const auto backend = make_cpu_backend(threads);
    const auto random = [&](const Shape& shape, std::uint64_t seed) { return random_tensor(*backend, shape, seed); };
    const LstmWeights weights = {.w_ih = random({4 * s.width, s.inputs}, 1),
                                 .w_hh = random({4 * s.width, s.width}, 2),
                                 .b_ih = random({4 * s.width}, 3),
                                 .b_hh = random({4 * s.width}, 4),
                                 .versions = {1, 2, 3, 4}};
    // The product over all steps is oneDNN's, whose sums may be cut by threads: without inputs it adds nothing.
    const Tensor x = backend->zeros({s.batch, s.steps, s.inputs}), y = backend->empty({s.batch, s.steps, s.width});
    const Tensor kept = backend->lstm().forward(x, weights, {}, y, {}, true);
    std::vector<float> all = values_of(y);
    LstmGradients gradients;
    gradients.b_ih = backend->empty({4 * s.width});
    backend->lstm().backward(x, weights, {}, y, kept, random(y.shape(), 6), gradients, Tensor(), [] {});
    const auto db = values_of(gradients.b_ih);
    all.insert(all.end(), db.begin(), db.end());
    results.push_back(std::move(all));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_P(LstmKernels, KeepsNaN) {
  const Sizes s = {2, 3, 4, 5};
  const LstmWeights weights = weights_for(s);
  const Tensor x = random({s.batch, s.steps, s.inputs}, 5), y = unset({s.batch, s.steps, s.width});
  x.f32()[s.inputs] = std::nanf("");  // of the first sample's second step
  backend->lstm().forward(x, weights, {}, y, {}, false);
  for (std::int64_t i = 0; i < y.count(); ++i)
    EXPECT_EQ(std::isnan(y.f32()[i]), i >= s.width && i < s.steps * s.width) << i;
}

INSTANTIATE_TEST_SUITE_P(Threads, LstmKernels, ::testing::Values(1, 2));

TEST(Panels, AreProductsOfAnySize) {
  const auto backend = make_cpu_backend(1);
  for (const std::int64_t rows : {1, 2, 5, 6, 7, 8, 9, 16, 19})
    for (const std::int64_t depth : {1, 3, 255, 256, 300})
      for (const std::int64_t width : {1, 16, 31, 32}) {
        SCOPED_TRACE(fmt::format("{} rows of {} by {}", rows, depth, width));
        const Tensor a = random_tensor(*backend, {rows, depth + 3}, 1),
                     by_rows = random_tensor(*backend, {width, depth}, 2);
        const Tensor by_columns = backend->empty({depth, width}), panel = backend->empty({depth, cpu::kPanel});
        backend->pointwise().swap_last_axes(by_rows.reshaped({1, width, depth}), by_columns);
        const Tensor first = random_tensor(*backend, {rows, width + 5}, 3);
        std::vector<std::vector<float>> made;
        for (const bool columns : {false, true}) {
          for (float& v : panel.span<float>()) v = std::nanf("");
          if (columns)
            cpu::pack_columns(by_columns.f32(), width, width, depth, panel.f32());
          else
            cpu::pack_rows(by_rows.f32(), depth, width, depth, panel.f32());
          const Tensor c = backend->empty(first.shape());
          backend->pointwise().copy(first, c);
          cpu::add_product(a.f32(), depth + 3, rows, depth, panel.f32(), width, c.f32(), width + 5);
          made.push_back(values_of(c));
          for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t i = 0; i < width + 5; ++i) {
              double sum = static_cast<double>(first.f32()[r * (width + 5) + i]);
              for (std::int64_t k = 0; k < depth && i < width; ++k)
                sum += static_cast<double>(a.f32()[r * (depth + 3) + k]) *
                       static_cast<double>(by_rows.f32()[i * depth + k]);
              ASSERT_NEAR(sum, static_cast<double>(c.f32()[r * (width + 5) + i]), i < width ? 2e-5 : 0.0)
                  << r << ", " << i;
            }
        }
        EXPECT_EQ(made[0], made[1]);
      }
}

TEST(FastMath, TanhIsCloseEverywhere) {
  double worst = 0.0;
  const auto check = [&](float x) {
    const double expected = std::tanh(static_cast<double>(x)), got = static_cast<double>(cpu::tanh_of(x));
    ASSERT_LE(std::abs(got), 1.0) << x;
    if (expected != 0.0) worst = std::max(worst, std::abs(got - expected) / std::abs(expected));
  };
  for (double x = 1e-30; x < 1e30; x *= 1.0003) {
    check(static_cast<float>(x));
    check(static_cast<float>(-x));
  }
  EXPECT_LT(worst, 4e-7);
  EXPECT_EQ(cpu::tanh_of(0.0f), 0.0f);
  EXPECT_EQ(cpu::tanh_of(std::numeric_limits<float>::infinity()), 1.0f);
  EXPECT_EQ(cpu::tanh_of(-std::numeric_limits<float>::infinity()), -1.0f);
  EXPECT_TRUE(std::isnan(cpu::tanh_of(std::nanf(""))));
}

class LstmLayer : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
};

TEST_F(LstmLayer, HasPyTorchsNamesAndPrintsLikeIt) {
  const nn::Lstm two(context, 64, 128, 2);
  EXPECT_EQ(to_string(two), "LSTM(64, 128, num_layers=2, batch_first=True)");
  EXPECT_EQ(to_string(nn::Lstm(context, 3, 5)), "LSTM(3, 5, batch_first=True)");
  EXPECT_EQ(to_string(nn::Lstm(context, 3, 5, 3, 0.25)), "LSTM(3, 5, num_layers=3, batch_first=True, dropout=0.25)");
  std::vector<std::string> described;
  for (const auto& [name, parameter] : two.named_parameters()) {
    described.push_back(fmt::format("{} {}", name, to_string(parameter->value().shape())));
    const float bound = 1.0f / std::sqrt(128.0f);
    float largest = 0.0f;
    for (const float v : parameter->value().span<float>()) largest = std::max(largest, std::abs(v));
    EXPECT_LE(largest, bound) << name;
    EXPECT_GT(largest, 0.9f * bound) << name;
  }
  EXPECT_EQ(described, (std::vector<std::string>{"weight_ih_l0 [512, 64]", "weight_hh_l0 [512, 128]",
                                                 "bias_ih_l0 [512]", "bias_hh_l0 [512]", "weight_ih_l1 [512, 128]",
                                                 "weight_hh_l1 [512, 128]", "bias_ih_l1 [512]", "bias_hh_l1 [512]"}));
}

// Two layers are one after the other; dropout is between them, in training alone.
TEST_F(LstmLayer, LayersFollowEachOther) {
  nn::Lstm layers(context, 3, 5, 2, 0.5, 7);
  const auto all = layers.named_parameters();
  const Tensor x = random_tensor(*backend, {2, 4, 3}, 1);
  const std::int64_t state[] = {3, 1, 0};
  const Tensor drop = backend->empty({3}, DType::kI64);
  backend->upload(std::as_bytes(std::span(state)), drop);
  for (const bool training : {true, false}) {
    layers.train(training);
    Tape tape(*backend);
    tape.set_dropout_state(drop);
    const auto parameters = [&](std::size_t first) {
      return LstmParameters{*all[first].parameter, *all[first + 1].parameter, *all[first + 2].parameter,
                            *all[first + 3].parameter};
    };
    Var y = lstm(tape, tape.input(x), parameters(0));
    if (training) y = dropout(tape, y, 0.5, 7);
    y = lstm(tape, y, parameters(4));
    EXPECT_EQ(values_of(layers.forward(tape, tape.input(x)).value()), values_of(y.value())) << training;
  }
}

TEST_F(LstmLayer, StatesGoOn) {
  nn::Lstm layers(context, 3, 5, 2);
  layers.train(false);
  const Tensor x = random_tensor(*backend, {1, 6, 3}, 1);
  Tape tape(*backend);
  tape.set_recording(false);
  const auto whole = values_of(layers.forward(tape, tape.input(x)).value());
  std::vector<LstmState> states(2);
  std::vector<float> parts;
  for (const auto& [begin, end] : {std::pair{0, 4}, {4, 6}}) {
    const Tensor part = x.reshaped({6, 3}).slice(begin, end).reshaped({1, end - begin, 3});
    const auto y = values_of(layers.forward(tape, tape.input(part), states).value());
    parts.insert(parts.end(), y.begin(), y.end());
  }
  ASSERT_EQ(whole.size(), parts.size());
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(whole[i], parts[i], 1e-6f);
  EXPECT_EQ(values_of(states[1].h), std::vector<float>(parts.end() - 5, parts.end()));
}

TEST_F(LstmLayer, RefusesWhatDoesNotFit) {
  nn::Lstm layer(context, 3, 5);
  Tape tape(*backend);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 3}))), UsageError);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 3, 4}))), UsageError);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 0, 3}))), UsageError);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 1, 3}, DType::kI32))), UsageError);
  std::vector<LstmState> states = {{backend->zeros({3, 5}), backend->zeros({3, 5})}};
  EXPECT_THROW(layer.forward(tape, tape.input(backend->zeros({2, 1, 3})), states), UsageError);
}

class LstmModels : public LstmLayer {
 protected:
  // The tape outlives the models that the tests make.
  LstmModels() { tape.set_recording(false); }

  Tensor tokens(const Shape& shape, std::uint64_t seed) {
    SplitMix64 random(seed);
    const Tensor made = backend->empty(shape, DType::kI32);
    for (std::int32_t& token : made.span<std::int32_t>()) token = static_cast<std::int32_t>(random.below(kVocabulary));
    return made;
  }
  ModelSpec spec(std::vector<std::int64_t> sample_shape) const {
    return {.name = "lstm",
            .sample_shape = std::move(sample_shape),
            .classes = kVocabulary,
            .settings = {{"layers", 2}, {"width", 6}}};
  }
  static std::vector<std::string> names_of(const Module& module) {
    std::vector<std::string> names;
    for (const auto& [name, parameter] : module.named_parameters()) names.push_back(name);
    return names;
  }

  static constexpr int kVocabulary = 11;
  Tape tape{*backend};
};

TEST_F(LstmModels, OfTextHaveTheNamesOfPyTorchsExample) {
  const auto model = make_model(context, spec({9}));
  EXPECT_EQ(names_of(*model),
            (std::vector<std::string>{"encoder.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0",
                                      "rnn.bias_hh_l0", "rnn.weight_ih_l1", "rnn.weight_hh_l1", "rnn.bias_ih_l1",
                                      "rnn.bias_hh_l1", "decoder.weight", "decoder.bias"}));
  EXPECT_EQ(to_string(*model),
            "LstmLanguageModel(\n  (drop): Dropout(p=0, inplace=False)\n  (encoder): Embedding(11, 6)\n"
            "  (rnn): LSTM(6, 6, num_layers=2, batch_first=True)\n  (drop_out): Dropout(p=0, inplace=False)\n"
            "  (decoder): Linear(in_features=6, out_features=11, bias=True)\n)");
  for (const std::int64_t n : {0, 1, 3})
    EXPECT_EQ(model->forward(tape, tape.input(tokens({n, 5}, 1))).shape(), (Shape{n, 5, kVocabulary}));
  EXPECT_THROW(model->forward(tape, tape.input(backend->zeros({2, 5}))), UsageError);
  EXPECT_THROW(make_model(context, {.name = "lstm", .sample_shape = {9}, .settings = {{"layers", 0}}}), UsageError);
  EXPECT_THROW(make_model(context, {.name = "lstm", .sample_shape = {9}, .settings = {{"width", 0}}}), UsageError);
}

// A text in pieces, each from where the one before has ended, as when it is generated.
TEST_F(LstmModels, OfTextGoOn) {
  const auto model = make_model(context, spec({9}));
  model->train(false);
  auto& text = dynamic_cast<LanguageModel&>(*model);
  EXPECT_EQ(text.vocabulary(), kVocabulary);
  EXPECT_FALSE(text.positions().has_value());
  for (const std::int64_t batch : {1, 3}) {
    constexpr std::int64_t kTokens = 7;
    const Tensor all = tokens({batch, kTokens}, 2);
    const auto logits = values_of(model->forward(tape, tape.input(all)).value());
    const auto memory = text.begin(tape, batch, kTokens);
    std::int64_t seen = 0;
    for (const std::int64_t count : {3, 1, 1, 2}) {
      const Tensor part = backend->empty({batch, count}, DType::kI32);
      for (std::int64_t b = 0; b < batch; ++b)
        std::copy_n(all.data<std::int32_t>() + b * kTokens + seen, count, part.data<std::int32_t>() + b * count);
      const Var last = text.next(tape, part, *memory);
      seen += count;
      ASSERT_EQ(last.shape(), (Shape{batch, kVocabulary}));
      EXPECT_EQ(memory->seen(), seen);
      const auto got = values_of(last.value());
      for (std::int64_t b = 0; b < batch; ++b)
        for (std::int64_t k = 0; k < kVocabulary; ++k)
          EXPECT_NEAR(got[at(b * kVocabulary + k)], logits[at((b * kTokens + seen - 1) * kVocabulary + k)], 1e-5f);
    }
    EXPECT_THROW(text.next(tape, tokens({batch, 1}, 3), *memory), UsageError);
    EXPECT_THROW(text.next(tape, tokens({batch + 1, 1}, 3), *text.begin(tape, batch, 4)), UsageError);
  }
  EXPECT_THROW(text.begin(tape, 0, 4), UsageError);
}

// Rows of pixels are steps, and the last one decides the class: the last row changes the result, and an additional
// first row makes another sequence.
TEST_F(LstmModels, OfImagesReadRows) {
  const auto model = make_model(context, spec({5, 4, 2}));
  EXPECT_EQ(names_of(*model).front(), "rnn.weight_ih_l0");
  const Tensor images = random_tensor(*backend, {3, 5, 4, 2}, 1);
  const auto logits = values_of(model->forward(tape, tape.input(images)).value());
  auto parameters = model->named_parameters();
  const auto find = [&](const std::string& name) -> Parameter& {
    return *std::ranges::find(parameters, name, &NamedParameter::name)->parameter;
  };
  const auto layer = [&](const std::string& l) {
    return LstmParameters{find("rnn.weight_ih_l" + l), find("rnn.weight_hh_l" + l), find("rnn.bias_ih_l" + l),
                          find("rnn.bias_hh_l" + l)};
  };
  const Var steps = lstm(tape, lstm(tape, tape.input(images.reshaped({3, 5, 8})), layer("0")), layer("1"));
  const Tensor last = backend->empty({3, 6});
  for (std::int64_t n = 0; n < 3; ++n) std::copy_n(steps.value().f32() + (n * 5 + 4) * 6, 6, last.f32() + n * 6);
  EXPECT_EQ(values_of(linear(tape, tape.input(last), find("decoder.weight"), &find("decoder.bias")).value()), logits);
  for (const std::int64_t n : {0, 1, 3, 2, 3})
    EXPECT_EQ(model->forward(tape, tape.input(backend->zeros({n, 5, 4, 2}))).shape(), (Shape{n, kVocabulary}));
}

}  // namespace
}  // namespace lockstep::nn
