#include "lockstep/nn/io/state.h"
#include "base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "base/hash.h"
#include "lockstep/nn/layers/layers.h"
#include "tests/nn/values.h"
#include "tests/support/temporary_directory.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;
using lockstep::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class State : public ::testing::Test {
 protected:
  std::unique_ptr<Sequential> model(std::uint64_t seed) {
    Generator generator(seed);
    Context context{*backend, generator};
    auto made = std::make_unique<Sequential>();
    made->then(std::make_unique<Conv2d>(context, 3, 2, Window{{1, 2}, {1, 1}, {0, 0}}))
        .then(std::make_unique<BatchNorm>(context, 2))
        .then(std::make_unique<Linear>(context, 2, 4));
    return made;
  }
  std::string refusal(Module& module, const std::vector<HostTensor>& tensors) {
    const std::string before = everything(module);
    try {
      load_state(module, tensors, "some/file");
    } catch (const UsageError& error) {
      EXPECT_EQ(everything(module), before) << "changed by a load that failed";
      return error.line();
    }
    ADD_FAILURE() << "loaded";
    return "";
  }
  static std::string everything(const Module& module) {
    Sha256 hash;
    for (const auto& tensor : state_of(module)) {
      hash.update(tensor.name);
      hash.update(tensor.bytes);
    }
    return hash.finish();
  }
  static std::vector<float> floats(const HostTensor& tensor) {
    std::vector<float> values(tensor.bytes.size() / sizeof(float));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(1);
};

TEST_F(State, NamesShapesAndOrder) {
  std::vector<std::string> lines;
  for (const auto& t : state_of(*model(1)))
    lines.push_back(fmt::format("{} {} {}", t.name, name_of(t.dtype), to_string(Shape(std::span(t.shape)))));
  EXPECT_THAT(lines, ElementsAre("0.weight f32 [2, 3, 1, 2]", "0.bias f32 [2]", "1.weight f32 [2]", "1.bias f32 [2]",
                                 "2.weight f32 [4, 2]", "2.bias f32 [4]", "1.running_mean f32 [2]",
                                 "1.running_var f32 [2]", "1.num_batches_tracked i64 []"));
}

TEST_F(State, ConvolutionWeightsAreOihwInFiles) {
  const auto m = model(1);
  const Tensor& w = m->named_parameters()[0].parameter->value();  // (O 2, H 1, W 2, I 3)
  for (std::int64_t i = 0; i < w.count(); ++i) w.f32()[i] = static_cast<float>(i);
  const auto state = state_of(*m);
  EXPECT_THAT(floats(state[0]), ElementsAre(0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11));
}

TEST_F(State, RoundTripThroughAFile) {
  const TemporaryDirectory dir;
  const auto a = model(1), b = model(2);
  *a->named_buffers()[2].tensor->data<std::int64_t>() = 77;
  a->named_buffers()[0].tensor->f32()[1] = 0.25f;
  ASSERT_NE(everything(*a), everything(*b));
  write_safetensors(dir.path("w"), state_of(*a));
  const auto version = b->named_parameters()[0].parameter->version();
  load_state(*b, read_safetensors(dir.path("w")), "w");
  EXPECT_EQ(everything(*a), everything(*b));
  EXPECT_EQ(values_of(a->named_parameters()[0].parameter->value()),
            values_of(b->named_parameters()[0].parameter->value()));
  EXPECT_NE(b->named_parameters()[0].parameter->version(), version) << "packed copies of the weights would stay";
}

TEST_F(State, WhatDoesNotFitIsListedTogether) {
  const auto m = model(1);
  auto state = state_of(*model(2));
  state[0].shape = {2, 1, 2, 3};  // OHWI in a file
  state[1].name = "module.0.bias";
  state[8].dtype = DType::kF64;
  state.push_back({"extra", DType::kF32, {1, 1, 1, 1, 1, 1, 1}, std::vector<std::byte>(4)});
  EXPECT_THAT(refusal(*m, state), AllOf(HasSubstr("some/file"), HasSubstr("missing \"0.bias\""),
                                        HasSubstr("unexpected \"module.0.bias\", \"extra\""),
                                        HasSubstr("0.weight is f32 [2, 1, 2, 3], not f32 [2, 3, 1, 2]"),
                                        HasSubstr("1.num_batches_tracked is f64 [], not i64 []")));
  state = state_of(*model(2));
  state[4].shape = {1, 1, 1, 1, 1, 4, 2};  // more dimensions than a tensor here can have
  EXPECT_THAT(refusal(*m, state), HasSubstr("2.weight is f32 [1, 1, 1, 1, 1, 4, 2], not f32 [4, 2]"));
  EXPECT_THAT(refusal(*m, {}), HasSubstr("missing \"0.weight\", \"0.bias\", \"1.weight\", \"1.bias\", \"2.weight\""));
}

// Set by hand, and hashed by hand: sha256 of names and little-endian f32 values, in name order and file layout.
TEST_F(State, Sha256OfParameters) {
  class Tiny final : public Module {
   public:
    explicit Tiny(Context& context)
        : conv_(register_module("conv", std::make_unique<Conv2d>(context, 2, 1, Window{{1, 2}, {1, 1}, {0, 0}}))),
          fc_(register_module("a", std::make_unique<Linear>(context, 2, 1, false))) {}
    Var forward(Tape& tape, Var x) override { return fc_.forward(tape, conv_.forward(tape, x)); }

   private:
    Conv2d& conv_;
    Linear& fc_;
  };
  Generator generator(1);
  Context context{*backend, generator};
  Tiny tiny(context);
  constexpr const char* kGolden = "7977b3950b14c467fe64b3708d64cbbc4457b632a41bdcf1a112687c978e8aa1";
  float next = 1.0f;
  for (const auto& [name, parameter] : tiny.named_parameters())  // conv.weight, conv.bias, a.weight
    for (float& v : parameter->value().span<float>()) v = next++;
  EXPECT_EQ(parameters_sha256(tiny), kGolden);
  tiny.named_parameters()[0].parameter->value().f32()[0] += 1.0f;
  EXPECT_NE(parameters_sha256(tiny), kGolden);
}

}  // namespace
}  // namespace lockstep::nn
