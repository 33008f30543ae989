// CUDA's LSTM against the CPU's. In software cuDNN's layers are plain loops (tests/soft_cuda/cudnn_rnn.cpp), whose
// weights lie otherwise than parameters do.
#include "base/error.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

struct LstmSizes {
  std::int64_t batch, steps, inputs, width;

  Shape x() const { return {batch, steps, inputs}; }
  Shape y() const { return {batch, steps, width}; }
  Shape state() const { return {batch, width}; }
  std::string text() const { return fmt::format("[{}, {}, {}] to {}", batch, steps, inputs, width); }
};
const LstmSizes kLstmSizes[] = {{1, 1, 1, 1}, {2, 3, 5, 7}, {3, 4, 6, 16}, {1, 6, 9, 33}, {8, 2, 16, 32}, {0, 3, 5, 8}};

class CudaLstm : public DeviceTest {
 protected:
  LstmWeights weights_for(const LstmSizes& s) {
    const auto shrunk = [&](const Shape& shape, std::uint64_t seed) {
      const Tensor made = random(shape, seed);
      for (float& v : made.span<float>()) v *= 0.25f;
      return rounded(made);
    };
    return {.w_ih = shrunk({4 * s.width, s.inputs}, 1),
            .w_hh = shrunk({4 * s.width, s.width}, 2),
            .b_ih = shrunk({4 * s.width}, 3),
            .b_hh = shrunk({4 * s.width}, 4),
            .versions = next_versions()};
  }
  LstmWeights on_device_of(const LstmWeights& host) {
    return {.w_ih = activation(host.w_ih),
            .w_hh = activation(host.w_hh),
            .b_ih = activation(host.b_ih),
            .b_hh = activation(host.b_hh),
            .versions = next_versions()};
  }
  std::array<std::uint64_t, 4> next_versions() {
    std::array<std::uint64_t, 4> versions{};
    for (auto& version : versions) version = ++version_;
    return versions;
  }
  // The state within a layer is rounded from step to step, and in bf16 so are what cuDNN's products read and make.
  Tolerance tolerance(double scale = 1.0) const { return {type(), type() == DType::kBF16 ? 0x1.8p16 : 128.0, scale}; }

  std::unique_ptr<PointwiseKernels> pointwise = cuda::make_pointwise_kernels(context);
  std::unique_ptr<LstmKernels> lstm = cuda::make_lstm_kernels(context, *pointwise);

 private:
  std::uint64_t version_ = 0;
};

TEST_P(CudaLstm, Forward) {
  for (const LstmSizes& s : kLstmSizes)
    for (const bool begins : {false, true}) {
      SCOPED_TRACE(s.text());
      const LstmWeights host = weights_for(s), device = on_device_of(host);
      const Tensor x_host = random(s.x(), 5), x = activation(x_host);
      LstmState from_host, from;
      if (begins) {
        from_host = {random(s.state(), 6), random(s.state(), 7)};
        from = {activation(from_host.h), activation(from_host.c)};
      }
      const Tensor y = cpu->empty(s.y()), h = cpu->empty(s.state()), c = cpu->empty(s.state());
      cpu->lstm().forward(x_host, host, from_host, y, {h, c}, false);
      for (const bool keep : {false, true}) {
        const auto got = results({activation_like(s.y()), activation_like(s.state()), activation_like(s.state())},
                                 [&](const auto& out) {
                                   const Tensor kept = lstm->forward(x, device, from, out[0], {out[1], out[2]}, keep);
                                   EXPECT_EQ(kept.defined(), keep);
                                 });
        expect_close(y, got[0], tolerance());
        if (s.batch == 0) continue;
        expect_close(h, got[1], tolerance());
        expect_close(c, got[2], tolerance());
      }
    }
}

TEST_P(CudaLstm, Backward) {
  for (const LstmSizes& s : kLstmSizes)
    for (const bool begins : {false, true})
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(s.text());
        const LstmWeights host = weights_for(s), device = on_device_of(host);
        const Tensor x_host = random(s.x(), 5), x = activation(x_host), dy_host = random(s.y(), 8);
        const Tensor dy = activation(dy_host);
        LstmState from_host, from;
        if (begins) {
          from_host = {random(s.state(), 6), random(s.state(), 7)};
          from = {activation(from_host.h), activation(from_host.c)};
        }
        const Shape shapes[] = {host.w_ih.shape(), host.w_hh.shape(), host.b_ih.shape(), host.b_hh.shape()};
        std::vector<Tensor> first, wanted;
        for (const Shape& shape : shapes) {
          first.push_back(random_tensor(*cpu, shape, 9));
          wanted.push_back(cpu->empty(shape));
          cpu->pointwise().copy(first.back(), wanted.back());
        }
        const auto gradients_of = [&](const std::vector<Tensor>& t) {
          return LstmGradients{t[0], t[1], t[2], t[3], {accumulate, accumulate, accumulate, accumulate}};
        };
        const Tensor y_host = cpu->empty(s.y()), dx = cpu->empty(s.x());
        const Tensor kept = cpu->lstm().forward(x_host, host, from_host, y_host, {}, true);
        rounded(y_host);
        cpu->lstm().backward(x_host, host, from_host, y_host, kept, dy_host, gradients_of(wanted), dx, [] {});
        std::vector<Output> outputs;
        for (int i = 0; i < 4; ++i) outputs.push_back({shapes[i], DType::kF32, first[static_cast<std::size_t>(i)]});
        outputs.push_back(activation_like(s.x()));
        const auto got = results(outputs, [&](const auto& out) {
          const Tensor y = activation(cpu->zeros(s.y()));
          const Tensor reserve = lstm->forward(x, device, from, y, {}, true);
          lstm->backward(x, device, from, y, reserve, dy, gradients_of(out), out[4], [] {});
        });
        for (std::size_t i = 0; i < 4; ++i) {
          double scale = 1.0;
          for (const float v : wanted[i].span<float>()) scale = std::max(scale, std::abs(static_cast<double>(v)));
          expect_close(wanted[i], got[i], tolerance(scale));
        }
        expect_close(dx, got[4], tolerance());
      }
}

// What nobody wants is left out, and the rest is the same.
TEST_P(CudaLstm, BackwardOfWhatIsWanted) {
  const LstmSizes s = {2, 3, 5, 7};
  const LstmWeights host = weights_for(s), device = on_device_of(host);
  const Tensor x = activation(random(s.x(), 5)), dy = activation(random(s.y(), 8)), y = activation(cpu->zeros(s.y()));
  const Shape shapes[] = {host.w_ih.shape(), host.w_hh.shape(), host.b_ih.shape(), host.b_hh.shape(), s.x()};
  std::vector<Output> outputs;
  for (int i = 0; i < 4; ++i) outputs.push_back({shapes[i]});
  outputs.push_back(activation_like(s.x()));
  const auto run = [&](int wanted) {
    return results(outputs, [&](const auto& out) {
      const auto if_wanted = [&](int i) { return wanted >> i & 1 ? out[static_cast<std::size_t>(i)] : Tensor(); };
      const Tensor kept = lstm->forward(x, device, {}, y, {}, true);
      lstm->backward(x, device, {}, y, kept, dy, {if_wanted(0), if_wanted(1), if_wanted(2), if_wanted(3)}, if_wanted(4),
                     [] {});
    });
  };
  const auto all = run(31);
  for (int wanted = 0; wanted < 31; ++wanted) {
    SCOPED_TRACE(wanted);
    const auto got = run(wanted);
    for (std::size_t i = 0; i < got.size(); ++i)
      if (wanted >> i & 1) expect_same(all[i], got[i]);
  }
}

// Evaluation keeps its copy of the weights until one of them changes; training copies each time.
TEST_P(CudaLstm, FollowsItsWeights) {
  const LstmSizes s = {2, 3, 5, 7};
  LstmWeights host = weights_for(s), device = on_device_of(host);
  const Tensor x_host = random(s.x(), 5), x = activation(x_host);
  const auto expect_followed = [&](bool keep) {
    const Tensor expected = cpu->empty(s.y());
    host.versions = next_versions();
    cpu->lstm().forward(x_host, host, {}, expected, {}, false);
    const auto got =
        results({activation_like(s.y())}, [&](const auto& out) { lstm->forward(x, device, {}, out[0], {}, keep); });
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

INSTANTIATE_TEST_SUITE_P(Cases, CudaLstm, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
