// Recurrent layers, and the models that are made of them.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "lockstep/nn/models/models.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

class RnnLayers : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend = make_cpu_backend(1);
  Generator generator{1};
  Context context{*backend, generator};
};

TEST_F(RnnLayers, HasPyTorchsNamesAndPrintsLikeIt) {
  const nn::Lstm two(context, 64, 128, {.num_layers = 2});
  EXPECT_EQ(to_string(two), "LSTM(64, 128, num_layers=2, batch_first=True)");
  EXPECT_EQ(to_string(nn::Lstm(context, 3, 5)), "LSTM(3, 5, batch_first=True)");
  EXPECT_EQ(to_string(nn::Lstm(context, 3, 5, {.num_layers = 3, .dropout = 0.25})),
            "LSTM(3, 5, num_layers=3, batch_first=True, dropout=0.25)");
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

TEST_F(RnnLayers, HaveParametersForBothDirections) {
  const nn::Gru both(context, 3, 5, {.num_layers = 2, .bidirectional = true});
  EXPECT_EQ(to_string(both), "GRU(3, 5, num_layers=2, batch_first=True, bidirectional=True)");
  EXPECT_EQ(to_string(nn::Rnn(context, 3, 5, {.bias = false, .batch_first = false})), "RNN(3, 5, bias=False)");
  std::vector<std::string> described;
  for (const auto& [name, parameter] : both.named_parameters())
    described.push_back(fmt::format("{} {}", name, to_string(parameter->value().shape())));
  EXPECT_EQ(described, (std::vector<std::string>{
                           "weight_ih_l0 [15, 3]", "weight_hh_l0 [15, 5]", "bias_ih_l0 [15]", "bias_hh_l0 [15]",
                           "weight_ih_l0_reverse [15, 3]", "weight_hh_l0_reverse [15, 5]", "bias_ih_l0_reverse [15]",
                           "bias_hh_l0_reverse [15]", "weight_ih_l1 [15, 10]", "weight_hh_l1 [15, 5]",
                           "bias_ih_l1 [15]", "bias_hh_l1 [15]", "weight_ih_l1_reverse [15, 10]",
                           "weight_hh_l1_reverse [15, 5]", "bias_ih_l1_reverse [15]", "bias_hh_l1_reverse [15]"}));
  EXPECT_EQ(nn::Rnn(context, 3, 5, {.num_layers = 2, .bias = false}).named_parameters().size(), 4u);
}

// Sequences of a batch are what each of them is without its padding, alone.
TEST_F(RnnLayers, SequencesMayHaveDifferentLengths) {
  const auto check = [&](Recurrent& layers, bool batch_first) {
    SCOPED_TRACE(to_string(layers));
    Tape tape(*backend);
    tape.set_recording(false);
    layers.train(false);
    const std::vector<std::int32_t> numbers = {4, 6, 0, 1};
    const Tensor lengths = backend->empty({4}, DType::kI32);
    std::ranges::copy(numbers, lengths.data<std::int32_t>());
    const Tensor x = random_tensor(*backend, {4, 6, 3}, 1);
    const auto count = static_cast<std::size_t>(layers.num_layers() * layers.num_directions());
    const bool lstm = layers.type_name() == "LSTM";
    std::vector<RnnState> states(count);
    const Var given = batch_first ? tape.input(x) : transpose(tape, tape.input(x), 0, 1);
    Var y = layers.forward(tape, given, states, lengths);
    EXPECT_EQ(values_of(Var(layers(tape, {given, tape.input(lengths)})).value()), values_of(y.value()));
    if (!batch_first) y = transpose(tape, y, 0, 1);
    const std::int64_t width = 5 * layers.num_directions();
    ASSERT_EQ(y.shape(), (Shape{4, 6, width}));
    for (std::int64_t n = 0; n < 4; ++n) {
      const std::int64_t length = numbers[static_cast<std::size_t>(n)];
      const float* const row = y.value().f32() + n * 6 * width;
      for (std::int64_t i = length * width; i < 6 * width; ++i) ASSERT_EQ(row[i], 0.0f) << n << ", " << i;
      std::vector<RnnState> own(count);
      if (length == 0) {
        for (RnnState& state : own) state.h = backend->zeros({1, 5});
        if (lstm)
          for (RnnState& state : own) state.c = backend->zeros({1, 5});
      } else {
        Var alone = tape.input(x.slice(n, n + 1).reshaped({6, 3}).slice(0, length).reshaped({1, length, 3}));
        if (!batch_first) alone = transpose(tape, alone, 0, 1);
        const Var expected = layers.forward(tape, alone, own);
        for (std::int64_t i = 0; i < length * width; ++i)
          ASSERT_NEAR(expected.value().f32()[i], row[i], 1e-6f) << n << ", " << i;
      }
      for (std::size_t l = 0; l < count; ++l)
        for (std::int64_t u = 0; u < 5; ++u) {
          ASSERT_NEAR(own[l].h.f32()[u], states[l].h.f32()[n * 5 + u], 1e-6f);
          ASSERT_EQ(states[l].c.defined(), lstm);
          if (lstm) {
            ASSERT_NEAR(own[l].c.f32()[u], states[l].c.f32()[n * 5 + u], 1e-6f);
          }
        }
    }
  };
  for (const bool bidirectional : {false, true})
    for (const bool batch_first : {false, true}) {
      const RecurrentOptions options = {
          .num_layers = 2, .batch_first = batch_first, .dropout = 0.5, .bidirectional = bidirectional};
      nn::Rnn plain(context, 3, 5, options);
      nn::Lstm lstm(context, 3, 5, options);
      nn::Gru gru(context, 3, 5, options);
      check(plain, batch_first);
      check(lstm, batch_first);
      check(gru, batch_first);
    }
}

// What is left in the end is the last layer's state, each direction's beside the other's.
TEST_F(RnnLayers, LeaveTheirLastState) {
  for (const bool bidirectional : {false, true}) {
    nn::Gru layers(context, 3, 5, {.num_layers = 2, .bidirectional = bidirectional});
    Tape tape(*backend);
    const Tensor x = random_tensor(*backend, {2, 4, 3}, 1);
    std::vector<RnnState> states(bidirectional ? 4 : 2);
    layers.forward(tape, tape.input(x), states);
    const Tensor last = layers.forward_last(tape, tape.input(x)).value();
    const std::int64_t directions = bidirectional ? 2 : 1;
    ASSERT_EQ(last.shape(), (Shape{2, 5 * directions}));
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t d = 0; d < directions; ++d)
        for (std::int64_t u = 0; u < 5; ++u)
          EXPECT_EQ(last.f32()[(n * directions + d) * 5 + u],
                    states[static_cast<std::size_t>(directions + d)].h.f32()[n * 5 + u]);
  }
}

// Two layers are one after the other; dropout is between them, in training alone.
TEST_F(RnnLayers, LayersFollowEachOther) {
  nn::Lstm layers(context, 3, 5, {.num_layers = 2, .dropout = 0.5, .drop_layer = 7});
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
      return RnnParameters{*all[first].parameter, *all[first + 1].parameter, all[first + 2].parameter,
                           all[first + 3].parameter};
    };
    Var y = rnn(tape, tape.input(x), parameters(0));
    if (training) y = dropout(tape, y, 0.5, 7);
    y = rnn(tape, y, parameters(4));
    EXPECT_EQ(values_of(layers.forward(tape, tape.input(x)).value()), values_of(y.value())) << training;
  }
}

TEST_F(RnnLayers, StatesCarryOver) {
  nn::Lstm layers(context, 3, 5, {.num_layers = 2});
  layers.train(false);
  const Tensor x = random_tensor(*backend, {1, 6, 3}, 1);
  Tape tape(*backend);
  tape.set_recording(false);
  const auto whole = values_of(layers.forward(tape, tape.input(x)).value());
  std::vector<RnnState> states(2);
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

TEST_F(RnnLayers, MismatchedShapesAreRefused) {
  nn::Lstm layer(context, 3, 5);
  Tape tape(*backend);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 3}))), UsageError);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 3, 4}))), UsageError);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 0, 3}))), UsageError);
  EXPECT_THROW(layer.forward(tape, tape.input(backend->empty({2, 1, 3}, DType::kI32))), UsageError);
  std::vector<RnnState> states = {{backend->zeros({3, 5}), backend->zeros({3, 5})}};
  EXPECT_THROW(layer.forward(tape, tape.input(backend->zeros({2, 1, 3})), states), UsageError);
  nn::Gru gru(context, 3, 5);
  const Var x = tape.input(backend->zeros({2, 1, 3}));
  states = {{backend->zeros({2, 5}), backend->zeros({2, 5})}};
  EXPECT_REFUSED("a GRU was given a state with c", gru.forward(tape, x, states));
  EXPECT_REFUSED("a GRU over [2, 1, 3] with lengths [3]", gru.forward(tape, x, {}, backend->empty({3}, DType::kI32)));
  EXPECT_REFUSED("lengths", gru.forward(tape, x, {}, backend->zeros({2})));
  EXPECT_REFUSED("3", gru(tape, {x, x, x}));
  nn::Rnn both(context, 3, 5, {.bidirectional = true});
  EXPECT_REFUSED("1 states for an RNN of 1 layers in two directions", both.forward(tape, x, states));
  const auto all = both.named_parameters();
  EXPECT_REFUSED("an LSTM with weights [5, 3] and [5, 5]",
                 rnn(tape, x, {*all[0].parameter, *all[1].parameter, all[2].parameter, all[3].parameter}));
  EXPECT_REFUSED("both biases or none",
                 rnn(tape, x, {*all[0].parameter, *all[1].parameter, all[2].parameter}, {.cell = RnnCell::kTanh}));
  EXPECT_REFUSED("[2, 1, 3] of f32 and [2, 2, 3] of f32", concat(tape, {x, tape.input(backend->zeros({2, 2, 3}))}, -1));
  EXPECT_REFUSED("a GRU of 1 layers with 0 features", nn::Gru(context, 3, 0));
}

class RnnModels : public RnnLayers {
 protected:
  // The tape outlives the models that the tests make.
  RnnModels() { tape.set_recording(false); }

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

TEST_F(RnnModels, OfTextHaveTheNamesOfPyTorchsExample) {
  const auto model = make_model(context, spec({9}));
  EXPECT_EQ(names_of(*model),
            (std::vector<std::string>{"encoder.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0",
                                      "rnn.bias_hh_l0", "rnn.weight_ih_l1", "rnn.weight_hh_l1", "rnn.bias_ih_l1",
                                      "rnn.bias_hh_l1", "decoder.weight", "decoder.bias"}));
  EXPECT_EQ(to_string(*model),
            "RnnLanguageModel(\n  (drop): Dropout(p=0, inplace=False)\n  (encoder): Embedding(11, 6)\n"
            "  (rnn): LSTM(6, 6, num_layers=2, batch_first=True)\n  (drop_out): Dropout(p=0, inplace=False)\n"
            "  (decoder): Linear(in_features=6, out_features=11, bias=True)\n)");
  for (const std::int64_t n : {0, 1, 3})
    EXPECT_EQ(model->forward(tape, tape.input(tokens({n, 5}, 1))).shape(), (Shape{n, 5, kVocabulary}));
  EXPECT_THROW(model->forward(tape, tape.input(backend->zeros({2, 5}))), UsageError);
  EXPECT_THROW(make_model(context, {.name = "lstm", .sample_shape = {9}, .settings = {{"layers", 0}}}), UsageError);
  EXPECT_THROW(make_model(context, {.name = "lstm", .sample_shape = {9}, .settings = {{"width", 0}}}), UsageError);
}

// A text in pieces, each from where the one before has ended, as when it is generated.
TEST_F(RnnModels, TextModelsContinueTheirState) {
  for (const char* name : {"rnn", "lstm", "gru"}) {
    SCOPED_TRACE(name);
    ModelSpec of_text = spec({9});
    of_text.name = name;
    const auto model = make_model(context, of_text);
    model->train(false);
    auto& text = dynamic_cast<LanguageModel&>(*model);
    EXPECT_EQ(text.vocabulary(), kVocabulary);
    EXPECT_FALSE(text.positions().has_value());
    for (const std::int64_t batch : {1, 3}) {
      constexpr std::int64_t kTokens = 7;
      const Tensor all = tokens({batch, kTokens}, 2);
      const Tensor logits = model->forward(tape, tape.input(all)).value();
      const auto memory = text.begin(tape, batch, kTokens);
      std::int64_t seen = 0;
      for (const std::int64_t count : {3, 1, 1, 2}) {
        const Tensor part = backend->empty({batch, count}, DType::kI32);
        for (std::int64_t b = 0; b < batch; ++b)
          std::copy_n(all.data<std::int32_t>() + b * kTokens + seen, count, part.data<std::int32_t>() + b * count);
        const Tensor last = text.next(tape, part, *memory).value();
        seen += count;
        ASSERT_EQ(last.shape(), (Shape{batch, kVocabulary}));
        EXPECT_EQ(memory->seen(), seen);
        for (std::int64_t b = 0; b < batch; ++b)
          for (std::int64_t k = 0; k < kVocabulary; ++k)
            EXPECT_NEAR(last.f32()[b * kVocabulary + k], logits.f32()[(b * kTokens + seen - 1) * kVocabulary + k],
                        1e-5f);
      }
      EXPECT_THROW(text.next(tape, tokens({batch, 1}, 3), *memory), UsageError);
      EXPECT_THROW(text.next(tape, tokens({batch + 1, 1}, 3), *text.begin(tape, batch, 4)), UsageError);
    }
    EXPECT_THROW(text.begin(tape, 0, 4), UsageError);
    tape.reset();
  }
}

// Rows of pixels are steps, and the last one decides the class: the last row changes the result, and an additional
// first row makes another sequence.
TEST_F(RnnModels, OfImagesReadRows) {
  const auto model = make_model(context, spec({5, 4, 2}));
  EXPECT_EQ(names_of(*model).front(), "rnn.weight_ih_l0");
  const Tensor images = random_tensor(*backend, {3, 5, 4, 2}, 1);
  const auto logits = values_of(model->forward(tape, tape.input(images)).value());
  auto parameters = model->named_parameters();
  const auto find = [&](const std::string& name) -> Parameter& {
    return *std::ranges::find(parameters, name, &NamedParameter::name)->parameter;
  };
  const auto layer = [&](const std::string& l) {
    return RnnParameters{find("rnn.weight_ih_l" + l), find("rnn.weight_hh_l" + l), &find("rnn.bias_ih_l" + l),
                         &find("rnn.bias_hh_l" + l)};
  };
  const Var steps = rnn(tape, rnn(tape, tape.input(images.reshaped({3, 5, 8})), layer("0")), layer("1"));
  const Tensor last = backend->empty({3, 6});
  for (std::int64_t n = 0; n < 3; ++n) std::copy_n(steps.value().f32() + (n * 5 + 4) * 6, 6, last.f32() + n * 6);
  EXPECT_EQ(values_of(linear(tape, tape.input(last), find("decoder.weight"), &find("decoder.bias")).value()), logits);
  for (const std::int64_t n : {0, 1, 3, 2, 3})
    EXPECT_EQ(model->forward(tape, tape.input(backend->zeros({n, 5, 4, 2}))).shape(), (Shape{n, kVocabulary}));
}

// In training a pass begins where the one before has ended; in evaluation it does not.
TEST_F(RnnModels, CarryTheirState) {
  for (const char* name : {"rnn", "lstm", "gru"}) {
    SCOPED_TRACE(name);
    ModelSpec of_text = spec({9});
    of_text.name = name;
    const auto model = make_model(context, of_text);
    auto* const carries = dynamic_cast<CarriesState*>(model.get());
    ASSERT_NE(carries, nullptr);
    EXPECT_TRUE(carries->carried_state().empty());
    const Tensor text = tokens({2, 6}, 3);
    const auto half = [&](std::int64_t begin) {
      const Tensor part = backend->empty({2, 3}, DType::kI32);
      for (std::int64_t n = 0; n < 2; ++n)
        std::copy_n(text.data<std::int32_t>() + n * 6 + begin, 3, part.data<std::int32_t>() + n * 3);
      return part;
    };
    Tape training(*backend);
    const auto forward = [&](Tape& on, const Tensor& of) {
      const auto values = values_of(model->forward(on, on.input(of)).value());
      on.reset();
      return values;
    };
    const auto whole = forward(training, text), second = forward(training, half(3));
    carries->carry_state(3, DType::kF32);  // more rows than there are
    const auto state = carries->carried_state();
    EXPECT_EQ(state.size(), std::string(name) == "lstm" ? 4u : 2u);
    forward(training, half(0));
    const auto evaluated = forward(tape, half(3));
    EXPECT_EQ(evaluated, second);
    model->train(false);
    EXPECT_EQ(forward(training, half(3)), second);
    model->train(true);
    const auto carried = forward(training, half(3));
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t i = 0; i < 3 * kVocabulary; ++i)
        ASSERT_NEAR(carried[static_cast<std::size_t>(n * 3 * kVocabulary + i)],
                    whole[static_cast<std::size_t>((n * 6 + 3) * kVocabulary + i)], 1e-5f);
    EXPECT_NE(carried, second);
    // The third row has never been there, and one row changes its own state alone.
    const auto before = values_of(*state[0].tensor);
    forward(training, half(0).slice(0, 1));
    const auto after = values_of(*state[0].tensor);
    EXPECT_NE(std::vector<float>(after.begin(), after.begin() + 6),
              std::vector<float>(before.begin(), before.begin() + 6));
    EXPECT_EQ(std::vector<float>(after.begin() + 6, after.end()), std::vector<float>(before.begin() + 6, before.end()));
    EXPECT_EQ(std::vector<float>(after.begin() + 12, after.end()), std::vector<float>(6));
    forward(training, tokens({0, 3}, 1));
    EXPECT_THROW(forward(training, tokens({4, 3}, 1)), UsageError);
    training.reset();
    EXPECT_THROW(carries->carry_state(0, DType::kF32), UsageError);
  }
}

TEST_F(RnnModels, ReadRowsBothWaysButTextsOneWay) {
  for (const char* name : {"rnn", "lstm", "gru"}) {
    ModelSpec both = spec({5, 4, 2});
    both.name = name;
    both.settings.set("bidirectional", true);
    const auto model = make_model(context, both);
    EXPECT_EQ(names_of(*model)[4], "rnn.weight_ih_l0_reverse");
    const auto logits = values_of(model->forward(tape, tape.input(random_tensor(*backend, {3, 5, 4, 2}, 1))).value());
    EXPECT_EQ(logits.size(), 3u * kVocabulary);
    both.sample_shape = {9};
    EXPECT_THROW(make_model(context, both), UsageError);
  }
}

TEST_F(RnnModels, PlainRnnDefaultsToTanh) {
  std::vector<std::vector<float>> outputs;
  for (const char* nonlinearity : {"", "tanh", "relu"}) {
    ModelSpec plain = spec({9});
    plain.name = "rnn";
    if (*nonlinearity != '\0') plain.settings.set("nonlinearity", nonlinearity);
    Generator same(7);
    Context own{*backend, same};
    outputs.push_back(values_of(make_model(own, plain)->forward(tape, tape.input(tokens({2, 5}, 1))).value()));
    tape.reset();
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_NE(outputs[0], outputs[2]);
  ModelSpec other = spec({9});
  other.name = "rnn";
  other.settings.set("nonlinearity", "sigmoid");
  EXPECT_THROW(make_model(context, other), UsageError);
  other.name = "gru";
  other.settings.set("nonlinearity", "relu");
  EXPECT_THROW(make_model(context, other), UsageError);
}

}  // namespace
}  // namespace lockstep::nn
