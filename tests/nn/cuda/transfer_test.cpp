#include "lockstep/nn/ops/transfer.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/base/device.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"
#include "tests/nn/uploads.h"

namespace lockstep::nn {
namespace {

using testing::download;
using testing::upload;

std::vector<float> counted(std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 0.25f);
  return values;
}

// Overwrites a tensor in the order of its device's work.
void clear(Backend& backend, const Tensor& tensor) {
  check_cuda(cudaSetDevice(backend.device().index), "choosing a GPU");
  check_cuda(cudaMemsetAsync(tensor.raw(), 0, tensor.bytes(), native(backend.stream())), "clearing");
}

TEST(Transfer, ToItselfIsTheSameTensor) {
  const auto gpu = make_cuda_backend({});
  const Tensor x = upload(*gpu, counted(5));
  EXPECT_EQ(to_device(*gpu, x, *gpu).raw(), x.raw());
}

// Errors for a program that confuses the devices of its tensors.
TEST(Transfer, OperandsOfAnotherDeviceAreRefused) {
  const auto cpu = make_cpu_backend(1);
  const auto gpu = make_cuda_backend({});
  EXPECT_TRUE(gpu->free_bytes().value_or(0) > 0);
  EXPECT_FALSE(cpu->free_bytes());
  Generator generator(1);
  Context on_gpu{*gpu, generator}, on_cpu{*cpu, generator};
  Linear there(on_gpu, 4, 3), here(on_cpu, 4, 3);
  Embedding table(on_cpu, 5, 4);
  Tape tape(*cpu), gpu_tape(*gpu);
  const Tensor x = upload(*cpu, counted(8)).reshaped({2, 4}), gpu_x = upload(*gpu, counted(8)).reshaped({2, 4});
  EXPECT_THROW(tape.input(gpu_x), UsageError);
  EXPECT_THROW(gpu_tape.input(x), UsageError);
  EXPECT_THROW(there.forward(tape, tape.input(x)), UsageError);
  EXPECT_THROW(here.forward(gpu_tape, gpu_tape.input(gpu_x)), UsageError);
  tape.set_recording(false);
  EXPECT_THROW(there.forward(tape, tape.input(x)), UsageError);
  const Var y = here.forward(tape, tape.input(x));
  EXPECT_THROW(cross_entropy(tape, y, gpu->empty({2}, DType::kI32), 1.0f), UsageError);
  EXPECT_THROW(squared_error(tape, y, gpu->empty({2, 3}), 1.0f), UsageError);
  EXPECT_THROW(embedding(tape, gpu->empty({2}, DType::kI32), table.weight()), UsageError);
  EXPECT_THROW(tape.backward(y, gpu->empty({2, 3})), UsageError);
}

TEST(Transfer, ToAGpuAndBackKeepsValuesShapeAndType) {
  const auto cpu = make_cpu_backend(1);
  const auto gpu = make_cuda_backend({});
  const Tensor x = upload(*cpu, counted(1200)).reshaped({3, 400});
  const Tensor there = to_device(*gpu, x, *cpu);
  EXPECT_EQ(there.shape(), x.shape());
  const Tensor back = to_device(*cpu, there, *gpu);
  EXPECT_EQ(back.shape(), x.shape());
  EXPECT_NE(back.raw(), x.raw());
  EXPECT_EQ(download(*cpu, back), counted(1200));

  const std::vector<std::int32_t> labels = {4, 5, 6};
  Tensor y = cpu->empty({3}, DType::kI32);
  cpu->upload(std::as_bytes(std::span(labels)), y);
  const Tensor y_back = to_device(*cpu, to_device(*gpu, y, *cpu), *gpu);
  EXPECT_EQ(y_back.dtype(), DType::kI32);
  EXPECT_EQ(y_back.span<std::int32_t>()[2], 6);
  EXPECT_EQ(values_of(*gpu, tensor_of(*gpu, {2, 3}, counted(6))), counted(6));
}

TEST(Transfer, BetweenTwoCpuBackendsIsACopy) {
  const auto one = make_cpu_backend(1), other = make_cpu_backend(1);
  const Tensor x = upload(*one, counted(9));
  const Tensor copy = to_device(*other, x, *one);
  EXPECT_NE(copy.raw(), x.raw());
  EXPECT_EQ(download(*other, copy), counted(9));
}

// Its state is what a model is moved by: parameters, buffers and their types, to the bit.
TEST(Transfer, AModelKeepsItsValuesOnItsWayToAGpuAndBack) {
  const auto cpu = make_cpu_backend(1);
  const auto gpu = make_cuda_backend({});
  const auto model_on = [](Backend& backend, std::uint64_t seed) {
    Generator generator(seed);
    Context context{backend, generator};
    return make_model(context, {.name = "resnet18-cifar", .sample_shape = {8, 8, 3}, .classes = 3});
  };
  const auto bytes_of = [](const std::vector<HostTensor>& state) {
    std::vector<std::byte> all;
    for (const auto& tensor : state) all.insert(all.end(), tensor.bytes.begin(), tensor.bytes.end());
    return all;
  };
  const auto from = model_on(*cpu, 1), there = model_on(*gpu, 2), back = model_on(*cpu, 3);
  *from->named_buffers()[2].tensor->data<std::int64_t>() = std::int64_t{1} << 40;
  const auto state = state_of(*from);
  ASSERT_NE(bytes_of(state_of(*there)), bytes_of(state));
  load_state(*there, state, "the CPU");
  EXPECT_EQ(bytes_of(state_of(*there)), bytes_of(state));
  load_state(*back, state_of(*there), "the GPU");
  EXPECT_EQ(bytes_of(state_of(*back)), bytes_of(state));
}

TEST(Transfer, EmptyTensors) {
  const auto cpu = make_cpu_backend(1);
  const auto gpu = make_cuda_backend({}), twin = make_cuda_backend({});
  const Tensor none = cpu->empty({0, 4});
  const Tensor there = to_device(*gpu, none, *cpu);
  EXPECT_EQ(to_device(*twin, there, *gpu).shape(), none.shape());
  EXPECT_EQ(to_device(*cpu, there, *gpu).shape(), none.shape());
}

void moves_in_order(Backend& source, Backend& target) {
  auto expected = counted(5000);
  expected[0] = -7;
  const auto made_late = [&] {
    Tensor x = upload(source, counted(5000));
    source.write(std::as_bytes(std::span(expected).first(1)), x);  // without waiting
    return x;
  };
  // What the source was given before is in the copy.
  const Tensor x = made_late();
  EXPECT_EQ(download(target, to_device(target, x, source)), expected);
  // What it is given afterwards is not.
  Tensor y = made_late();
  const Tensor made = to_device(target, y, source);
  clear(source, y);
  y = Tensor();  // its memory may be given out again
  const Tensor again = upload(source, std::vector<float>(5000, -1.0f));
  EXPECT_EQ(download(target, made), expected);
  EXPECT_EQ(download(source, again)[4999], -1.0f);
}

TEST(Transfer, BetweenTwoBackendsOfOneGpu) {
  const auto one = make_cuda_backend({}), other = make_cuda_backend({});
  moves_in_order(*one, *other);
}

TEST(Transfer, BetweenTwoGpus) {
  if (probe_cuda().devices < 2) GTEST_SKIP() << "one GPU only";
  const auto one = make_cuda_backend({.device = 0}), other = make_cuda_backend({.device = 1});
  EXPECT_EQ(to_string(other->device()), "cuda:1");
  moves_in_order(*one, *other);
  moves_in_order(*other, *one);
}

// One thread, two GPUs, alternating.
TEST(Transfer, TwoGpusKeepApart) {
  if (probe_cuda().devices < 2) GTEST_SKIP() << "one GPU only";
  const auto one = make_cuda_backend({.device = 0}), other = make_cuda_backend({.device = 1});
  const Tensor x = one->empty({4}), y = other->empty({4});
  for (float i = 0; i < 4; ++i) {
    const std::vector<float> a(4, i), b(4, -i);
    one->write(std::as_bytes(std::span(a)), x);
    other->write(std::as_bytes(std::span(b)), y);
    const Tensor fed_one = one->from_host(a.data(), {4}, DType::kF32);
    const Tensor fed_other = other->from_host(b.data(), {4}, DType::kF32);
    one->finish_inputs();
    other->finish_inputs();
    EXPECT_EQ(download(*one, x), a);
    EXPECT_EQ(download(*other, y), b);
    EXPECT_EQ(download(*one, fed_one), a);
    EXPECT_EQ(download(*other, fed_other), b);
  }
}

}  // namespace
}  // namespace lockstep::nn
