// CUDA's recurrent layers against the CPU's. In software cuDNN's layers are plain loops
// (tests/soft_cuda/cudnn_rnn.cpp), whose weights lie otherwise than parameters do.
#include <bit>

#include "base/error.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct LayerSizes {
  std::int64_t batch, steps, inputs, width;

  Shape x() const { return {batch, steps, inputs}; }
  Shape y() const { return {batch, steps, width}; }
  Shape state() const { return {batch, width}; }
  std::string text() const { return fmt::format("[{}, {}, {}] to {}", batch, steps, inputs, width); }
};
const LayerSizes kLayerSizes[] = {{1, 1, 1, 1},  {2, 3, 5, 7},   {3, 4, 6, 16},
                                  {1, 6, 9, 33}, {8, 2, 16, 32}, {0, 3, 5, 8}};

// What a test asks of a layer.
struct LayerCase {
  LayerSizes sizes;
  RnnCell cell = RnnCell::kLstm;
  bool begins = false, reverse = false, ragged = false;

  std::int64_t gates() const { return gates_of(cell) * sizes.width; }
  bool hands_out_cells() const { return cell == RnnCell::kLstm && !ragged; }
  std::string text() const {
    return fmt::format("{} {} {}{}{}{}", name_of(cell), static_cast<int>(cell), sizes.text(),
                       begins ? ", with a state" : "", reverse ? ", reverse" : "", ragged ? ", ragged" : "");
  }
};

// Of three choices and a fourth, which is made where an odd number of them is, eight calls have each triple of them.
bool fourth_of(const LayerCase& layer) { return (layer.begins != layer.reverse) != layer.ragged; }

// All cells and sizes, both ways, with lengths and without. A GPU takes 10 ms a call, most of it to start what cuDNN
// starts, so not all with all: of one size each cell has all eight combinations, of the other sizes one and the one
// that is its opposite in all three, another one from size to size. ReLU, which is cuDNN's tanh with another function,
// and arrays that are not aligned, which are copied before cuDNN sees them, have one of each.
std::vector<LayerCase> layer_cases(bool aligned) {
  constexpr std::size_t kThorough = 1;
  const RnnCell cells[] = {RnnCell::kTanh, RnnCell::kRelu, RnnCell::kLstm, RnnCell::kGru};
  std::vector<LayerCase> all;
  for (std::size_t c = 0; c < std::size(cells); ++c)
    for (std::size_t s = 0; s < std::size(kLayerSizes); ++s) {
      const std::size_t first = (s + 3 * c) % 8;
      std::vector<std::size_t> combinations = {first};
      if (aligned && cells[c] != RnnCell::kRelu) {
        if (s == kThorough)
          combinations = {0, 1, 2, 3, 4, 5, 6, 7};
        else
          combinations.push_back(7 - first);
      }
      for (const std::size_t flags : combinations)
        all.push_back({kLayerSizes[s], cells[c], (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0});
    }
  return all;
}

// Kernels for all tests: one handle of cuDNN, and one plan for each layer.
struct SharedKernels {
  CudaStream stream;
  CachingAllocator allocator{std::make_unique<DeviceMemory>()};
  cuda::Context context{.device = 0, .stream = stream.view(), .allocator = allocator};
  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
  std::unique_ptr<RnnKernels> rnn = cuda::make_rnn_kernels(context, *pointwise);
};

// They run in a stream of their own, after what the caller's has to do, and before what it gets next.
class RnnKernelsBetween final : public RnnKernels {
 public:
  RnnKernelsBetween(SharedKernels& shared, const CudaStream& caller) : shared_(shared), caller_(caller) {}

  Tensor forward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                 const Tensor& y, const RnnState& to, bool keep) override {
    caller_.synchronize();
    Tensor kept = shared_.rnn->forward(options, x, weights, from, y, to, keep);
    shared_.stream.synchronize();
    return kept;
  }
  void backward(const RnnOptions& options, const Tensor& x, const RnnWeights& weights, const RnnState& from,
                const Tensor& y, const Tensor& kept, const Tensor& dy, const RnnGradients& gradients, const Tensor& dx,
                FunctionRef<void()> gradients_done) override {
    caller_.synchronize();
    shared_.rnn->backward(options, x, weights, from, y, kept, dy, gradients, dx, gradients_done);
    shared_.stream.synchronize();
  }
  bool hands_out_cells_of_lengths() const override { return shared_.rnn->hands_out_cells_of_lengths(); }

 private:
  SharedKernels& shared_;
  const CudaStream& caller_;
};

class CudaRnn : public DeviceTest {
 public:
  static void SetUpTestSuite() { shared_ = std::make_unique<SharedKernels>(); }
  static void TearDownTestSuite() { shared_.reset(); }

 protected:
  bool aligned() const { return GetParam().offset == 0; }
  RnnWeights weights_for(const LayerCase& layer) {
    const auto shrunk = [&](const Shape& shape, std::uint64_t seed) {
      const Tensor made = random(shape, seed);
      for (float& v : made.span<float>()) v *= 0.25f;
      return rounded(made);
    };
    return {.w_ih = shrunk({layer.gates(), layer.sizes.inputs}, 1),
            .w_hh = shrunk({layer.gates(), layer.sizes.width}, 2),
            .b_ih = shrunk({layer.gates()}, 3),
            .b_hh = shrunk({layer.gates()}, 4),
            .versions = next_versions()};
  }
  RnnWeights on_device_of(const RnnWeights& host) {
    return {.w_ih = activation(host.w_ih),
            .w_hh = activation(host.w_hh),
            .b_ih = activation(host.b_ih),
            .b_hh = activation(host.b_hh),
            .versions = next_versions()};
  }
  Both<RnnState> state_for(const LayerCase& layer) {
    const Operand h = activations(layer.begins ? random(layer.sizes.state(), 6) : Tensor());
    const Operand c =
        activations(layer.begins && layer.cell == RnnCell::kLstm ? random(layer.sizes.state(), 7) : Tensor());
    return {{h.host, c.host}, {h.device, c.device}};
  }
  // Lengths from none to all steps.
  Both<RnnOptions> options_for(const LayerCase& layer) {
    RnnOptions options = {.cell = layer.cell, .reverse = layer.reverse};
    if (!layer.ragged) return {options, options};
    options.lengths = cpu->empty({layer.sizes.batch}, DType::kI32);
    for (std::int64_t b = 0; b < layer.sizes.batch; ++b)
      options.lengths.data<std::int32_t>()[b] =
          static_cast<std::int32_t>((b * 5 + layer.sizes.steps) % (layer.sizes.steps + 1));
    RnnOptions device = options;
    device.lengths = plain(options.lengths);
    return {options, device};
  }
  struct Operands {
    Both<RnnWeights> weights;
    Both<RnnOptions> options;
    Both<RnnState> from;
    Operand x, dy;
  };
  Operands operands_for(const LayerCase& layer) {
    const RnnWeights weights = weights_for(layer);
    return {{weights, on_device_of(weights)},
            options_for(layer),
            state_for(layer),
            activations(random(layer.sizes.x(), 5)),
            activations(random(layer.sizes.y(), 8))};
  }
  std::array<std::uint64_t, 4> next_versions() {
    std::array<std::uint64_t, 4> versions{};
    for (auto& version : versions) version = ++version_;
    return versions;
  }
  // The state within a layer is rounded from step to step, and in 16 bits so are what cuDNN's products read and make.
  Tolerance tolerance(double scale = 1.0) const {
    return {type(), is_half(type()) ? 0x1.8p16 * finer_than_bf16(type()) : 128.0, scale};
  }

  // At least 1: of sums.
  static double largest_in(const Tensor& sums) {
    double largest = 1.0;
    for (const float v : sums.span<float>()) largest = std::max(largest, std::abs(static_cast<double>(v)));
    return largest;
  }

  std::unique_ptr<RnnKernels> rnn = std::make_unique<RnnKernelsBetween>(*shared_, stream);

 private:
  static inline std::unique_ptr<SharedKernels> shared_;
  static inline std::uint64_t version_ = 0;  // the kernels keep weights from test to test
};

TEST_P(CudaRnn, Forward) {
  for (const LayerCase& layer : layer_cases(aligned())) {
    SCOPED_TRACE(layer.text());
    const bool keep = fourth_of(layer), cells = layer.hands_out_cells();
    const LayerSizes& s = layer.sizes;
    const Operands of = operands_for(layer);
    const std::vector<Tolerance> tolerances(s.batch == 0 ? 1 : cells ? 3 : 2, tolerance());
    compare(cpu->rnn(), *rnn, {activation_like(s.y()), activation_like(s.state()), activation_like(s.state())},
            tolerances, [&](auto& on, Side at, const auto& out) {
              const Tensor kept = on.forward(at(of.options), at(of.x), at(of.weights), at(of.from), out[0],
                                             {out[1], cells ? out[2] : Tensor()}, keep && at.on_device);
              EXPECT_EQ(kept.defined(), keep && at.on_device);
            });
  }
}

TEST_P(CudaRnn, Backward) {
  for (const LayerCase& layer : layer_cases(aligned())) {
    SCOPED_TRACE(layer.text());
    const bool accumulate = fourth_of(layer);
    const LayerSizes& s = layer.sizes;
    const Operands of = operands_for(layer);
    const RnnWeights& w = of.weights.host;
    std::vector<Output> outputs;
    for (const Tensor& weight : {w.w_ih, w.w_hh, w.b_ih, w.b_hh})
      outputs.push_back({weight.shape(), DType::kF32, random_tensor(*cpu, weight.shape(), 9)});
    outputs.push_back(activation_like(s.x()));
    const auto both = compare(cpu->rnn(), *rnn, outputs, {}, [&](auto& on, Side at, const auto& out) {
      const Tensor y = at.on_device ? activation(cpu->zeros(s.y())) : cpu->empty(s.y());
      const Tensor kept = on.forward(at(of.options), at(of.x), at(of.weights), at(of.from), y, {}, true);
      if (!at.on_device) rounded(y);
      on.backward(at(of.options), at(of.x), at(of.weights), at(of.from), y, kept, at(of.dy),
                  {out[0], out[1], out[2], out[3], {accumulate, accumulate, accumulate, accumulate}}, out[4], [] {});
    });
    for (std::size_t i = 0; i < 5; ++i)
      expect_close(both.expected[i], both.got[i], i < 4 ? tolerance(largest_in(both.expected[i])) : tolerance());
  }
}

// Both in bf16: what either rounds is within the roundings of the other.
TEST_P(CudaRnn, IsNearTheCpuInBf16) {
  if (type() != DType::kBF16 || !cpu->computes_in(type())) GTEST_SKIP() << "the CPU computes in " << name_of(type());
  const auto halved = [&](const Tensor& x) {
    if (!x.defined()) return Tensor();
    const Tensor made = cpu->empty(x.shape(), type());
    cpu->pointwise().cast(x, made);
    return made;
  };
  for (const LayerCase& layer : layer_cases(aligned())) {
    SCOPED_TRACE(layer.text());
    const LayerSizes& s = layer.sizes;
    Operands of = operands_for(layer);
    for (Tensor* const host : {&of.weights.host.w_ih, &of.weights.host.w_hh, &of.weights.host.b_ih,
                               &of.weights.host.b_hh, &of.from.host.h, &of.from.host.c, &of.x.host, &of.dy.host})
      *host = halved(*host);
    const auto both = compare(
        cpu->rnn(), *rnn, {activation_like(s.y()), activation_like(s.x()), {of.weights.host.w_hh.shape()}}, {},
        [&](auto& on, Side at, const auto& out) {
          const Tensor y = at.on_device ? out[0] : halved(cpu->zeros(s.y()));
          const Tensor dx = at.on_device ? out[1] : halved(cpu->zeros(s.x()));
          const Tensor kept = on.forward(at(of.options), at(of.x), at(of.weights), at(of.from), y, {}, true);
          RnnGradients gradients;
          gradients.w_hh = out[2];
          on.backward(at(of.options), at(of.x), at(of.weights), at(of.from), y, kept, at(of.dy), gradients, dx, [] {});
          if (at.on_device) return;
          cpu->pointwise().cast(y, out[0]);
          cpu->pointwise().cast(dx, out[1]);
        });
    expect_close(both.expected[0], both.got[0], tolerance());
    if (layer.cell == RnnCell::kRelu) continue;  // near 0 a rounding decides whether there is a gradient
    expect_close(both.expected[1], both.got[1], tolerance());
    expect_close(both.expected[2], both.got[2], tolerance(largest_in(both.expected[2])));
  }
}

// Padding may be anything.
TEST_P(CudaRnn, NobodyReadsPadding) {
  for (const RnnCell cell : {RnnCell::kTanh, RnnCell::kRelu, RnnCell::kLstm, RnnCell::kGru})
    for (const bool reverse : {false, true}) {
      if (!aligned() && cell != RnnCell::kLstm) continue;
      const LayerCase layer = {.sizes = {3, 4, 5, 6}, .cell = cell, .reverse = reverse, .ragged = true};
      SCOPED_TRACE(layer.text());
      const LayerSizes& s = layer.sizes;
      const RnnWeights device = on_device_of(weights_for(layer));
      const Both<RnnOptions> options = options_for(layer);
      const auto run = [&](float padding) {
        const auto padded = [&](const Tensor& made) {
          for (std::int64_t b = 0; b < s.batch; ++b)
            for (std::int64_t t = options.host.lengths.data<std::int32_t>()[b]; t < s.steps; ++t)
              std::fill_n(made.f32() + (b * s.steps + t) * made.size(2), made.size(2), padding);
          return activation(made);
        };
        const Tensor x = padded(random(s.x(), 5)), dy = padded(random(s.y(), 8));
        return results({activation_like(s.y()),
                        activation_like(s.x()),
                        {device.w_ih.shape()},
                        {device.w_hh.shape()},
                        {device.b_ih.shape()},
                        {device.b_hh.shape()}},
                       [&](const auto& out) {
                         const Tensor kept = rnn->forward(options.device, x, device, {}, out[0], {}, true);
                         rnn->backward(options.device, x, device, {}, out[0], kept, dy,
                                       {out[2], out[3], out[4], out[5]}, out[1], [] {});
                       });
      };
      const auto zeros = run(0.0f), others = run(kNaN);
      for (std::size_t i = 0; i < zeros.size(); ++i) {
        for (const float v : others[i].span<float>()) ASSERT_FALSE(std::isnan(v)) << i;
        expect_same(zeros[i], others[i]);
      }
    }
}

TEST_P(CudaRnn, NoBiases) {
  for (const RnnCell cell : {RnnCell::kTanh, RnnCell::kLstm, RnnCell::kGru}) {
    const LayerCase layer = {.sizes = {2, 3, 5, 7}, .cell = cell};
    SCOPED_TRACE(layer.text());
    const LayerSizes& s = layer.sizes;
    RnnWeights host = weights_for(layer), device = on_device_of(host);
    host.b_ih = host.b_hh = device.b_ih = device.b_hh = Tensor();
    const Operand x = activations(random(s.x(), 5));
    compare(cpu->rnn(), *rnn, {activation_like(s.y())}, {tolerance()}, [&](auto& on, Side at, const auto& out) {
      on.forward({.cell = cell}, at(x), at.on_device ? device : host, {}, out[0], {}, at.on_device);
    });
  }
}

// What nobody wants is left out, and the rest is the same: none, one, and all but one.
TEST_P(CudaRnn, BackwardOfWhatIsWanted) {
  const LayerCase layer = {.sizes = {2, 3, 5, 7}, .cell = RnnCell::kGru};
  const LayerSizes& s = layer.sizes;
  const RnnOptions options = {.cell = layer.cell};
  const RnnWeights host = weights_for(layer), device = on_device_of(host);
  const Tensor x = activation(random(s.x(), 5)), dy = activation(random(s.y(), 8)), y = activation(cpu->zeros(s.y()));
  const Shape shapes[] = {host.w_ih.shape(), host.w_hh.shape(), host.b_ih.shape(), host.b_hh.shape(), s.x()};
  std::vector<Output> outputs;
  for (int i = 0; i < 4; ++i) outputs.push_back({shapes[i]});
  outputs.push_back(activation_like(s.x()));
  const auto run = [&](int wanted) {
    return results(outputs, [&](const auto& out) {
      const auto if_wanted = [&](int i) { return wanted >> i & 1 ? out[static_cast<std::size_t>(i)] : Tensor(); };
      const Tensor kept = rnn->forward(options, x, device, {}, y, {}, true);
      rnn->backward(options, x, device, {}, y, kept, dy, {if_wanted(0), if_wanted(1), if_wanted(2), if_wanted(3)},
                    if_wanted(4), [] {});
    });
  };
  const auto all = run(31);
  for (int wanted = 0; wanted < 31; ++wanted) {
    if (const int count = std::popcount(static_cast<unsigned>(wanted)); count > 1 && count < 4) continue;
    SCOPED_TRACE(wanted);
    const auto got = run(wanted);
    for (std::size_t i = 0; i < got.size(); ++i)
      if (wanted >> i & 1) expect_same(all[i], got[i]);
  }
}

// Evaluation keeps its copy of the weights until one of them changes; training copies each time.
TEST_P(CudaRnn, FollowsItsWeights) {
  const LayerCase layer = {.sizes = {2, 3, 5, 7}};
  const LayerSizes& s = layer.sizes;
  RnnWeights host = weights_for(layer), device = on_device_of(host);
  const Tensor x_host = random(s.x(), 5), x = activation(x_host);
  const auto expect_followed = [&](bool keep) {
    const Tensor expected = cpu->empty(s.y());
    host.versions = next_versions();
    cpu->rnn().forward({}, x_host, host, {}, expected, {}, false);
    const auto got =
        results({activation_like(s.y())}, [&](const auto& out) { rnn->forward({}, x, device, {}, out[0], {}, keep); });
    expect_close(expected, got[0], tolerance());
  };
  expect_followed(false);
  for (std::size_t i = 0; i < 4; ++i) {
    const Tensor* const hosts[] = {&host.w_ih, &host.w_hh, &host.b_ih, &host.b_hh};
    const Tensor* const devices[] = {&device.w_ih, &device.w_hh, &device.b_ih, &device.b_hh};
    for (const bool keep : {false, true}) {
      for (float& v : hosts[i]->span<float>()) v = -v;
      upload(*hosts[i], *devices[i]);
      if (!keep) ++device.versions[i];
      expect_followed(keep);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaRnn, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
