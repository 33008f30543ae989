// DataParallel over GPUs against one CPU: on the software devices, and on GPUs where there are two.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "base/splitmix.h"
#include "lockstep/base/device.h"
#include "lockstep/nn/losses/losses.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/data_parallel.h"
#include "tests/support/models.h"

namespace lockstep::parallel {
namespace {

constexpr std::int64_t kClasses = 10;

std::vector<float> download(nn::Backend& backend, const nn::Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.count()));
  backend.download(tensor, std::as_writable_bytes(std::span(values)));
  return values;
}

nn::Tensor random_tensor(nn::Backend& backend, const nn::Shape& shape, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>(SplitMix64::word(seed, i) % 2000) / 1000.0f - 1.0f;
  nn::Tensor made = backend.empty(shape);
  backend.upload(std::as_bytes(std::span(values)), made);
  return made;
}

nn::Tensor labels_for(nn::Backend& backend, std::int64_t count, std::uint64_t seed) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::int32_t>(SplitMix64::word(seed, i) % kClasses);
  nn::Tensor made = backend.empty({count}, DType::kI32);
  backend.upload(std::as_bytes(std::span(values)), made);
  return made;
}

// Parameters after a few steps of SGD on batches that do not come out even.
std::vector<std::vector<float>> trained(nn::Module& module, nn::Backend& backend, nn::Backend& where, float& loss) {
  nn::Tape tape(backend);
  const auto parameters = module.named_parameters();
  const auto optimizer = nn::make_sgd(parameters, {.momentum = 0.9});
  std::vector<std::size_t> all(parameters.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  std::uint64_t step = 0;
  for (const std::int64_t count : {5, 1, 8, 3}) {
    ++step;
    for (const auto& [name, parameter] : parameters) parameter->clear_grad();
    const nn::Tensor x = random_tensor(where, {count, 8, 8, 1}, step);
    auto* const several = dynamic_cast<DataParallel*>(&module);
    const nn::Tensor labels = labels_for(backend, count, step + 100);
    const float scale = 1.0f / static_cast<float>(count);
    nn::Loss found;
    if (several != nullptr && step % 2 == 1) {
      found = nn::cross_entropy(tape, several->forward(tape, x, where), labels, scale);
    } else {  // several devices compute the loss where they are
      const nn::Var here = tape.input(nn::to_device(backend, x, where));
      found = module.forward_loss(tape, here, labels, nn::make_loss(), scale);
    }
    loss = download(backend, found.totals())[0];
    tape.backward(found.value);
    optimizer->begin_step(0.05);
    optimizer->update(all);
    tape.reset();
  }
  std::vector<std::vector<float>> values;
  for (const auto& [name, parameter] : parameters) values.push_back(download(parameter->backend(), parameter->value()));
  return values;
}

TEST(CudaDataParallel, TrainsAsOneCpu) {
  if (probe_cuda().devices < 2) GTEST_SKIP() << "one GPU only";
  for (const char* name : {"mlp", "cnn", "lstm"}) {
    const nn::ModelSpec spec = {
        .name = name,
        .sample_shape = {8, 8, 1},
        .classes = kClasses,
        .settings = testing::settings_of(name, {{"hidden", {16, 12}}, {"layers", 1}, {"width", 12}})};
    const auto build = [&](nn::Backend& backend) {
      nn::Generator generator(1);
      nn::Context context{backend, generator};
      return nn::make_model(context, spec);
    };
    const auto cpu = nn::make_cpu_backend(1);
    const auto alone = build(*cpu);
    float wanted_loss = 0;
    const auto wanted = trained(*alone, *cpu, *cpu, wanted_loss);
    struct Choice {
      std::vector<int> ids;
      int output, where;
    };
    for (const Choice& choice : {Choice{{0, 1}, 0, 0}, Choice{{1, 0}, 1, 0}, Choice{{1}, 0, 1}, Choice{{0, 1}, 1, 1}}) {
      Devices devices = Devices::cuda();
      DataParallel model(build(devices[choice.ids.front()]), devices, choice.ids, choice.output);
      float loss = 0;
      const auto got = trained(model, model.output_backend(), devices[choice.where], loss);
      EXPECT_NEAR(loss, wanted_loss, 1e-4f * std::abs(wanted_loss));
      ASSERT_EQ(got.size(), wanted.size());
      for (std::size_t p = 0; p < got.size(); ++p) {
        float largest = 0, difference = 0;
        for (std::size_t i = 0; i < got[p].size(); ++i) {
          largest = std::max(largest, std::abs(wanted[p][i]));
          difference = std::max(difference, std::abs(got[p][i] - wanted[p][i]));
        }
        EXPECT_LE(difference, 1e-4f * largest) << name << " parameter " << p;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::parallel
