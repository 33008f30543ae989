// CUDA's optimizer kernels against the CPU's, over many arrays at once.
#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "base/error.h"
#include "lockstep/nn/optim/optimizers.h"
#include "nn/ops/cuda/update_chunk.h"
#include "nn/ops/update_rules.h"
#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn {
namespace {

using namespace lockstep::nn::testing;

// Around the width of an access and what a block does (2048), and more of them than one launch takes.
std::vector<std::int64_t> many_counts() {
  std::vector<std::int64_t> counts = {1, 3, 4, 5, 0, 64, 1000, 2047, 2048, 2049, 8192, 8193, 20003};
  for (std::int64_t i = 0; i < 70; ++i) counts.push_back(1 + i * 13 % 200);
  return counts;
}

// Arrays of these counts, one after the other, each `offset` elements after an aligned address.
class Layout {
 public:
  Layout(std::vector<std::int64_t> counts, int offset) : counts_(std::move(counts)) {
    for (const std::int64_t count : counts_) {
      begins_.push_back(total_ + offset);
      total_ += (count + offset + 15) / 16 * 16;
    }
  }
  std::int64_t total() const { return std::max<std::int64_t>(total_, 1); }

  // Of tensors of total() elements; those that are not defined are not there.
  std::vector<UpdateArrays> arrays(const Tensor& g, const Tensor& p, const Tensor& first, const Tensor& second,
                                   const Tensor& copy) const {
    std::vector<UpdateArrays> made;
    for (std::size_t i = 0; i < counts_.size(); ++i)
      made.push_back({.count = counts_[i],
                      .gradient = g.f32() + begins_[i],
                      .parameter = p.defined() ? p.f32() + begins_[i] : nullptr,
                      .first = first.defined() ? first.f32() + begins_[i] : nullptr,
                      .second = second.defined() ? second.f32() + begins_[i] : nullptr,
                      .copy = copy.defined() ? HalfCopy{copy.raw(), copy.dtype()} + begins_[i] : HalfCopy()});
    return made;
  }

 private:
  std::vector<std::int64_t> counts_, begins_;
  std::int64_t total_ = 0;
};

class CudaOptim : public DeviceTest {
 protected:
  CudaOptim() : layout(many_counts(), GetParam().offset), shape({layout.total()}) {}

  Tensor copy_of(const Tensor& host) {
    const Tensor made = cpu->empty(host.shape());
    cpu->pointwise().copy(host, made);
    return made;
  }
  Tensor positive(std::uint64_t seed) {
    const Tensor made = random_tensor(*cpu, shape, seed);
    for (float& v : made.span<float>()) v = std::abs(v);
    return made;
  }
  Tensor control_of(float rate, float decay, float second_scale, float gradient_scale, float go) {
    return tensor_of(*cpu, {StepControl::kSize}, {rate, decay, second_scale, 0.9f, 0.8f, gradient_scale, go});
  }
  Output in_and_out(const Tensor& initial) { return {initial.shape(), initial.dtype(), initial}; }

  // The copies are as the parameters that lie beside them, rounded; where there is no parameter, they are as before.
  void expect_copies(const Tensor& p, const Tensor& copies, DType half) {
    const Tensor expected = copy_of(p);
    std::vector<bool> written(static_cast<std::size_t>(layout.total()));
    for (const UpdateArrays& a : layout.arrays(expected, {}, {}, {}, {}))
      for (std::int64_t i = 0; i < a.count; ++i) {
        const std::int64_t at = a.gradient - expected.f32() + i;
        expected.f32()[at] = as_rounded(expected.f32()[at], half);
        written[static_cast<std::size_t>(at)] = true;
      }
    for (std::int64_t i = 0; i < layout.total(); ++i)
      if (!written[static_cast<std::size_t>(i)]) expected.f32()[i] = kNaN;
    expect_same(expected, copies);
  }

  std::unique_ptr<OptimKernels> optim = cuda::make_optim_kernels(context);
  Layout layout;
  Shape shape;
};

// One of each rule, in their order: those that families make by their defaults, and with one setting at 0 or 0.5 or
// set.
const std::vector<UpdateRule> kRules = [] {
  std::map<std::size_t, UpdateRule> rules;
  for (const OptimizerFamily* family : optimizer_families()) {
    const auto add = [&](const std::string& name, const SettingValue& value) {
      Settings given;
      for (const SettingSpec& spec : family->settings)
        if (spec.name == "trust-coefficient") given.set(spec.name, 0.02);  // steps so long that they show
      if (!name.empty()) given.set(name, value);
      constexpr double kDecay = 0.01;
      const UpdateRule rule = family->method(resolve(family->settings, given, family->name), kDecay).rule(kDecay);
      rules.try_emplace(rule.index(), rule);
    };
    add("", false);
    for (const SettingSpec& spec : family->settings) {
      if (std::holds_alternative<bool>(spec.fallback.any())) add(spec.name, true);
      if (!std::holds_alternative<double>(spec.fallback.any())) continue;
      for (const double value : {0.0, 0.5}) add(spec.name, value);
    }
  }
  for (const UpdateRule& internal : {UpdateRule(BlendRule::average(0.99)), UpdateRule(ScaleRule())})
    rules.try_emplace(internal.index(), internal);
  std::vector<UpdateRule> all;
  for (const auto& [index, rule] : rules) all.push_back(rule);
  return all;
}();

// Numbers of an f64 tensor for all blocks of the layout, and those of each array's: `each` of a block.
std::int64_t all_blocks(const std::vector<UpdateArrays>& all) {
  std::int64_t blocks = 0;
  for (const UpdateArrays& a : all) blocks += norm_blocks(a.count);
  return blocks;
}
void give_sums(std::vector<UpdateArrays>& all, const Tensor& sums, std::int64_t each) {
  double* to = sums.data<double>();
  for (UpdateArrays& a : all) {
    a.sums = to;
    to += each * norm_blocks(a.count);
  }
}
// Whose factors compute_factors() finds: arrays without elements are left out.
std::vector<UpdateArrays> with_elements(std::vector<UpdateArrays> all) {
  std::erase_if(all, [](const UpdateArrays& a) { return a.count == 0; });
  return all;
}

TEST_P(CudaOptim, EveryRule) {
  ASSERT_EQ(kRules.size(), std::variant_size_v<UpdateRules>);
  for (std::size_t i = 0; i < kRules.size(); ++i)
    for (const auto copied : {std::optional<DType>(), std::optional(DType::kBF16), std::optional(DType::kF16)}) {
      const bool wants_copy = copied.has_value();
      const DType half = copied.value_or(DType::kBF16);
      const UpdateRule& rule = kRules[i];
      SCOPED_TRACE(std::visit([](const auto& by) { return by.kName; }, rule));
      ASSERT_EQ(rule.index(), i);
      const bool has_first = moments_of(rule) > 0, has_second = moments_of(rule) > 1;
      const Tensor g = random_tensor(*cpu, shape, 1), p = random_tensor(*cpu, shape, 2);
      const Tensor m = positive(3), v = positive(4);  // of some rules the first one is a sum of squares
      const Operand gradient = plains(g), control = plains(control_of(0.01f, 0.999f, 1.5f, 0.5f, 1.0f));
      const auto sizes = with_elements(layout.arrays(g, {}, {}, {}, {}));
      const std::int64_t blocks = all_blocks(sizes), size = std::ssize(sizes);
      const std::vector<Output> outputs = {
          in_and_out(p),        in_and_out(m), in_and_out(v), {shape, half}, {{2 * blocks}, DType::kF64},
          {{size}, DType::kF32}};
      const auto [expected, got] =
          compare(cpu->optim(), *optim, outputs, {{}, {}, {}}, [&](auto& on, Side at, const auto& out) {
            const Tensor copies = wants_copy && at.on_device ? out[3] : Tensor();
            auto all = with_elements(layout.arrays(at(gradient), out[0], has_first ? out[1] : Tensor(),
                                                   has_second ? out[2] : Tensor(), copies));
            if (has_norms(rule)) {
              give_sums(all, out[4], 2);
              on.prepare(rule, at(control), all);
              on.compute_factors(rule, all, out[5]);
            }
            on.update(rule, at(control), all, has_norms(rule) ? out[5] : Tensor());
          });
      if (wants_copy) expect_copies(got[0], got[3], half);
      if (!has_norms(rule)) continue;
      for (std::int64_t b = 0; b < 2 * blocks; ++b)
        ASSERT_NEAR(got[4].data<double>()[b], expected[4].data<double>()[b], 1e-5 * expected[4].data<double>()[b])
            << "sum " << b;
      expect_close(expected[5], got[5], {});
    }
}

TEST_P(CudaOptim, NoUpdateUnlessApplied) {
  const Tensor g = random_tensor(*cpu, shape, 1), p = random_tensor(*cpu, shape, 2), v = positive(3);
  const Tensor gradient = plain(g), c = plain(control_of(0.1f, 0.9f, 1.0f, 1.0f, 0.0f));
  const Tensor factors = plain(cpu->zeros({std::ssize(many_counts())}));
  const auto got = results({in_and_out(p), in_and_out(v), in_and_out(v)}, [&](const std::vector<Tensor>& out) {
    for (const UpdateRule& rule : kRules) {
      const auto all = layout.arrays(gradient, out[0], out[1], out[2], {});
      if (has_norms(rule)) optim->prepare(rule, c, all);
      optim->update(rule, c, all, factors);
    }
  });
  expect_same(p, got[0]);
  expect_same(v, got[1]);
  expect_same(v, got[2]);
}

TEST_P(CudaOptim, NoArrays) {
  const Tensor c = plain(control_of(0.1f, 0.9f, 1.0f, 1.0f, 1.0f)), start = cpu->empty({1}, DType::kF64);
  *start.data<double>() = 3.0;
  const auto got = results({in_and_out(start)}, [&](const std::vector<Tensor>& out) {
    for (const UpdateRule& rule : kRules) optim->update(rule, c, {}, {});
    optim->squares({});
    const UpdateArrays empty{.sums = out[0].data<double>()};
    optim->squares({&empty, 1});
    for (const UpdateRule& rule : kRules) optim->update(rule, c, {&empty, 1}, {});
  });
  EXPECT_EQ(*got[0].data<double>(), 3.0);
}

TEST_P(CudaOptim, SumsOfSquares) {
  const Operand gradient = plains(random_tensor(*cpu, shape, 1));
  const std::int64_t blocks = all_blocks(layout.arrays(gradient.host, {}, {}, {}, {}));
  const auto [expected, got] = compare(cpu->optim(), *optim, {{{blocks}, DType::kF64}, {{1}, DType::kF64}}, {},
                                       [&](auto& on, Side at, const auto& out) {
                                         auto all = layout.arrays(at(gradient), {}, {}, {}, {});
                                         give_sums(all, out[0], 1);
                                         on.squares(all);
                                         on.add_up(out[0], out[1]);
                                       });
  for (const std::size_t output : {0u, 1u})
    for (std::int64_t b = 0; b < got[output].count(); ++b) {
      const double sum = expected[output].data<double>()[b];
      ASSERT_NEAR(got[output].data<double>()[b], sum, 1e-13 * sum);
    }
}

// The order of additions depends on the sizes, not on where the gradients lie.
TEST_P(CudaOptim, SumsOfSquaresDoNotDependOnAlignment) {
  std::vector<double> sums;
  for (const int offset : {0, 1, 2, 3, 4}) {
    const Tensor g = on_device(random_tensor(*cpu, {20003}, 1), DType::kF32, offset);
    const auto got =
        results({{{norm_blocks(20003)}, DType::kF64}, {{1}, DType::kF64}}, [&](const std::vector<Tensor>& out) {
          const UpdateArrays arrays{.count = 20003, .gradient = g.f32(), .sums = out[0].data<double>()};
          optim->squares({&arrays, 1});
          optim->add_up(out[0], out[1]);
        });
    sums.push_back(*got[1].data<double>());
  }
  for (const double sum : sums) EXPECT_EQ(sum, sums[0]);
}

TEST_P(CudaOptim, ComputeUpdateScale) {
  const Tensor before = control_of(0.1f, 0.2f, 0.3f, -1.0f, -1.0f);
  for (const float value : {1.5f, kNaN, kInfinity, -kInfinity})
    for (const double clip : {0.0, 1.0, 100.0})
      for (const double norm : {0.0, 2.0, 50.0, static_cast<double>(kInfinity), static_cast<double>(kNaN)}) {
        SCOPED_TRACE(fmt::format("loss {}, clip {}, norm {}", value, clip, norm));
        const Tensor squares = cpu->empty({1}, DType::kF64);
        *squares.data<double>() = norm * norm;
        const Operand loss = plains(tensor_of(*cpu, {2}, {value, 3.0f}));
        const Operand norms = {squares, clip > 0 ? plain(squares) : Tensor()};
        compare(
            cpu->optim(), *optim, {in_and_out(before)}, {{DType::kF32, 1.0, 0.0}},
            [&](auto& on, Side at, const auto& out) { on.compute_update_scale(at(loss), at(norms), clip, out[0]); });
      }
}

// compute_scaled_update(), count_step() and update_loss_scale(), in the order of a step.
TEST_P(CudaOptim, ScaledSteps) {
  const Tensor before = tensor_of(*cpu, {StepControl::kSize}, std::vector<float>(StepControl::kSize, -1.0f));
  const Tensor five = cpu->empty({StepControl::kRates}, DType::kF64);
  std::ranges::copy(std::array{0.01, 0.9, 0.02, 1.0, 0.03}, five.data<double>());
  const Operand rates = plains(five);
  using Correction = RateCorrection;
  const RateCorrections corrections = {{{.beta_rate = 1},
                                        {},
                                        {.beta = 0.9, .kind = Correction::kNadamGradient, .decay = 0.004},
                                        {.beta = 0.999, .kind = Correction::kRootOfBias},
                                        {.beta = 0.9, .kind = Correction::kNadamMoment, .decay = 0.004}}};
  const LossScaleRule rule = {.interval = 3};
  for (const float value : {1.5f, kNaN})
    for (const double clip : {0.0, 1.0, 1e9})
      for (const double norm : {0.0, 3e5, static_cast<double>(kInfinity), static_cast<double>(kNaN)})
        for (const std::int64_t done : {0, 5, 100000}) {
          SCOPED_TRACE(fmt::format("loss {}, clip {}, norm {}, step {}", value, clip, norm, done));
          const Tensor squares = cpu->empty({1}, DType::kF64), steps = cpu->empty({1}, DType::kI64);
          *squares.data<double>() = norm * norm;
          *steps.data<std::int64_t>() = done;
          const Tensor first = tensor_of(*cpu, {ScalerState::kSize}, {65536.0f, 2.0f, 7.0f, 0.0f, 1.0f});
          const Operand loss = plains(tensor_of(*cpu, {2}, {value, 3.0f})), squares_of_both = plains(squares);
          const auto [expected, got] =
              compare(cpu->optim(), *optim, {in_and_out(before), in_and_out(first), in_and_out(steps)},
                      {{DType::kF32, 1.0, 0.0}, kSame, kSame}, [&](auto& on, Side at, const auto& out) {
                        on.compute_scaled_update({.loss = at(loss),
                                                  .squares = at(squares_of_both),
                                                  .clip_norm = clip,
                                                  .steps = out[2],
                                                  .missed = done / 2,
                                                  .rates = at(rates),
                                                  .corrections = corrections},
                                                 out[1], out[0]);
                        on.count_step(out[0], out[2]);
                        on.update_loss_scale(rule, out[1]);
                      });
          const bool skipped = !std::isfinite(norm);
          EXPECT_EQ(got[1].f32()[ScalerState::kScale], skipped ? 32768.0f : 131072.0f);
          EXPECT_EQ(*got[2].data<std::int64_t>(), done + (skipped || std::isnan(value) ? 0 : 1));
        }
}

INSTANTIATE_TEST_SUITE_P(, CudaOptim, kDeviceCases, name_of_case);

}  // namespace
}  // namespace lockstep::nn
