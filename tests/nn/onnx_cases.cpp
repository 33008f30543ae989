#include "tests/nn/onnx_cases.h"

#include <array>

namespace lockstep::nn::testing {
namespace {

using Self = FunctionModule;

constexpr std::int64_t kMostLength = 24;

OnnxCase::Input rows(const char* name = "x") { return numbers_input(name, {1, 6}); }
OnnxCase::Input sequence(const char* name = "x", std::int64_t features = 6) {
  return numbers_input(name, {1, kMostLength, features}, /*any_length=*/true);
}
OnnxCase::Input image(const char* name = "x", std::int64_t channels = 4) {
  return numbers_input(name, {1, 9, 7, channels});
}
OnnxCase::Input lengths() { return whole_input("lengths", {1}, OnnxCase::Input::kOfLength, false, 1); }

Recurrent& layers_of(Self& self, RnnCell cell) {
  const RecurrentOptions options = {.num_layers = 2, .bidirectional = true};
  if (cell == RnnCell::kLstm) return self.child<Lstm>("layers", 6, 3, options);
  if (cell == RnnCell::kGru) return self.child<Gru>("layers", 6, 3, options);
  return self.child<Rnn>("layers", 6, 3, options,
                         cell == RnnCell::kRelu ? Rnn::Nonlinearity::kRelu : Rnn::Nonlinearity::kTanh);
}

// What tests/nn has a row for.
void add_rows(std::vector<OnnxCase>& all) {
  for (const UnaryCase& each : kUnaryCases)
    with_rule(each.op, [&](auto, const OpNames& names) {
      all.push_back(function_case(fmt::format("{}_{}", names.function, static_cast<int>(each.op)), {sequence()},
                                  [each](Self&, Tape& tape, const Vars& in) -> Vars {
                                    return each.function(tape, affine(tape, in[0], each.spread, each.middle));
                                  }));
    });
  for (const BinaryCase& each : kBinaryCases)
    with_rule(each.op, [&](auto, const OpNames& names) {
      all.push_back(
          function_case(names.function, {sequence(), sequence("z")}, [each](Self&, Tape& tape, const Vars& in) -> Vars {
            return each.function(tape, in[0], affine(tape, in[1], 1.0f, 2.0f));
          }));
    });
  for_operators([&](const OperatorCase&, const auto& op) {
    all.push_back(function_case(
        fmt::format("{}_operator", op.kName), {sequence()},
        [op](Self&, Tape& tape, const Vars& in) -> Vars { return apply(tape, affine(tape, in[0], 0.5f, 1.0f), op); }));
  });
}

void add_products(std::vector<OnnxCase>& all) {
  const auto add = [&](const char* name, std::vector<OnnxCase::Input> inputs, Self::Function function) {
    all.push_back(function_case(name, std::move(inputs), std::move(function)));
  };
  add("linear_of_rows", {rows()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return linear(tape, in[0], self.parameter("w", {5, 6}), &self.parameter("b", {5}), Epilogue::kRelu);
  });
  add("linear_of_sequences", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return linear(tape, in[0], self.parameter("w", {5, 6}), &self.parameter("b", {5}), Epilogue::kGelu);
  });
  add("linear_turned", {rows()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return linear(tape, in[0], self.parameter("w", {5, 6}, FileLayout::kTransposed), nullptr);
  });
  add("logits", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return logits(tape, in[0], self.parameter("w", {5, 6}, FileLayout::kTransposed), nullptr);
  });
  for (int turned = 0; turned < 4; ++turned) {
    const bool a = turned % 2 != 0, b = turned / 2 != 0;
    const Shape left = a ? Shape{1, 3, 4, 5} : Shape{1, 3, 5, 4}, right = b ? Shape{1, 3, 2, 4} : Shape{1, 3, 4, 2};
    // Four axes are images in the graph.
    add(a ? (b ? "matmul_both_turned" : "matmul_left_turned") : (b ? "matmul_right_turned" : "matmul"),
        {numbers_input("x", {1, left.count()}), numbers_input("z", {1, right.count()})},
        [=](Self&, Tape& tape, const Vars& in) -> Vars {
          Shape x = left, z = right;
          x[0] = z[0] = -1;
          return matmul(tape, reshape(tape, in[0], x), reshape(tape, in[1], z), {a, b});
        });
  }
  add("matmul_of_sequences", {sequence(), sequence("z")},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return matmul(tape, in[0], in[1], {.b = true}); });
  add("matmul_by_one", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return matmul(tape, in[0], variable(tape, self.parameter("w", {6, 4})));
  });
  add("matmul_broadcast", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return matmul(tape, variable(tape, self.parameter("w", {1, 3, 6})), in[0], {.b = true});
  });
  add("variable", {rows()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    const Var w = variable(tape, self.parameter("w", {1, 2, 3}, FileLayout::kOhwiToOihw));
    return nn::add(tape, in[0], reshape(tape, w, {1, 6}));
  });
}

void add_images(std::vector<OnnxCase>& all) {
  const auto add = [&](const char* name, std::vector<OnnxCase::Input> inputs, Self::Function function) {
    all.push_back(function_case(name, std::move(inputs), std::move(function)));
  };
  constexpr Window kWindow = {.kernel = {3, 2}, .stride = {2, 1}, .padding = {1, 0}};
  add("conv2d", {image()}, [=](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv2d(tape, in[0], self.parameter("w", {5, 3, 2, 4}, FileLayout::kOhwiToOihw), &self.parameter("b", {5}),
                  kWindow, Epilogue::kRelu);
  });
  add("conv2d_of_one_channel", {image("x", 1)}, [=](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv2d(tape, in[0], self.parameter("w", {5, 3, 2, 1}, FileLayout::kOhwiToOihw), nullptr, kWindow);
  });
  add("conv2d_in_groups", {image()}, [=](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv2d(tape, in[0], self.parameter("w", {6, 3, 2, 2}, FileLayout::kOhwiToOihw), &self.parameter("b", {6}),
                  kWindow, Epilogue::kRelu6, /*groups=*/2);
  });
  add("conv2d_depthwise", {image()}, [=](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv2d(tape, in[0], self.parameter("w", {8, 3, 2, 1}, FileLayout::kOhwiToOihw), nullptr, kWindow,
                  Epilogue::kNone, /*groups=*/4);
  });
  add("conv2d_max_pool", {image()}, [=](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv2d_max_pool(tape, in[0], self.parameter("w", {5, 3, 2, 4}, FileLayout::kOhwiToOihw),
                           &self.parameter("b", {5}), kWindow, Epilogue::kRelu, {.kernel = {2, 2}, .stride = {2, 2}});
  });
  add("conv1d", {numbers_input("x", {1, 11, 4})}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv1d(tape, in[0], self.parameter("w", {5, 3, 4}, FileLayout::kOhwiToOihw), &self.parameter("b", {5}), 2,
                  1);
  });
  add("conv1d_of_any_length", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv1d(tape, in[0], self.parameter("w", {5, 3, 6}, FileLayout::kOhwiToOihw), nullptr, 1, 1);
  });
  add("conv_transpose2d", {image()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv_transpose2d(tape, in[0], self.parameter("w", {4, 3, 2, 5}, FileLayout::kOhwiToOihw),
                            &self.parameter("b", {5}), {.kernel = {3, 2}, .stride = {2, 3}, .padding = {1, 0}}, {1, 2});
  });
  add("conv_transpose2d_in_groups", {image()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return conv_transpose2d(tape, in[0], self.parameter("w", {4, 3, 2, 3}, FileLayout::kOhwiToOihw),
                            &self.parameter("b", {6}), {.kernel = {3, 2}, .stride = {2, 3}, .padding = {1, 0}}, {1, 2},
                            /*groups=*/2);
  });
  add("pool2d_max", {image()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    return pool2d(tape, PoolKind::kMax, in[0], {.kernel = {3, 2}, .stride = {2, 2}, .padding = {1, 1}});
  });
  add("pool2d_average", {image()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    return pool2d(tape, PoolKind::kAverage, in[0], {.kernel = {3, 2}, .stride = {2, 1}, .padding = {1, 1}});
  });
  for (const auto& [name, height, width] :
       {std::tuple("adaptive_avg_pool2d", 4, 10), std::tuple("adaptive_avg_pool2d_even", 3, 7),
        std::tuple("adaptive_avg_pool2d_same", 9, 7), std::tuple("adaptive_avg_pool2d_one", 1, 1)})
    add(name, {image()}, [height, width](Self&, Tape& tape, const Vars& in) -> Vars {
      return adaptive_avg_pool2d(tape, in[0], height, width);
    });
  add("flatten", {image()}, [](Self&, Tape& tape, const Vars& in) -> Vars { return flatten(tape, in[0]); });
  add("flatten_of_sequences", {numbers_input("x", {1, 5, 4})},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return flatten(tape, in[0]); });
  add("batch_norm", {image(), rows("z")}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    auto& of_images = self.child<BatchNorm>("images", 4);
    auto& of_rows = self.child<BatchNorm>("rows", 6);
    const Var x = of_images.forward_add_relu(tape, in[0], relu(tape, in[0]));
    return concat(tape, {flatten(tape, x), of_rows.forward(tape, in[1], Epilogue::kRelu)}, 1);
  });
  add("group_norm", {image()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return group_norm(tape, in[0], 2, self.parameter("w", {4}), &self.parameter("b", {4}));
  });
}

void add_sequences(std::vector<OnnxCase>& all) {
  const auto add = [&](const std::string& name, std::vector<OnnxCase::Input> inputs, Self::Function function) {
    all.push_back(function_case(name, std::move(inputs), std::move(function)));
  };
  add("layer_norm", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return layer_norm(tape, in[0], self.parameter("w", {6}), nullptr);
  });
  all.push_back(function_case("add_layer_norm", {sequence(), sequence("z")},
                              [](Self& self, Tape& tape, const Vars& in) -> Vars {
                                const auto [sum, norm] = add_layer_norm(tape, in[0], in[1], self.parameter("w", {6}),
                                                                        &self.parameter("b", {6}));
                                return {sum, norm};
                              },
                              {"sum", "norm"}));
  add("rms_norm", {sequence()},
      [](Self& self, Tape& tape, const Vars& in) -> Vars { return rms_norm(tape, in[0], self.parameter("w", {6})); });
  add("embedding", {whole_input("tokens", {1, kMostLength}, 9, true)},
      [](Self& self, Tape& tape, const Vars& in) -> Vars {
        return embedding(tape, in[0].value(), self.parameter("w", {9, 5}));
      });
  add("add_positions", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return add_positions(tape, in[0], self.parameter("w", {kMostLength + 2, 6}), 2);
  });
  add("rotary", {sequence("x", 8)}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    const RotaryAngles angles(self.backend(), kMostLength + 1, 4);
    return rotary(tape, in[0], angles, 1);
  });
  for (const bool causal : {false, true})
    for (const bool padded : {false, true}) {
      std::vector<OnnxCase::Input> inputs = {sequence("qkv", 12), sequence("q", 4)};
      if (padded) inputs.push_back(lengths());
      add(fmt::format("attention{}{}", causal ? "_causal" : "", padded ? "_padded" : ""), inputs,
          [=](Self&, Tape& tape, const Vars& in) -> Vars {
            const AttentionOptions options = {.causal = causal, .lengths = padded ? in[2].value() : Tensor()};
            const Var together = attention(tape, in[0], 2, options);
            return attention(tape, in[1], together, together, 2, options);
          });
    }
  add("causal_attention", {sequence("qkv", 12)},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return causal_attention(tape, in[0], 2); });
  for (const auto& [name, cell] : {std::pair("rnn_tanh", RnnCell::kTanh), std::pair("rnn_relu", RnnCell::kRelu),
                                   std::pair("rnn_lstm", RnnCell::kLstm), std::pair("rnn_gru", RnnCell::kGru)})
    for (const bool padded : {false, true}) {
      std::vector<OnnxCase::Input> inputs = {sequence()};
      if (padded) inputs.push_back(lengths());
      add(fmt::format("{}{}", name, padded ? "_padded" : ""), inputs,
          [=](Self& self, Tape& tape, const Vars& in) -> Vars {
            return layers_of(self, cell)(tape, padded ? Vars{in[0], in[1]} : Vars{in[0]});
          });
    }
  add("rnn_last", {numbers_input("x", {1, 7, 6})}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return self.child<Gru>("layers", 6, 3, RecurrentOptions{.bidirectional = true}).forward_last(tape, in[0]);
  });
  add("rnn_without_bias", {sequence()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return self.child<Lstm>("layers", 6, 3, RecurrentOptions{.bias = false})(tape, in[0]);
  });
  add("take_position", {sequence()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    const Var last = take_position(tape, in[0], in[0].shape()[1] - 1);
    return nn::add(tape, take_position(tape, in[0], 0), last);
  });
  add("take_positions", {numbers_input("x", {1, 5, 6}), whole_input("at", {1, 3}, 5)},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return take_positions(tape, in[0], in[1].value()); });
  add("index_select", {numbers_input("x", {1, 5, 6}), whole_input("at", {1, 3}, 5)},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return index_select(tape, in[0], in[1].value()); });
  for (int axis = 1; axis < 3; ++axis)
    add(fmt::format("gather_{}", axis),
        {numbers_input("x", {1, 4, 5}), whole_input("at", axis == 1 ? Shape{1, 7, 5} : Shape{1, 4, 7}, 4)},
        [=](Self&, Tape& tape, const Vars& in) -> Vars { return gather(tape, in[0], axis, in[1].value()); });
}

void add_layouts(std::vector<OnnxCase>& all) {
  const auto add = [&](const std::string& name, std::vector<OnnxCase::Input> inputs, Self::Function function) {
    all.push_back(function_case(name, std::move(inputs), std::move(function)));
  };
  add("reshape", {sequence()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    const Shape s = in[0].shape();
    const Var turned = transpose(tape, reshape(tape, in[0], {s[0], s[1], 2, 3}), 1, 2);
    return reshape(tape, transpose(tape, reshape(tape, turned, {2 * s[0], s[1], 3}), 0, 1), {s[1], 3, -1});
  });
  add("permute", {image()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    return permute(tape, relu(tape, permute(tape, in[0], {0, 2, 3, 1})), {0, 2, 1, 3});
  });
  add("transpose", {sequence()},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return transpose(tape, in[0], 0, -1); });
  add("slice", {image()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    return slice(tape, slice(tape, slice(tape, in[0], 1, 2, 8), 2, 0, 3), -1, 1, 4);
  });
  add("slice_of_samples", {sequence()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    return slice(tape, slice(tape, in[0], 0, 0, in[0].shape()[0]), 2, 1, 2);
  });
  for (int axis = 1; axis < 4; ++axis)
    add(fmt::format("concat_{}", axis), {image()}, [=](Self&, Tape& tape, const Vars& in) -> Vars {
      return concat(tape, {in[0], relu(tape, slice(tape, in[0], axis, 1, 3)), in[0]}, axis);
    });
  add("broadcast_to", {rows()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    const std::int64_t n = in[0].shape()[0];
    const Var x = broadcast_to(tape, reshape(tape, in[0], {n, 1, 6}), {n, 4, 6});
    const Var parameter = broadcast_to(tape, variable(tape, self.parameter("w", {4, 1})), {n, 4, 6});
    return concat(tape, {nn::add(tape, x, parameter), exp(tape, parameter), x}, 1);
  });
  add("add_broadcast", {image(), numbers_input("z", {1, 7, 1})}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    const Var z = reshape(tape, in[1], {in[1].shape()[0], 1, 7, 1});
    return sub(tape, nn::add(tape, variable(tape, self.parameter("w", {4})), in[0]), z);
  });
  add("where", {numbers_input("x", {1, 5}), whole_input("condition", {1, 5}, 2)},
      [](Self&, Tape& tape, const Vars& in) -> Vars {
        return where(tape, in[1].value(), in[0], affine(tape, in[0], -2.0f, 1.0f));
      });
  add("where_of_a_constant", {rows()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    const std::vector<std::int32_t> zeros(static_cast<std::size_t>(in[0].shape().count()));
    const Tensor condition = tape.backend().from_host(zeros.data(), in[0].shape(), DType::kI32);
    return where(tape, condition, in[0], variable(tape, self.parameter("w", {6})));
  });
  using Reduction = Var (*)(Tape&, Var, std::initializer_list<int>, bool);
  for (const auto& [name, reduce] : {std::pair<const char*, Reduction>("sum_over", sum_over),
                                     std::pair<const char*, Reduction>("mean_over", mean_over),
                                     std::pair<const char*, Reduction>("max_over", max_over)}) {
    add(name, {image()}, [reduce](Self&, Tape& tape, const Vars& in) -> Vars {
      return reduce(tape, in[0], {1, 2}, false);
    });
    add(fmt::format("{}_kept", name), {image()},
        [reduce](Self&, Tape& tape, const Vars& in) -> Vars { return reduce(tape, in[0], {3}, true); });
  }
  add("mean_over_all_of_a_parameter", {rows()}, [](Self& self, Tape& tape, const Vars& in) -> Vars {
    return mul(tape, in[0], affine(tape, mean_over(tape, variable(tape, self.parameter("w", {3, 2})), {}), 3.0f));
  });
  add("sum_over_samples", {rows()},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return sum_over(tape, in[0], {0}); });
  add("softmax", {image()}, [](Self&, Tape& tape, const Vars& in) -> Vars { return softmax(tape, in[0], 1); });
  add("log_softmax", {sequence()},
      [](Self&, Tape& tape, const Vars& in) -> Vars { return log_softmax(tape, in[0], 1); });
  add("to_f32", {rows()}, [](Self&, Tape& tape, const Vars& in) -> Vars { return to_f32(tape, in[0]); });
  add("to_activations", {rows()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    return to_activations(tape, nn::sum_last(tape, nn::spread_last(tape, in[0], 3)));
  });
  add("apply_in_place", {rows()}, [](Self&, Tape& tape, const Vars& in) -> Vars {
    const Tensor x = in[0].value(), y = tape.backend().empty(x.shape());
    tape.backend().pointwise().copy(x, y);
    tape.backend().pointwise().add_to(x, 3.0f, y);
    tape.backend().pointwise().unary(UnaryOp::kRelu, y, y);
    return tape.make_var(y, false);
  });
}

}  // namespace

std::vector<OnnxCase> onnx_operator_cases() {
  std::vector<OnnxCase> all;
  add_rows(all);
  add_products(all);
  add_images(all);
  add_sequences(all);
  add_layouts(all);
  return all;
}

}  // namespace lockstep::nn::testing
