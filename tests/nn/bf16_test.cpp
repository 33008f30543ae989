// The CPU's kernels in bf16: against those in f32 on the same numbers, from which they may differ by the roundings that
// bf16 makes, of 2⁻⁸ of a number each, and by the order of f32 sums.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "lockstep/base/dtype.h"
#include "nn/ops/update_rules.h"
#include "tests/nn/elementwise_cases.h"
#include "tests/nn/values.h"
#include "tests/support/refusal.h"

namespace lockstep::nn {
namespace {

using testing::random_tensor;

constexpr double kRoundoff = 0x1p-8;  // of a number that is rounded to bf16
constexpr double kF32Roundoff = 0x1p-24;

/// On a CPU without AVX-512 nothing computes in bf16, and there it is tested that nothing does: every test is one of
/// refusals.
class Bf16Test : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (backend->computes_in(DType::kBF16)) return;
    EXPECT_EQ(cpu_bf16(), CpuBf16::kNone);
    GTEST_SKIP() << "no AVX-512: what refuses bf16 is tested in Bf16Refusal";
  }

  Tensor as_bf16(const Tensor& x) {
    const Tensor made = backend->empty(x.shape(), DType::kBF16);
    backend->pointwise().cast(x, made);
    return made;
  }
  Tensor as_f32(const Tensor& x) {
    const Tensor made = backend->empty(x.shape());
    backend->pointwise().cast(x, made);
    return made;
  }
  /// f32 numbers that bf16 has, too.
  Tensor exact(const Shape& shape, std::uint64_t seed) { return as_f32(as_bf16(random_tensor(*backend, shape, seed))); }
  Tensor numbers(const Shape& shape, std::vector<std::int32_t> values) {
    const Tensor made = backend->empty(shape, DType::kI32);
    backend->upload(std::as_bytes(std::span(values)), made);
    return made;
  }
  Tensor unset(const Shape& shape, DType dtype) {
    const Tensor made = backend->empty(shape, dtype);
    backend->pointwise().fill(made, std::numeric_limits<float>::quiet_NaN());
    return made;
  }

  /// One kernel on inputs of one type, and what it writes: activations, then what is f32 in both cases.
  struct Run {
    DType dtype;
    std::vector<Tensor> activations = {}, plain = {};
  };
  /// Runs `call` in f32 and in bf16 on the same numbers. A result of the second may differ from that of the first by
  /// `roundings` of bf16 and `terms` additions in f32, both of about `scale` or of the result itself.
  struct Allowance {
    double roundings = 1, terms = 1, scale = 1;
  };
  void compare(const std::vector<Tensor>& inputs, const std::vector<Shape>& activations,
               const std::vector<Shape>& plain, const Allowance& of_activations, const Allowance& of_plain,
               const std::function<void(const std::vector<Tensor>& from, const Run& out)>& call) {
    Run runs[2] = {{.dtype = DType::kF32}, {.dtype = DType::kBF16}};
    for (Run& run : runs) {
      std::vector<Tensor> from;
      for (const Tensor& x : inputs) from.push_back(run.dtype == DType::kBF16 ? as_bf16(x) : x);
      for (const Shape& shape : activations) run.activations.push_back(unset(shape, run.dtype));
      for (const Shape& shape : plain) run.plain.push_back(unset(shape, DType::kF32));
      call(from, run);
    }
    for (std::size_t i = 0; i < activations.size(); ++i)
      expect_near(runs[0].activations[i], as_f32(runs[1].activations[i]), of_activations,
                  fmt::format("activation {}", i));
    for (std::size_t i = 0; i < plain.size(); ++i)
      expect_near(runs[0].plain[i], runs[1].plain[i], of_plain, fmt::format("f32 result {}", i));
  }

  static void expect_near(const Tensor& expected, const Tensor& actual, const Allowance& allowed,
                          const std::string& what) {
    ASSERT_EQ(expected.shape(), actual.shape());
    for (std::int64_t i = 0; i < expected.count(); ++i) {
      const auto e = static_cast<double>(expected.f32()[i]), a = static_cast<double>(actual.f32()[i]);
      const double scale = std::max(allowed.scale, std::abs(e));
      // One rounding is that of the result itself; more are of what went into it.
      const double most = (allowed.roundings > 0 ? kRoundoff * std::abs(e) : 0.0) +
                          std::max(0.0, allowed.roundings - 1) * kRoundoff * scale +
                          allowed.terms * kF32Roundoff * scale;
      ASSERT_LE(std::abs(e - a), most) << what << ", element " << i << ": " << a << " in bf16, " << e << " in f32";
    }
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(GetParam());
};

TEST_P(Bf16Test, ProductsOfFullyConnectedLayers) {
  struct Size {
    std::int64_t n, in, out;
  };
  for (const auto& [n, in, out] :
       {Size{1, 7, 5}, Size{2, 1, 1}, Size{5, 33, 17}, Size{64, 96, 130}, Size{3, 257, 10}}) {
    const Tensor x = exact({n, in}, 1), w = exact({out, in}, 2), b = exact({out}, 3), dy = exact({n, out}, 4);
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
      compare({x, w, b}, {{n, out}}, {}, {.terms = 2.0 * static_cast<double>(in)}, {}, [&](auto& from, auto& to) {
        backend->linear().forward(from[0], from[1], from[2], epilogue, to.activations[0]);
      });
    compare({x, w}, {{n, out}}, {}, {.terms = 2.0 * static_cast<double>(in)}, {}, [&](auto& from, auto& to) {
      backend->linear().forward(from[0], from[1], {}, Epilogue::kNone, to.activations[0]);
    });
    compare({dy, w}, {{n, in}}, {}, {.terms = 2.0 * static_cast<double>(out)}, {},
            [&](auto& from, auto& to) { backend->linear().backward_input(from[0], from[1], to.activations[0]); });
    const Allowance sum = {.roundings = 0, .terms = 2.0 * static_cast<double>(n) + 2};
    compare({x, dy}, {}, {{out, in}, {out}}, {}, sum, [&](auto& from, auto& to) {
      backend->linear().backward_weight(from[0], from[1], false, to.plain[0]);
      backend->linear().backward_bias(from[1], false, to.plain[1]);
      backend->linear().backward_weight(from[0], from[1], true, to.plain[0]);
      backend->linear().backward_bias(from[1], true, to.plain[1]);
    });
  }
}

TEST_P(Bf16Test, ProductsWithoutSamplesLeaveZeros) {
  const Tensor none = backend->empty({0, 3}, DType::kBF16), w = as_bf16(exact({2, 3}, 1));
  const Tensor dw = unset({2, 3}, DType::kF32);
  backend->linear().forward(none, w, {}, Epilogue::kRelu, backend->empty({0, 2}, DType::kBF16));
  backend->linear().backward_weight(none, backend->empty({0, 2}, DType::kBF16), false, dw);
  for (std::int64_t i = 0; i < dw.count(); ++i) EXPECT_EQ(dw.f32()[i], 0.0f);
}

TEST_P(Bf16Test, Convolutions) {
  struct Size {
    std::int64_t n, side, in, out, kernel, stride, groups = 1;
  };
  for (const auto& [n, side, in, out, kernel, stride, groups] :
       {Size{1, 5, 1, 3, 3, 1}, Size{2, 8, 3, 16, 3, 1}, Size{3, 9, 16, 32, 3, 2}, Size{2, 8, 64, 64, 3, 1},
        Size{2, 7, 17, 5, 1, 2}, Size{1, 12, 3, 8, 7, 2}, Size{2, 4, 32, 48, 3, 1}, Size{3, 16, 48, 16, 3, 1},
        Size{2, 33, 16, 64, 3, 2}, Size{1, 20, 80, 32, 5, 1}, Size{8, 8, 256, 272, 3, 1}, Size{1, 1, 16, 16, 3, 1},
        Size{2, 9, 6, 4, 3, 1, 2}, Size{2, 16, 64, 32, 3, 2, 4}, Size{2, 9, 5, 5, 3, 2, 5},
        Size{3, 14, 96, 96, 3, 1, 96}, Size{1, 7, 7, 14, 5, 1, 7}}) {
    SCOPED_TRACE(fmt::format("{} to {} channels in {} groups", in, out, groups));
    const Window window = {.kernel = {kernel, kernel}, .stride = {stride, stride}, .padding = {kernel / 2, kernel / 2}};
    const std::int64_t to = window.output_extent(0, side);
    const Shape xs = {n, side, side, in}, ws = {out, kernel, kernel, in / groups}, ys = {n, to, to, out};
    const Tensor x = exact(xs, 1), w = exact(ws, 2), b = exact({out}, 3), dy = exact(ys, 4);
    const auto terms = static_cast<double>(2 * kernel * kernel * in);
    compare({x, w, b}, {ys, ys}, {}, {.terms = terms}, {}, [&](auto& from, auto& made) {
      backend->conv().forward(from[0], from[1], 0, from[2], window, Epilogue::kRelu, made.activations[0]);
      backend->conv().forward(from[0], from[1], 0, {}, window, Epilogue::kNone, made.activations[1]);
    });
    compare({dy, w}, {xs}, {}, {.terms = static_cast<double>(2 * kernel * kernel * out)}, {},
            [&](auto& from, auto& made) {
              backend->conv().backward_input(from[0], from[1], 0, window, made.activations[0]);
            });
    const auto pixels = static_cast<double>(2 * n * to * to + 2);
    compare({x, dy}, {}, {ws, {out}}, {}, {.roundings = 0, .terms = pixels}, [&](auto& from, auto& made) {
      for (const bool accumulate : {false, true})
        backend->conv().backward_weight(from[0], from[1], window, accumulate, made.plain[0], accumulate, made.plain[1]);
    });
  }
}

TEST_P(Bf16Test, PackedWeightsFollowTheirVersion) {
  const Window window = {.kernel = {3, 3}, .padding = {1, 1}};
  const Tensor x = as_bf16(exact({1, 4, 4, 16}, 1)), w = as_bf16(exact({16, 3, 3, 16}, 2));
  const Tensor y = unset({1, 4, 4, 16}, DType::kBF16);
  backend->conv().forward(x, w, 7, {}, window, Epilogue::kNone, y);
  const float before = as_f32(y).f32()[5];
  backend->pointwise().fill(w, 0.0f);
  backend->conv().forward(x, w, 7, {}, window, Epilogue::kNone, y);
  EXPECT_EQ(as_f32(y).f32()[5], before);
  backend->conv().forward(x, w, 8, {}, window, Epilogue::kNone, y);
  EXPECT_EQ(as_f32(y).f32()[5], 0.0f);
}

TEST_P(Bf16Test, Pooling) {
  for (const Window& window : {Window{{2, 2}, {2, 2}, {0, 0}}, Window{{3, 3}, {2, 2}, {1, 1}},
                               Window{{3, 2}, {3, 2}, {0, 0}}, Window{{17, 17}, {1, 1}, {0, 0}}}) {
    const std::int64_t h = window.output_extent(0, 18), w = window.output_extent(1, 18);
    const Shape xs = {2, 18, 18, 19}, ys = {2, h, w, 19};
    const Tensor x = exact(xs, 1), dy = exact(ys, 2);
    for (const Epilogue epilogue : {Epilogue::kNone, Epilogue::kRelu})
      compare({x, dy}, {ys, xs}, {}, {.terms = 300}, {}, [&](auto& from, auto& to) {
        const Tensor choices = backend->empty(ys, PoolKernels::choice_type(window));
        backend->pool().max_forward(from[0], window, epilogue, to.activations[0], choices);
        backend->pool().max_backward(from[1], choices, window, to.activations[1]);
      });
    compare({x, dy}, {ys, xs}, {}, {.terms = 600}, {}, [&](auto& from, auto& to) {
      backend->pool().average_forward(from[0], window, to.activations[0]);
      backend->pool().average_backward(from[1], window, to.activations[1]);
    });
  }
  compare({exact({2, 7, 5, 300}, 3), exact({2, 3, 2, 300}, 4)}, {{2, 3, 2, 300}, {2, 7, 5, 300}}, {}, {.terms = 20}, {},
          [&](auto& from, auto& to) {
            backend->pool().adaptive_average_forward(from[0], to.activations[0]);
            backend->pool().adaptive_average_backward(from[1], to.activations[1]);
          });
}

TEST_P(Bf16Test, BatchNormalisation) {
  const Shape shape = {3, 5, 5, 21};
  const Tensor x = exact(shape, 1), dy = exact(shape, 2), residual = exact(shape, 3);
  const Tensor gamma = random_tensor(*backend, {21}, 4), beta = random_tensor(*backend, {21}, 5);
  // Statistics are f32 in both: what is read is the same, and only results are rounded.
  const Allowance exact_sums = {.roundings = 0, .terms = 300, .scale = 75};
  compare({x, residual}, {shape, shape, shape}, {{21}, {21}}, {.terms = 50, .scale = 4}, exact_sums,
          [&](auto& from, auto& to) {
            auto& norm = backend->norm();
            norm.forward_train(from[0], gamma, beta, 1e-5, to.activations[0], to.plain[0], to.plain[1]);
            norm.forward_train_relu(from[0], gamma, beta, 1e-5, Epilogue::kRelu, from[1], to.activations[1],
                                    to.plain[0], to.plain[1]);
            norm.forward_infer(from[0], gamma, beta, to.plain[0], to.plain[1], 1e-5, to.activations[2]);
          });
  const Tensor mean = backend->empty({21}), variance = backend->empty({21});
  const Tensor y = backend->empty(shape);
  backend->norm().forward_train_relu(x, gamma, beta, 1e-5, Epilogue::kRelu, residual, y, mean, variance);
  const Tensor y_exact = as_f32(as_bf16(y));
  compare({x, y_exact, dy}, {shape, shape, shape}, {{21}, {21}, {21}, {21}}, {.terms = 300, .scale = 8}, exact_sums,
          [&](auto& from, auto& to) {
            auto& norm = backend->norm();
            norm.backward(from[0], from[2], gamma, mean, variance, false, 1e-5, to.activations[0], to.plain[0],
                          to.plain[1]);
            norm.backward(from[0], from[2], gamma, mean, variance, true, 1e-5, to.activations[1], to.plain[0],
                          to.plain[1]);
            const Tensor masked = backend->empty(shape, from[2].dtype());
            backend->pointwise().copy(from[2], masked);
            norm.backward_relu(from[0], from[1], Epilogue::kRelu, true, masked, gamma, beta, mean, variance, 1e-5,
                               to.activations[2], to.plain[2], to.plain[3]);
          });
}

TEST_P(Bf16Test, LayerNormalisation) {
  for (const std::int64_t width : {1, 5, 96}) {
    const Shape shape = {7, width};
    const Tensor x = exact(shape, 1), dy = exact(shape, 2);
    const Tensor gamma = random_tensor(*backend, {width}, 4), beta = random_tensor(*backend, {width}, 5);
    const Allowance f32 = {.roundings = 0, .terms = 200, .scale = 400};
    compare({x, dy}, {shape, shape}, {{7}, {7}, {width}, {width}}, {.terms = 400, .scale = 400}, f32,
            [&](auto& from, auto& to) {
              auto& norm = backend->layer_norm();
              norm.forward(from[0], gamma, beta, 1e-5, to.activations[0], to.plain[0], to.plain[1]);
              norm.backward_input(from[0], from[1], gamma, to.plain[0], to.plain[1], to.activations[1]);
              norm.backward_parameters(from[0], from[1], to.plain[0], to.plain[1], false, to.plain[2], false,
                                       to.plain[3]);
            });
  }
  // The sum is rounded before it is normalised.
  const Tensor a = as_bf16(exact({4, 40}, 1)), b = as_bf16(exact({4, 40}, 2)), gamma = exact({40}, 3);
  const Tensor sum = backend->empty({4, 40}, DType::kBF16), y = backend->empty({4, 40}, DType::kBF16);
  const Tensor again = backend->empty({4, 40}, DType::kBF16), mean = backend->empty({4}), inverse = backend->empty({4});
  backend->layer_norm().forward_added(a, b, gamma, {}, 1e-5, sum, y, mean, inverse);
  backend->layer_norm().forward(sum, gamma, {}, 1e-5, again, mean, inverse);
  for (std::int64_t i = 0; i < y.count(); ++i) {
    EXPECT_EQ(as_f32(y).f32()[i], as_f32(again).f32()[i]);
    EXPECT_EQ(as_f32(sum).f32()[i], BFloat16::from_float(as_f32(a).f32()[i] + as_f32(b).f32()[i]).to_float());
  }
}

TEST_P(Bf16Test, Embeddings) {
  const Tensor table = exact({11, 37}, 1), dy = exact({6, 37}, 2), positions = exact({4, 37}, 3);
  const Tensor which = numbers({6}, {0, 10, 3, 3, 3, 7});
  compare({table, dy}, {{6, 37}}, {{11, 37}}, {}, {.roundings = 0, .terms = 4}, [&](auto& from, auto& to) {
    backend->embedding().forward(from[0], which, to.activations[0]);
    backend->embedding().backward(which, from[1], false, to.plain[0]);
  });
  compare({dy, positions}, {{2, 3, 37}}, {{4, 37}}, {}, {.roundings = 0, .terms = 4}, [&](auto& from, auto& to) {
    const Tensor x = from[0].reshaped({2, 3, 37});
    backend->embedding().add_rows(x, from[1], 1, to.activations[0]);
    backend->embedding().add_rows_backward(x, 1, false, to.plain[0]);
  });
}

TEST_P(Bf16Test, Attention) {
  struct Case {
    std::int64_t tokens, heads, width;
    bool causal;
    double dropout;
  };
  for (const auto& c : {Case{1, 1, 8, true, 0}, Case{5, 2, 8, true, 0}, Case{130, 2, 16, true, 0},
                        Case{70, 3, 20, false, 0}, Case{33, 2, 8, true, 0.25}}) {
    const std::int64_t model = c.heads * c.width;
    const Tensor qkv = exact({2, c.tokens, 3 * model}, 1), dy = exact({2, c.tokens, model}, 2);
    AttentionOptions options = {.causal = c.causal, .dropout = c.dropout, .layer = 1};
    if (!c.causal) options.lengths = numbers({2}, {static_cast<std::int32_t>(c.tokens), 9});
    const std::int64_t state[] = {3, 4, 5};
    if (c.dropout > 0) {
      options.dropout_state = backend->empty({3}, DType::kI64);
      backend->upload(std::as_bytes(std::span(state)), options.dropout_state);
    }
    // y is the same but for its rounding. Backward begins with that y: its error goes into Σ p dp, once for a weight,
    // and weights sum up to 1.
    const auto terms = static_cast<double>(c.tokens + c.width) * 8;
    compare({qkv, dy}, {{2, c.tokens, model}}, {}, {.terms = terms}, {}, [&](auto& from, auto& to) {
      const Tensor sums = backend->empty({2, c.heads, c.tokens});
      backend->attention().forward(from[0], c.heads, options, to.activations[0], sums);
    });
    compare({qkv, dy}, {{2, c.tokens, 3 * model}}, {},
            {.roundings = 2, .terms = terms, .scale = static_cast<double>(c.width)}, {}, [&](auto& from, auto& to) {
              const Tensor sums = backend->empty({2, c.heads, c.tokens});
              const Tensor y = backend->empty({2, c.tokens, model}, from[0].dtype());
              backend->attention().forward(from[0], c.heads, options, y, sums);
              backend->attention().backward(from[0], c.heads, options, y, sums, from[1], to.activations[0]);
            });
  }
}

// What is generated token by token has the numbers of the whole sequence.
TEST_P(Bf16Test, AttentionOfOneTokenAfterOthers) {
  constexpr std::int64_t kTokens = 9, kHeads = 2, kModel = 24;
  const Tensor qkv = as_bf16(exact({1, kTokens, 3 * kModel}, 1));
  const Tensor whole = backend->empty({1, kTokens, kModel}, DType::kBF16), sums = backend->empty({1, kHeads, kTokens});
  backend->attention().forward(qkv, kHeads, {}, whole, sums);
  const Tensor cache = backend->empty({1, 16, 2 * kModel}, DType::kBF16);
  std::int64_t past = 0;
  for (const std::int64_t count : {4, 1, 1, 3}) {
    const Tensor y = unset({1, count, kModel}, DType::kBF16);
    const Tensor now = qkv.reshaped({kTokens, 3 * kModel}).slice(past, past + count).reshaped({1, count, 3 * kModel});
    backend->attention().extend(now, kHeads, past, cache, y);
    const Tensor expected = whole.reshaped({kTokens, kModel}).slice(past, past + count);
    expect_near(as_f32(expected).reshaped({1, count, kModel}), as_f32(y), {.roundings = 2, .terms = 100}, "a token");
    past += count;
  }
}

TEST_P(Bf16Test, ElementByElement) {
  const Shape shape = {3, 43};
  const Tensor x = exact(shape, 1), y = exact(shape, 2);
  const std::int64_t numbers_of_state[] = {1, 2, 3};
  const Tensor state = backend->empty({3}, DType::kI64);
  backend->upload(std::as_bytes(std::span(numbers_of_state)), state);
  // A sum that is not rounded in between has one rounding.
  testing::for_cases(testing::kUnaryCases, [&]<class Rule>(const testing::UnaryCase& each, Rule, const char*) {
    if constexpr (!Rule::kAllTypes) return;
    compare({x}, {shape}, {}, {.terms = 16}, {},
            [&](auto& from, auto& to) { backend->pointwise().unary(each.op, from[0], to.activations[0]); });
    compare({x, y}, {shape}, {}, {.terms = 64}, {}, [&](auto& from, auto& to) {
      backend->pointwise().unary_backward(each.op, from[0], from[0], from[1], to.activations[0]);
    });
  });
  testing::for_cases(testing::kBinaryCases, [&]<class Rule>(const testing::BinaryCase& each, Rule, const char*) {
    if constexpr (!Rule::kAllTypes) return;
    compare({x, y}, {shape}, {}, {.terms = 16}, {},
            [&](auto& from, auto& to) { backend->pointwise().binary(each.op, from[0], from[1], to.activations[0]); });
  });
  compare({x, y}, std::vector<Shape>(2, shape), {}, {.terms = 16}, {}, [&](auto& from, auto& to) {
    auto& kernels = backend->pointwise();
    kernels.dropout(from[0], 0.3, state, 1, to.activations[0]);
    kernels.copy(from[0], to.activations[1]);
    kernels.add_to(from[1], 0.5f, to.activations[1]);
  });
  compare({x}, {{43, 3}}, {}, {.terms = 64}, {}, [&](auto& from, auto& to) {
    backend->pointwise().swap_last_axes(from[0].reshaped({1, 3, 43}), to.activations[0].reshaped({1, 43, 3}));
  });
}

// What computes in f32 alone takes 16 bits, and rounds its result, forward and backward.
TEST_P(Bf16Test, OperatorsOfF32AreRounded) {
  const Tensor values = testing::random_tensor(*backend, {3, 4}, 1), halves = as_bf16(values);
  const Tensor widened = backend->empty({3, 4});
  backend->pointwise().cast(halves, widened);
  const auto expect_rounded = [&](const std::function<Var(Tape&, Var)>& op) {
    Tape tape(*backend), wide(*backend);
    const Var x = tape.differentiable_input(halves), y = op(tape, x);
    const Var wide_x = wide.differentiable_input(widened), wide_y = op(wide, wide_x);
    ASSERT_EQ(y.dtype(), DType::kBF16);
    const Tensor expected = as_bf16(wide_y.value());
    const auto same = [](const Tensor& a, const Tensor& b) { return std::memcmp(a.raw(), b.raw(), a.bytes()) == 0; };
    EXPECT_TRUE(same(y.value(), expected));
    const Tensor ones = backend->empty(y.shape()), half_ones = backend->empty(y.shape(), DType::kBF16);
    backend->pointwise().fill(ones, 1.0f);
    backend->pointwise().fill(half_ones, 1.0f);
    wide.backward(wide_y, ones);
    tape.backward(y, half_ones);
    EXPECT_TRUE(same(tape.grad(x), as_bf16(wide.grad(wide_x))));
  };
  expect_rounded([](Tape& tape, Var x) { return exp(tape, x); });
  expect_rounded([](Tape& tape, Var x) { return softmax(tape, x); });
  expect_rounded([](Tape& tape, Var x) { return affine(tape, x, 3.0f, 0.1f); });
  expect_rounded([](Tape& tape, Var x) { return mean_over(tape, x, {0}); });
  expect_rounded([](Tape& tape, Var x) { return max_over(tape, x, {1}); });
}

// Elements that move, and products of variables.
TEST_P(Bf16Test, LayoutAndMatmul) {
  const Tensor a = as_bf16(testing::random_tensor(*backend, {2, 3, 4}, 1));
  const Tensor b = as_bf16(testing::random_tensor(*backend, {4, 5}, 2));
  Tape tape(*backend), wide(*backend);
  const auto product = [&](Tape& on, const Tensor& x, const Tensor& y) {
    const Var turned = transpose(on, on.input(x), 0, 2);  // (4, 3, 2)
    const Var parts = concat(on, {slice(on, turned, 0, 2, 4), slice(on, turned, 0, 0, 2)}, 0);
    return matmul(on, on.input(x),
                  matmul(on, reshape(on, parts, {4, 6}), broadcast_to(on, slice(on, on.input(y), 0, 0, 1), {6, 5})));
  };
  const auto widened = [&](const Tensor& x) {
    const Tensor made = backend->empty(x.shape());
    backend->pointwise().cast(x, made);
    return made;
  };
  const Var got = product(tape, a, b), expected = product(wide, widened(a), widened(b));
  ASSERT_EQ(got.dtype(), DType::kBF16);
  const auto rounded = widened(got.value()).span<float>(), exact = expected.value().span<float>();
  for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(rounded[i], exact[i], 0.05f);
}

TEST_P(Bf16Test, RoundsToNearestAndKeepsNaN) {
  std::vector<float> values = {1.0f, 1.00390625f, 1.01171875f, -0.0f, 65504.0f, 3.4e38f, 1e-40f};
  for (const float special : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    values.push_back(special);
    values.push_back(-special);
  }
  while (values.size() < 77) values.push_back(static_cast<float>(values.size()) * 1.2345e-3f);
  const auto count = static_cast<std::int64_t>(values.size());
  const Tensor rounded = as_bf16(testing::tensor_of(*backend, {count}, values));
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_EQ(rounded.data<BFloat16>()[i].bits, BFloat16::from_float(values[i]).bits) << values[i];
  const Tensor relu = backend->empty({count}, DType::kBF16);
  backend->pointwise().unary(UnaryOp::kRelu, rounded, relu);
  EXPECT_TRUE(std::isnan(relu.data<BFloat16>()[7].to_float()));
}

TEST_P(Bf16Test, CrossEntropy) {
  for (const std::int64_t classes : {2, 10, 333}) {
    const Tensor logits = exact({5, classes}, 1), labels = numbers({5}, {0, 1, 1, 0, 1});
    for (const float smoothing : {0.0f, 0.1f})
      compare({logits}, {{5, classes}}, {{2}}, {.terms = 64}, {.roundings = 0, .terms = 64}, [&](auto& from, auto& to) {
        backend->loss().cross_entropy(from[0], labels, 0.5f, smoothing, to.plain[0], to.activations[0]);
      });
    compare({logits}, {}, {{1}}, {}, {.roundings = 0, .terms = 0},
            [&](auto& from, auto& to) { backend->loss().count_in_top(from[0], labels, 2, to.plain[0].reshaped({})); });
  }
}

TEST_P(Bf16Test, RecurrentLayers) {
  struct Sizes {
    std::int64_t batch, width;
  };
  // Around a panel of 32 features, tiles of 8 rows and 512 inputs; odd numbers of inputs.
  for (const auto& [batch, width] : {Sizes{3, 33}, Sizes{1, 1}, Sizes{9, 64}, Sizes{8, 40}, Sizes{2, 275}})
    for (const RnnCell cell : {RnnCell::kTanh, RnnCell::kRelu, RnnCell::kLstm, RnnCell::kGru})
      for (const bool some_end : {false, true}) {
        constexpr std::int64_t kSteps = 5, kInputs = 7;
        const std::int64_t gates = gates_of(cell) * width;
        const auto scaled = [&](const Tensor& x) {  // so that sums of a step stay near 1
          const Tensor made = backend->empty(x.shape());
          backend->operators().forward(Affine{width > 33 ? 0.03125f : 0.25f, 0.0f}, x, made);
          return made;
        };
        const Tensor x = exact({batch, kSteps, kInputs}, 1), w_ih = scaled(exact({gates, kInputs}, 2)),
                     w_hh = scaled(exact({gates, width}, 3)), b_ih = exact({gates}, 4), b_hh = exact({gates}, 5),
                     dy = exact({batch, kSteps, width}, 6), h = exact({batch, width}, 7);
        RnnOptions options = {.cell = cell, .reverse = some_end};
        if (some_end) {
          std::vector<std::int32_t> lengths = {5, 0, 3};
          lengths.resize(static_cast<std::size_t>(batch), 4);
          options.lengths = numbers({batch}, lengths);
        }
        // h is rounded at each step: an error of 2⁻⁸ of it goes into the next step by weights whose sum is below
        // 33 · 0.25, and is at most so much larger after each; what cells do with it has slopes of at most 1.
        const double roundings = 8.0 * kSteps;
        compare({x, w_ih, w_hh, b_ih, b_hh, dy, h}, {{batch, kSteps, width}, {batch, kSteps, kInputs}},
                {{gates, kInputs}, {gates, width}, {gates}, {gates}},
                {.roundings = roundings, .terms = 500, .scale = 3}, {.roundings = roundings, .terms = 500, .scale = 15},
                [&](auto& from, auto& to) {
                  const RnnWeights weights = {.w_ih = from[1], .w_hh = from[2], .b_ih = from[3], .b_hh = from[4]};
                  const RnnState begin = {.h = from[6]};
                  const Tensor kept =
                      backend->rnn().forward(options, from[0], weights, begin, to.activations[0], {}, /*keep=*/true);
                  int called = 0;
                  backend->rnn().backward(
                      options, from[0], weights, begin, to.activations[0], kept, from[5],
                      {.w_ih = to.plain[0], .w_hh = to.plain[1], .b_ih = to.plain[2], .b_hh = to.plain[3]},
                      to.activations[1], [&] { ++called; });
                  EXPECT_EQ(called, 1);
                });
      }
}

// A sequence in two parts has the bits of the whole one, if its state is handed on: h is rounded at each step.
TEST_P(Bf16Test, RecurrentLayersInPieces) {
  for (const RnnCell cell : {RnnCell::kTanh, RnnCell::kGru}) {
    constexpr std::int64_t kWidth = 20;
    const std::int64_t gates = gates_of(cell) * kWidth;
    const RnnWeights weights = {
        .w_ih = as_bf16(exact({gates, 4}, 2)), .w_hh = as_bf16(exact({gates, kWidth}, 3)), .b_ih = {}, .b_hh = {}};
    const Tensor x = as_bf16(exact({1, 6, 4}, 1)), y = backend->empty({1, 6, kWidth}, DType::kBF16);
    const Tensor h = backend->empty({1, kWidth}, DType::kBF16);
    backend->rnn().forward({.cell = cell}, x, weights, {}, y, {.h = h}, false);
    Tensor state = {};
    for (const std::int64_t begin : {0, 2}) {
      const std::int64_t end = begin == 0 ? 2 : 6;
      const Tensor part = x.reshaped({6, 4}).slice(begin, end).reshaped({1, end - begin, 4});
      const Tensor made = backend->empty({1, end - begin, kWidth}, DType::kBF16);
      const Tensor next = backend->empty({1, kWidth}, DType::kBF16);
      backend->rnn().forward({.cell = cell}, part, weights, {.h = state}, made, {.h = next}, false);
      state = next;
      for (std::int64_t i = 0; i < made.count(); ++i)
        EXPECT_EQ(made.data<BFloat16>()[i].bits, y.data<BFloat16>()[begin * kWidth + i].bits);
    }
    for (std::int64_t i = 0; i < h.count(); ++i) EXPECT_EQ(state.data<BFloat16>()[i].bits, h.data<BFloat16>()[i].bits);
  }
}

TEST_P(Bf16Test, OptimizersWriteTheRoundedCopy) {
  constexpr std::int64_t kCount = 40000;  // several pieces, and several threads
  const Tensor p = exact({kCount}, 1), g = exact({kCount}, 2), control = backend->zeros({StepControl::kSize});
  const Tensor alone = backend->empty({kCount}), copy = unset({kCount}, DType::kBF16);
  backend->pointwise().copy(p, alone);
  control.f32()[SgdRule::kRate] = 0.37f;
  control.f32()[StepControl::kGradientScale] = control.f32()[StepControl::kApply] = 1.0f;
  UpdateArrays with = {.count = kCount, .gradient = g.f32(), .parameter = p.f32(), .copy = {copy.data<BFloat16>()}};
  UpdateArrays without = {.count = kCount, .gradient = g.f32(), .parameter = alone.f32()};
  backend->optim().update(SgdRule{}, control, std::span(&with, 1), {});
  backend->optim().update(SgdRule{}, control, std::span(&without, 1), {});
  for (std::int64_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(p.f32()[i], alone.f32()[i]);
    ASSERT_EQ(copy.data<BFloat16>()[i].bits, BFloat16::from_float(p.f32()[i]).bits);
  }
}

// A byte each: an error of half a step of the row's scale, in all rows, for one sample and for several.
TEST(Int8Rows, AreNearTheWeights) {
  for (const int threads : {1, 2}) {
    const auto backend = make_cpu_backend(threads);
    ASSERT_TRUE(backend->linear().multiplies_int8_rows());
    for (const auto& [in, out] : {std::pair{1, 1}, {7, 5}, {16, 4}, {67, 9}, {768, 130}}) {
      const Tensor w = random_tensor(*backend, {out, in}, 1), b = random_tensor(*backend, {out}, 2);
      for (std::int64_t i = 0; i < in; ++i) w.f32()[i] = 0.0f;  // a row without a scale
      const Int8Rows rows = {.values = backend->empty(w.shape(), DType::kU8), .scales = backend->empty({out})};
      backend->linear().to_int8_rows(w, rows);
      const auto* const values = reinterpret_cast<const std::int8_t*>(rows.values.data<std::uint8_t>());
      for (std::int64_t i = 0; i < w.count(); ++i) {
        const float scale = rows.scales.f32()[i / in];
        ASSERT_NEAR(static_cast<float>(values[i]) * scale, w.f32()[i], 0.5001f * scale);
      }
      for (const std::int64_t n : {0, 1, 3}) {
        const Tensor x = random_tensor(*backend, {n, in}, 3), y = backend->empty({n, out});
        backend->linear().forward_int8_rows(x, rows, b, Epilogue::kRelu, y);
        for (std::int64_t r = 0; r < n; ++r)
          for (std::int64_t o = 0; o < out; ++o) {
            double sum = b.f32()[o], terms = std::abs(sum);
            for (std::int64_t i = 0; i < in; ++i) {
              const double term = double{x.f32()[r * in + i]} * values[o * in + i] * double{rows.scales.f32()[o]};
              sum += term;
              terms += std::abs(term);
            }
            ASSERT_NEAR(y.f32()[r * out + o], std::max(sum, 0.0), (in + 4.0) * kF32Roundoff * terms);
          }
      }
    }
  }
}

// Of a parameter until its value changes, and where nothing is recorded.
TEST(Int8Rows, OfAParameter) {
  const auto backend = make_cpu_backend(1);
  Parameter w(*backend, {3, 8});
  backend->pointwise().copy(random_tensor(*backend, {3, 8}, 1), w.value());
  const auto result = [&](bool recording) {
    Tape tape(*backend);
    tape.set_recording(recording);
    return testing::values_of(linear(tape, tape.input(random_tensor(*backend, {1, 8}, 2)), w, nullptr).value());
  };
  const auto exact = result(false);
  w.quantize_rows();
  ASSERT_NE(w.int8_rows(), nullptr);
  EXPECT_NE(result(false), exact);
  EXPECT_EQ(result(true), exact);
  w.changed();
  EXPECT_EQ(w.int8_rows(), nullptr);
  EXPECT_EQ(result(false), exact);
}

INSTANTIATE_TEST_SUITE_P(Threads, Bf16Test, ::testing::Values(1, 2));

// Where no instruction set has it, an operator says so.
TEST(Bf16Refusal, WhereTheCpuHasNoAvx512) {
  const auto backend = make_cpu_backend(1);
  EXPECT_EQ(backend->computes_in(DType::kBF16), cpu_bf16() != CpuBf16::kNone);
  if (cpu_kernel_isa().starts_with("avx512"))
    EXPECT_TRUE(backend->computes_in(DType::kBF16));
  else
    EXPECT_FALSE(backend->computes_in(DType::kBF16));
}

}  // namespace
}  // namespace lockstep::nn
