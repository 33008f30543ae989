// Recurrent kernels on the CPU against plain loops in f64.
#include "lockstep/nn/ops/rnn.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/products.h"
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
const Sizes kLayerSizes[] = {{1, 1, 1, 1},  {2, 3, 5, 7},  {3, 4, 6, 31},  {1, 5, 4, 32},  {9, 2, 3, 33},
                             {4, 1, 9, 17}, {8, 3, 7, 64}, {17, 2, 5, 40}, {2, 2, 3, 270}, {0, 3, 5, 8}};

// What a test asks of a layer.
struct LayerCase {
  Sizes sizes;
  RnnCell cell = RnnCell::kLstm;
  bool begins = false;  // with a state
  bool reverse = false;
  bool ragged = false;  // sequences of different lengths
  bool bias = true;

  std::int64_t gates() const { return gates_of(cell) * sizes.width; }
  std::string text() const {
    return fmt::format("{}{} {}{}{}{}{}", name_of(cell), cell == RnnCell::kRelu ? " with ReLU" : "", sizes.text(),
                       begins ? ", with a state" : "", reverse ? ", reverse" : "", ragged ? ", ragged" : "",
                       bias ? "" : ", no bias");
  }
  // From none to all steps.
  std::int64_t length_of(std::int64_t b) const {
    return ragged ? (b * 5 + sizes.steps) % (sizes.steps + 1) : sizes.steps;
  }
};

// Everything of a layer in f64: forward, and the gradients of Σ dy y.
struct Reference {
  Numbers y, h, c, dx, dw_ih, dw_hh, db_ih, db_hh;

  Reference(const LayerCase& layer, const Tensor& x_tensor, const RnnWeights& weights, const RnnState& from,
            const Tensor& dy_tensor)
      : y(at(layer.sizes.batch * layer.sizes.steps * layer.sizes.width)),
        h(at(layer.sizes.batch * layer.sizes.width)),
        c(h),
        dx(at(layer.sizes.batch * layer.sizes.steps * layer.sizes.inputs)),
        dw_ih(at(layer.gates() * layer.sizes.inputs)),
        dw_hh(at(layer.gates() * layer.sizes.width)),
        db_ih(at(layer.gates())),
        db_hh(at(layer.gates())) {
    const Sizes& s = layer.sizes;
    const Numbers x = numbers_of(x_tensor), w_ih = numbers_of(weights.w_ih), w_hh = numbers_of(weights.w_hh),
                  b_ih = numbers_of(weights.b_ih), b_hh = numbers_of(weights.b_hh), dy = numbers_of(dy_tensor),
                  h_first = numbers_of(from.h), c_first = numbers_of(from.c);
    const std::int64_t gates = layer.gates();
    for (std::int64_t b = 0; b < s.batch; ++b) {
      struct Step {
        std::int64_t row;
        Numbers h_before, c_before, gates, b_n, h, c;
      };
      std::vector<Step> steps;
      Numbers h_now(at(s.width)), c_now(at(s.width));
      for (std::int64_t u = 0; u < s.width; ++u) {
        if (from.h.defined()) h_now[at(u)] = h_first[at(b * s.width + u)];
        if (from.c.defined()) c_now[at(u)] = c_first[at(b * s.width + u)];
      }
      const std::int64_t length = layer.length_of(b);
      for (std::int64_t turn = 0; turn < length; ++turn) {
        const std::int64_t row = b * s.steps + (layer.reverse ? length - 1 - turn : turn);
        Step step = {row, h_now, c_now, Numbers(at(gates)), Numbers(at(gates)), h_now, c_now};
        for (std::int64_t k = 0; k < gates; ++k) {
          double a = layer.bias ? b_ih[at(k)] : 0.0, state = layer.bias ? b_hh[at(k)] : 0.0;
          for (std::int64_t i = 0; i < s.inputs; ++i) a += x[at(row * s.inputs + i)] * w_ih[at(k * s.inputs + i)];
          for (std::int64_t i = 0; i < s.width; ++i) state += h_now[at(i)] * w_hh[at(k * s.width + i)];
          step.gates[at(k)] = a;
          step.b_n[at(k)] = state;
        }
        for (std::int64_t u = 0; u < s.width; ++u) forward_cell(layer, step, u);
        h_now = step.h;
        c_now = step.c;
        std::copy(h_now.begin(), h_now.end(), y.begin() + row * s.width);
        steps.push_back(std::move(step));
      }
      std::copy(h_now.begin(), h_now.end(), h.begin() + b * s.width);
      std::copy(c_now.begin(), c_now.end(), c.begin() + b * s.width);
      Numbers dh(at(s.width)), dc(at(s.width)), d_inputs(at(gates)), d_state(at(gates));
      for (; !steps.empty(); steps.pop_back()) {
        const Step& step = steps.back();
        for (std::int64_t u = 0; u < s.width; ++u) {
          dh[at(u)] += dy[at(step.row * s.width + u)];
          dh[at(u)] = backward_cell(layer, step, u, dh[at(u)], dc[at(u)], d_inputs, d_state);
        }
        for (std::int64_t k = 0; k < gates; ++k) {
          db_ih[at(k)] += d_inputs[at(k)];
          db_hh[at(k)] += d_state[at(k)];
          for (std::int64_t i = 0; i < s.inputs; ++i) {
            dw_ih[at(k * s.inputs + i)] += d_inputs[at(k)] * x[at(step.row * s.inputs + i)];
            dx[at(step.row * s.inputs + i)] += d_inputs[at(k)] * w_ih[at(k * s.inputs + i)];
          }
          for (std::int64_t i = 0; i < s.width; ++i) {
            dw_hh[at(k * s.width + i)] += d_state[at(k)] * step.h_before[at(i)];
            dh[at(i)] += d_state[at(k)] * w_hh[at(k * s.width + i)];
          }
        }
      }
    }
  }

 private:
  static double sigmoid(double v) { return 1.0 / (1.0 + std::exp(-v)); }

  // Feature u: `gates` and `b_n` hold what inputs and state contribute, and then `gates` the gates.
  template <class Step>
  static void forward_cell(const LayerCase& layer, Step& step, std::int64_t u) {
    const std::int64_t width = layer.sizes.width;
    const auto gate = [&](std::int64_t k) -> double& { return step.gates[at(k * width + u)]; };
    const auto state = [&](std::int64_t k) { return step.b_n[at(k * width + u)]; };
    switch (layer.cell) {
      case RnnCell::kTanh: gate(0) = step.h[at(u)] = std::tanh(gate(0) + state(0)); break;
      case RnnCell::kRelu: gate(0) = step.h[at(u)] = std::max(gate(0) + state(0), 0.0); break;
      case RnnCell::kLstm:
        for (std::int64_t k = 0; k < 4; ++k)
          gate(k) = k == 2 ? std::tanh(gate(k) + state(k)) : sigmoid(gate(k) + state(k));
        step.c[at(u)] = gate(1) * step.c_before[at(u)] + gate(0) * gate(2);
        step.h[at(u)] = gate(3) * std::tanh(step.c[at(u)]);
        break;
      case RnnCell::kGru:
        gate(0) = sigmoid(gate(0) + state(0));
        gate(1) = sigmoid(gate(1) + state(1));
        gate(2) = std::tanh(gate(2) + gate(0) * state(2));
        step.h[at(u)] = (1.0 - gate(1)) * gate(2) + gate(1) * step.h_before[at(u)];
    }
  }

  // Returns the gradient of h_before, as far as no gate passes it on; dc is first that of c, then of c_before.
  template <class Step>
  static double backward_cell(const LayerCase& layer, const Step& step, std::int64_t u, double dh, double& dc,
                              Numbers& d_inputs, Numbers& d_state) {
    const std::int64_t width = layer.sizes.width;
    const auto gate = [&](std::int64_t k) { return step.gates[at(k * width + u)]; };
    const auto both = [&](std::int64_t k, double value) {
      d_inputs[at(k * width + u)] = d_state[at(k * width + u)] = value;
    };
    switch (layer.cell) {
      case RnnCell::kTanh: both(0, dh * (1 - gate(0) * gate(0))); return 0.0;
      case RnnCell::kRelu: both(0, gate(0) > 0.0 ? dh : 0.0); return 0.0;
      case RnnCell::kLstm: {
        const double tanh_c = std::tanh(step.c[at(u)]), d = dc + dh * gate(3) * (1 - tanh_c * tanh_c);
        both(0, d * gate(2) * gate(0) * (1 - gate(0)));
        both(1, d * step.c_before[at(u)] * gate(1) * (1 - gate(1)));
        both(2, d * gate(0) * (1 - gate(2) * gate(2)));
        both(3, dh * tanh_c * gate(3) * (1 - gate(3)));
        dc = d * gate(1);
        return 0.0;
      }
      default: {
        const double r = gate(0), z = gate(1), n = gate(2), dn = dh * (1 - z) * (1 - n * n);
        both(0, dn * step.b_n[at(2 * width + u)] * r * (1 - r));
        both(1, dh * (step.h_before[at(u)] - n) * z * (1 - z));
        both(2, dn);
        d_state[at(2 * width + u)] = dn * r;
        return dh * z;
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

class RnnKernels : public ::testing::TestWithParam<int> {
 protected:
  Tensor random(const Shape& shape, std::uint64_t seed) { return random_tensor(*backend, shape, seed); }
  RnnWeights weights_for(const LayerCase& layer) {
    const Sizes& s = layer.sizes;
    // Small enough that the gates of wide layers are not all at their ends, and that ReLU does not explode.
    const auto shrunk = [&](Tensor made) {
      for (float& v : made.span<float>()) v *= 2.0f / std::sqrt(static_cast<float>(s.width));
      return made;
    };
    RnnWeights weights = {.w_ih = shrunk(random({layer.gates(), s.inputs}, 1)),
                          .w_hh = shrunk(random({layer.gates(), s.width}, 2)),
                          .b_ih = {},
                          .b_hh = {},
                          .versions = {++version_, ++version_, ++version_, ++version_}};
    if (layer.bias) {
      weights.b_ih = random({layer.gates()}, 3);
      weights.b_hh = random({layer.gates()}, 4);
    }
    return weights;
  }
  RnnState state_for(const LayerCase& layer) {
    const Shape shape = {layer.sizes.batch, layer.sizes.width};
    RnnState state;
    if (layer.begins) state.h = random(shape, 7);
    if (layer.begins && layer.cell == RnnCell::kLstm) state.c = random(shape, 8);
    return state;
  }
  RnnOptions options_for(const LayerCase& layer) {
    RnnOptions options = {.cell = layer.cell, .reverse = layer.reverse};
    if (!layer.ragged) return options;
    options.lengths = backend->empty({layer.sizes.batch}, DType::kI32);
    for (std::int64_t b = 0; b < layer.sizes.batch; ++b)
      options.lengths.data<std::int32_t>()[b] = static_cast<std::int32_t>(layer.length_of(b));
    return options;
  }
  // What nobody may read.
  Tensor with_padding(const LayerCase& layer, const Tensor& made, float padding) {
    const std::int64_t features = made.size(2);
    for (std::int64_t b = 0; b < layer.sizes.batch; ++b)
      std::fill(made.f32() + (b * layer.sizes.steps + layer.length_of(b)) * features,
                made.f32() + (b + 1) * layer.sizes.steps * features, padding);
    return made;
  }
  Tensor unset(const Shape& shape) {
    const Tensor made = backend->empty(shape);
    for (float& v : made.span<float>()) v = std::nanf("");
    return made;
  }
  void check(const LayerCase& layer);

  std::unique_ptr<Backend> backend = make_cpu_backend(GetParam());

 private:
  std::uint64_t version_ = 0;
};

void RnnKernels::check(const LayerCase& layer) {
  SCOPED_TRACE(layer.text());
  const Sizes& s = layer.sizes;
  const RnnWeights weights = weights_for(layer);
  const RnnOptions options = options_for(layer);
  const Tensor x = with_padding(layer, random({s.batch, s.steps, s.inputs}, 5), std::nanf(""));
  const Tensor dy = with_padding(layer, random({s.batch, s.steps, s.width}, 6), std::nanf(""));
  const RnnState from = state_for(layer);
  const Reference expected(layer, x, weights, from, dy);
  const Tensor y = unset(dy.shape()), dx = unset(x.shape());
  RnnState to = {unset({s.batch, s.width}), {}};
  if (layer.cell == RnnCell::kLstm) to.c = unset({s.batch, s.width});
  nn::RnnKernels& rnn = backend->rnn();
  // Without what backward needs, the same.
  EXPECT_FALSE(rnn.forward(options, x, weights, from, y, to, false).defined());
  expect_close(expected.y, y, "y of evaluation");
  const auto evaluated = values_of(y);
  const Tensor kept = rnn.forward(options, x, weights, from, y, to, true);
  EXPECT_EQ(values_of(y), evaluated);
  expect_close(expected.h, to.h, "h");
  if (to.c.defined()) expect_close(expected.c, to.c, "c");
  const auto fresh = [&](float value) {
    RnnGradients gradients;
    gradients.w_ih = unset(weights.w_ih.shape());
    gradients.w_hh = unset(weights.w_hh.shape());
    if (layer.bias) gradients.b_ih = unset({layer.gates()});
    if (layer.bias) gradients.b_hh = unset({layer.gates()});
    if (value == 0.0f) return gradients;
    gradients.accumulate = {true, true, true, true};
    for (const Tensor* const g : {&gradients.w_ih, &gradients.w_hh, &gradients.b_ih, &gradients.b_hh})
      if (g->defined()) backend->pointwise().fill(*g, value);
    return gradients;
  };
  const auto expect_gradients = [&](const RnnGradients& gradients, double added) {
    expect_close(expected.dw_ih, gradients.w_ih, "dw_ih", added);
    expect_close(expected.dw_hh, gradients.w_hh, "dw_hh", added);
    if (!layer.bias) return;
    expect_close(expected.db_ih, gradients.b_ih, "db_ih", added);
    expect_close(expected.db_hh, gradients.b_hh, "db_hh", added);
  };
  const RnnGradients gradients = fresh(0.0f), more = fresh(0.5f);
  rnn.backward(options, x, weights, from, y, kept, dy, gradients, dx, [] {});
  expect_gradients(gradients, 0.0);
  expect_close(expected.dx, dx, "dx");
  const Tensor again = rnn.forward(options, x, weights, from, y, {}, true);
  rnn.backward(options, x, weights, from, y, again, dy, more, Tensor(), [] {});
  expect_gradients(more, 0.5);
}

constexpr RnnCell kCells[] = {RnnCell::kTanh, RnnCell::kRelu, RnnCell::kLstm, RnnCell::kGru};

TEST_P(RnnKernels, MatchAPlainLoop) {
  for (const RnnCell cell : kCells)
    for (const Sizes& s : kLayerSizes)
      for (const bool begins : {false, true}) check({.sizes = s, .cell = cell, .begins = begins});
}

TEST_P(RnnKernels, ReadBothWaysAndSequencesOfAnyLength) {
  for (const RnnCell cell : kCells)
    for (const Sizes& s : kLayerSizes)
      for (const bool begins : {false, true})
        for (const auto& [reverse, ragged] : {std::pair{true, false}, {false, true}, {true, true}})
          check({.sizes = s, .cell = cell, .begins = begins, .reverse = reverse, .ragged = ragged});
}

TEST_P(RnnKernels, NeedNoBiases) {
  for (const RnnCell cell : kCells)
    for (const bool ragged : {false, true})
      check({.sizes = {3, 4, 5, 33}, .cell = cell, .begins = true, .ragged = ragged, .bias = false});
}

// Lengths that no sequence has are those that are nearest.
TEST_P(RnnKernels, CutLengthsThatAreNone) {
  const LayerCase layer = {.sizes = {2, 3, 4, 5}, .cell = RnnCell::kGru};
  const RnnWeights weights = weights_for(layer);
  const Tensor x = random({2, 3, 4}, 5), y = unset({2, 3, 5}), whole = unset({2, 3, 5});
  backend->rnn().forward({.cell = layer.cell}, x, weights, {}, whole, {}, false);
  const Tensor lengths = backend->empty({2}, DType::kI32);
  lengths.data<std::int32_t>()[0] = 1000000;
  lengths.data<std::int32_t>()[1] = -7;
  backend->rnn().forward({.cell = layer.cell, .lengths = lengths}, x, weights, {}, y, {}, false);
  for (std::int64_t i = 0; i < y.count(); ++i) EXPECT_EQ(y.f32()[i], i < 15 ? whole.f32()[i] : 0.0f) << i;
}

// What nobody wants is left out, and the rest is the same.
TEST_P(RnnKernels, ComputeTheGradientsThatAreWanted) {
  for (const RnnCell cell : kCells) {
    const LayerCase layer = {.sizes = {3, 4, 5, 33}, .cell = cell};
    SCOPED_TRACE(layer.text());
    const Sizes& s = layer.sizes;
    const RnnWeights weights = weights_for(layer);
    const Tensor x = random({s.batch, s.steps, s.inputs}, 5), dy = random({s.batch, s.steps, s.width}, 6);
    const Reference expected(layer, x, weights, {}, dy);
    for (int wanted = 0; wanted < 32; ++wanted) {
      const Tensor y = unset(dy.shape());
      const Tensor kept = backend->rnn().forward({.cell = cell}, x, weights, {}, y, {}, true);
      RnnGradients gradients;
      if (wanted & 1) gradients.w_ih = unset(weights.w_ih.shape());
      if (wanted & 2) gradients.w_hh = unset(weights.w_hh.shape());
      if (wanted & 4) gradients.b_ih = unset({layer.gates()});
      if (wanted & 8) gradients.b_hh = unset({layer.gates()});
      const Tensor dx = wanted & 16 ? unset(x.shape()) : Tensor();
      backend->rnn().backward({.cell = cell}, x, weights, {}, y, kept, dy, gradients, dx, [] {});
      if (wanted & 1) expect_close(expected.dw_ih, gradients.w_ih, "dw_ih");
      if (wanted & 2) expect_close(expected.dw_hh, gradients.w_hh, "dw_hh");
      if (wanted & 4) expect_close(expected.db_ih, gradients.b_ih, "db_ih");
      if (wanted & 8) expect_close(expected.db_hh, gradients.b_hh, "db_hh");
      if (wanted & 16) expect_close(expected.dx, dx, "dx");
    }
  }
}

// A sequence in pieces, each from the state that the one before has left.
TEST_P(RnnKernels, ContinueFromTheirState) {
  for (const RnnCell cell : kCells)
    for (const Sizes& s : {Sizes{2, 7, 5, 19}, {1, 4, 3, 64}}) {
      const RnnWeights weights = weights_for({.sizes = s, .cell = cell});
      const RnnOptions options = {.cell = cell};
      const Tensor x = random({s.batch, s.steps, s.inputs}, 5), whole = unset({s.batch, s.steps, s.width});
      backend->rnn().forward(options, x, weights, {}, whole, {}, false);
      for (const std::vector<std::int64_t>& pieces :
           {std::vector<std::int64_t>{s.steps - 1, 1}, {1, s.steps - 1}, std::vector<std::int64_t>(at(s.steps), 1)}) {
        RnnState state;
        std::int64_t begin = 0;
        for (const std::int64_t count : pieces) {
          const Tensor part = unset({s.batch, count, s.inputs}), y = unset({s.batch, count, s.width});
          for (std::int64_t b = 0; b < s.batch; ++b)
            std::copy_n(x.f32() + (b * s.steps + begin) * s.inputs, count * s.inputs,
                        part.f32() + b * count * s.inputs);
          RnnState next = {unset({s.batch, s.width}), {}};
          if (cell == RnnCell::kLstm) next.c = unset({s.batch, s.width});
          backend->rnn().forward(options, part, weights, state, y, next, false);
          for (std::int64_t b = 0; b < s.batch; ++b)
            for (std::int64_t i = 0; i < count * s.width; ++i) {
              const float expected = whole.f32()[(b * s.steps + begin) * s.width + i];
              ASSERT_NEAR(expected, y.f32()[b * count * s.width + i], 1e-6f * std::max(1.0f, std::abs(expected)));
            }
          state = next;
          begin += count;
        }
      }
    }
}

// Packed weights are those of the version.
TEST_P(RnnKernels, FollowTheirWeights) {
  for (const RnnCell cell : kCells) {
    const LayerCase layer = {.sizes = {2, 3, 4, 40}, .cell = cell};
    const Sizes& s = layer.sizes;
    RnnWeights weights = weights_for(layer);
    const Tensor x = random({s.batch, s.steps, s.inputs}, 5), dy = random({s.batch, s.steps, s.width}, 6);
    for (int round = 0; round < 3; ++round) {
      const Reference expected(layer, x, weights, {}, dy);
      const Tensor y = unset(dy.shape()), dx = unset(x.shape());
      const Tensor kept = backend->rnn().forward({.cell = cell}, x, weights, {}, y, {}, true);
      backend->rnn().backward({.cell = cell}, x, weights, {}, y, kept, dy, {}, dx, [] {});
      expect_close(expected.y, y, "y");
      expect_close(expected.dx, dx, "dx");
      const Tensor other = random(weights.w_hh.shape(), static_cast<std::uint64_t>(10 + round));
      for (float& v : other.span<float>()) v *= 0.2f;
      backend->pointwise().copy(other, weights.w_hh);
      ++weights.versions[1];
    }
  }
}

void expect_same_bits_on_any_threads(RnnCell cell, DType dtype) {
  SCOPED_TRACE(fmt::format("{} in {}", name_of(cell), name_of(dtype)));
  const Sizes s = {5, 6, 40, 130};
  const std::int64_t gates = gates_of(cell) * s.width;
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3}) {
    const auto backend = make_cpu_backend(threads);
    const auto random = [&](const Shape& shape, std::uint64_t seed) {
      const Tensor made = backend->empty(shape, dtype);
      backend->pointwise().cast(random_tensor(*backend, shape, seed), made);
      return made;
    };
    const RnnWeights weights = {.w_ih = random({gates, s.inputs}, 1),
                                .w_hh = random({gates, s.width}, 2),
                                .b_ih = random({gates}, 3),
                                .b_hh = random({gates}, 4),
                                .versions = {1, 2, 3, 4}};
    // The product over all steps is oneDNN's, whose sums may be cut by threads: without inputs it adds nothing.
    const Tensor x = backend->empty({s.batch, s.steps, s.inputs}, dtype);
    backend->pointwise().fill(x, 0.0f);
    const Tensor y = backend->empty({s.batch, s.steps, s.width}, dtype), y_f32 = backend->empty(y.shape());
    const Tensor kept = backend->rnn().forward({.cell = cell}, x, weights, {}, y, {}, true);
    backend->pointwise().cast(y, y_f32);
    std::vector<float> all = values_of(y_f32);
    RnnGradients gradients;
    gradients.b_ih = backend->empty({gates});
    backend->rnn().backward({.cell = cell}, x, weights, {}, y, kept, random(y.shape(), 6), gradients, Tensor(), [] {});
    const auto db = values_of(gradients.b_ih);
    all.insert(all.end(), db.begin(), db.end());
    results.push_back(std::move(all));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(RnnThreads, DoNotChangeTheNumbers) {
  for (const RnnCell cell : kCells) expect_same_bits_on_any_threads(cell, DType::kF32);
  if (!make_cpu_backend(1)->computes_in(DType::kBF16)) return;
  for (const RnnCell cell : kCells) expect_same_bits_on_any_threads(cell, DType::kBF16);
}

TEST_P(RnnKernels, KeepNaN) {
  for (const RnnCell cell : kCells) {
    const Sizes s = {2, 3, 4, 5};
    const RnnWeights weights = weights_for({.sizes = s, .cell = cell});
    const Tensor x = random({s.batch, s.steps, s.inputs}, 5), y = unset({s.batch, s.steps, s.width});
    x.f32()[s.inputs] = std::nanf("");  // of the first sample's second step
    backend->rnn().forward({.cell = cell}, x, weights, {}, y, {}, false);
    for (std::int64_t i = 0; i < y.count(); ++i)
      EXPECT_EQ(std::isnan(y.f32()[i]), i >= s.width && i < s.steps * s.width) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, RnnKernels, ::testing::Values(1, 2));

// The product of a step reads the gates' gradients as the products over all steps do: rounded. Biases get their sums
// before that.
TEST(RnnBf16, StepsMultiplyRoundedGradients) {
  const auto backend = make_cpu_backend(1);
  if (!backend->computes_in(DType::kBF16)) GTEST_SKIP() << "no AVX-512";
  const auto number = [&](const Shape& shape, std::vector<float> values) {
    const Tensor made = backend->empty(shape, DType::kBF16);
    backend->pointwise().cast(tensor_of(*backend, shape, values), made);
    return made;
  };
  const RnnWeights weights = {.w_ih = number({1, 1}, {1}),
                              .w_hh = number({1, 1}, {1}),
                              .b_ih = number({1}, {0}),
                              .b_hh = number({1}, {0}),
                              .versions = {1, 2, 3, 4}};
  const Tensor x = number({1, 2, 1}, {0.0f, 0.7f}), dy = number({1, 2, 1}, {0.0f, 1.0f});
  const Tensor y = backend->empty(x.shape(), DType::kBF16), db = backend->empty({1});
  const Tensor kept = backend->rnn().forward({.cell = RnnCell::kTanh}, x, weights, {}, y, {}, true);
  RnnGradients gradients;
  gradients.b_ih = db;
  backend->rnn().backward({.cell = RnnCell::kTanh}, x, weights, {}, y, kept, dy, gradients, Tensor(), [] {});
  const float h = y.data<BFloat16>()[1].to_float(), second = 1.0f - h * h;
  const float rounded = BFloat16::from_float(second).to_float();
  ASSERT_NE(second, rounded);
  // The first step's h is 0, where the slope is 1.
  EXPECT_EQ(db.f32()[0], second + (cpu::multiplies_pairs() ? rounded : second));
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

}  // namespace
}  // namespace lockstep::nn
