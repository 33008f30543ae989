// lockstep's communication hooks on several ranks, against sums in f64.
#include "base/error.h"
#include "lockstep/ddp/comm_hook.h"
#include "lockstep/ddp/reducer.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>

#include "tests/support/ranks.h"
#include "tests/support/refusal.h"

namespace lockstep::ddp {
namespace {

using lockstep::testing::group;
using ::testing::HasSubstr;

std::vector<SlotSpec> layers() {
  return {{.name = "conv.weight", .count = 64 * 75, .rows = 64},
          {.name = "conv.bias", .count = 64},
          {.name = "fc.weight", .count = 100 * 131, .rows = 100},
          {.name = "one", .count = 1},
          {.name = "fc.bias", .count = 100}};
}

// Of one rank, slot and step: of magnitudes that differ from slot to slot.
std::vector<float> gradient_of(int rank, std::size_t slot, std::size_t count, int step) {
  std::mt19937 random(static_cast<unsigned>(1000 * rank + 100 * step) + static_cast<unsigned>(slot));
  std::normal_distribution<float> normal(0.1f, 1.0f);
  std::vector<float> values(count);
  for (float& value : values) value = std::ldexp(normal(random), -4 * static_cast<int>(slot));
  return values;
}

std::vector<double> true_sums(std::size_t slot, std::size_t count, int step) {
  std::vector<double> sums(count);
  for (int rank = 0; rank < group().size(); ++rank) {
    const auto one = gradient_of(rank, slot, count, step);
    for (std::size_t i = 0; i < count; ++i) sums[i] += static_cast<double>(one[i]);
  }
  return sums;
}

/// A step in which all slots have gradients, on the ranks that `has_samples`.
void run_step(Reducer& reducer, int step, bool has_samples = true) {
  reducer.begin_step(step);
  if (has_samples) {
    for (std::size_t slot = 0; slot < reducer.slots(); ++slot) {
      std::ranges::copy(gradient_of(group().rank(), slot, reducer.gradient<float>(slot).size(), step),
                        reducer.gradient<float>(slot).begin());
      reducer.mark_ready(slot);
    }
  } else {
    reducer.contribute_nothing();
  }
  reducer.finish({}, [](auto) {});
}

double norm(std::span<const double> values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

/// |result - wanted| of a slot.
double distance(const Reducer& reducer, std::size_t slot, std::vector<double> wanted) {
  const auto result = reducer.gradient<float>(slot);
  for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] -= static_cast<double>(result[i]);
  return norm(wanted);
}

/// Of all ranks' gradients together: what their rounding is relative to.
double magnitude(std::size_t slot, std::size_t count, int step) {
  double sum = 0;
  for (int rank = 0; rank < group().size(); ++rank) {
    const auto one = gradient_of(rank, slot, count, step);
    sum += norm(std::vector<double>(one.begin(), one.end()));
  }
  return sum;
}

void expect_same_on_all_ranks(const Reducer& reducer) {
  std::vector<std::byte> mine;
  for (std::size_t slot = 0; slot < reducer.slots(); ++slot) {
    const auto bytes = reducer.storage(slot);
    mine.insert(mine.end(), bytes.begin(), bytes.end());
  }
  const auto all = group().all_gather_objects(mine);
  for (const auto& one : all) EXPECT_TRUE(one == all.front());
}

std::map<std::string, std::vector<float>> saved(CommHook& hook) {
  std::map<std::string, std::vector<float>> all;
  for (const auto& state : hook.state()) all[state.name].assign(state.values.begin(), state.values.end());
  return all;
}

struct Case {
  const char* spec;
  std::size_t bucket_bytes;
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.spec << " in " << one.bucket_bytes << " bytes"; }

class CommHooks : public ::testing::TestWithParam<Case> {
 protected:
  BucketLimits limits() const {
    return {.first_bucket_bytes = GetParam().bucket_bytes, .bucket_bytes = GetParam().bucket_bytes};
  }
  double rounding() const { return 3 * (std::string_view(GetParam().spec) == "fp16" ? 0x1p-11 : 0x1p-8) / 2; }
  bool feeds_back() const {
    const std::string_view spec = GetParam().spec;
    return spec.starts_with("powersgd") || spec.starts_with("topk");
  }
};

TEST_P(CommHooks, SumsOnAllRanksAlike) {
  Reducer reducer(group(), layers(), limits());
  reducer.register_comm_hook(make_comm_hook(GetParam().spec));
  EXPECT_EQ(reducer.comm_hook()->name(), GetParam().spec);
  for (int step = 1; step <= 5; ++step) {
    run_step(reducer, step);
    expect_same_on_all_ranks(reducer);
    for (std::size_t slot = 0; slot < reducer.slots(); ++slot) {
      const std::size_t count = reducer.gradient<float>(slot).size();
      // Three roundings: of a rank's, of a host's sum, of the sum.
      const double most = group().size() == 1 ? 1e-6 : feeds_back() ? 4.0 : rounding();
      EXPECT_LE(distance(reducer, slot, true_sums(slot, count, step)), most * magnitude(slot, count, step))
          << "slot " << slot << " step " << step;
    }
    if (step == 2) reducer.rebuild_buckets(reducer.observed_order());
  }
  EXPECT_EQ(reducer.comm_hook()->fallbacks(), 0);
}

// What has been handed out and what all ranks still owe are all gradients that there were.
TEST_P(CommHooks, LoseNothingOverAllSteps) {
  if (!feeds_back()) GTEST_SKIP() << "it keeps nothing";
  constexpr int kSteps = 12;
  Reducer reducer(group(), layers(), limits());
  const auto hook = make_comm_hook(GetParam().spec);
  reducer.register_comm_hook(hook);
  std::vector<double> difference, wanted;
  for (int step = 1; step <= kSteps; ++step) {
    run_step(reducer, step, (step + group().rank()) % 3 != 0);
    std::size_t at = 0;
    for (std::size_t slot = 0; slot < reducer.slots(); ++slot) {
      const auto result = reducer.gradient<float>(slot);
      difference.resize(std::max(difference.size(), at + result.size()));
      wanted.resize(difference.size());
      for (int rank = 0; rank < group().size(); ++rank) {
        if ((step + rank) % 3 == 0) continue;
        const auto one = gradient_of(rank, slot, result.size(), step);
        for (std::size_t i = 0; i < one.size(); ++i) wanted[at + i] += static_cast<double>(one[i]);
      }
      for (std::size_t i = 0; i < result.size(); ++i) difference[at + i] += static_cast<double>(result[i]);
      at += result.size();
    }
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) difference[i] -= wanted[i];
  const double lost = norm(difference);
  // The errors, by slot; a hook that does not compress a slot keeps none of it.
  auto states = hook->state();
  ASSERT_EQ(states.front().name, "error");
  ASSERT_TRUE(states.front().of_rank);
  std::vector<float> owed(states.front().values.begin(), states.front().values.end());
  group().all_reduce(std::span(owed));
  const auto slots = layers();
  std::size_t at = 0, in_owed = 0;
  for (const auto& slot : slots) {
    const bool keeps = owed.size() == wanted.size() || slot.rows > 1;
    for (std::size_t i = 0; i < slot.count; ++i)
      if (keeps) difference[at + i] += static_cast<double>(owed[in_owed + i]);
    at += slot.count;
    if (keeps) in_owed += slot.count;
  }
  ASSERT_EQ(in_owed, owed.size());
  EXPECT_LT(norm(difference), 2e-5 * norm(wanted));
  if (group().size() == 1) return;
  EXPECT_GT(lost, 1e-3 * norm(wanted)) << "nothing was compressed";
}

TEST_P(CommHooks, ResumeWithTheSameBits) {
  const auto run = [&](int from, int to, std::map<std::string, std::vector<float>>* state) {
    Reducer reducer(group(), layers(), limits());
    const auto hook = make_comm_hook(GetParam().spec);
    reducer.register_comm_hook(hook);
    if (from > 1)
      for (const auto& one : hook->state()) std::ranges::copy(state->at(one.name), one.values.begin());
    for (int step = from; step <= to; ++step) run_step(reducer, step);
    if (state != nullptr) *state = saved(*hook);
    std::vector<float> result;
    for (std::size_t slot = 0; slot < reducer.slots(); ++slot)
      result.insert(result.end(), reducer.gradient<float>(slot).begin(), reducer.gradient<float>(slot).end());
    return result;
  };
  const auto wanted = run(1, 6, nullptr);
  std::map<std::string, std::vector<float>> state;
  run(1, 3, &state);
  const auto resumed = run(4, 6, &state);
  EXPECT_EQ(std::memcmp(wanted.data(), resumed.data(), wanted.size() * sizeof(float)), 0);
}

// A slot that no rank has is left alone; what was sent of earlier debts is owed again.
TEST_P(CommHooks, SlotsThatNobodyUsesLoseNothing) {
  Reducer reducer(group(), layers(), limits(), {.find_unused = true});
  const auto hook = make_comm_hook(GetParam().spec);
  reducer.register_comm_hook(hook);
  run_step(reducer, 1);
  const auto total = [&] {
    double sum = 0;
    for (const auto& state : hook->state())
      if (state.name == "error")
        for (const float value : state.values) sum += static_cast<double>(value);
    return group().all_gather_objects(std::as_bytes(std::span(&sum, 1)));
  };
  const auto sum_of = [](const std::vector<std::vector<std::byte>>& all) {
    double sum = 0;
    for (const auto& bytes : all) {
      double one = 0;
      std::memcpy(&one, bytes.data(), sizeof one);
      sum += one;
    }
    return sum;
  };
  const double before = sum_of(total());
  reducer.begin_step(2);
  reducer.contribute_nothing();
  std::size_t used = 0;
  reducer.finish({}, [&](std::span<const std::size_t> slots) { used += slots.size(); });
  EXPECT_EQ(used, 0u);
  EXPECT_NEAR(sum_of(total()), before, 1e-3 * (1 + std::abs(before)));
}

TEST_P(CommHooks, SendFewerBytes) {
  Reducer reducer(group(), layers(), limits());
  reducer.register_comm_hook(make_comm_hook(GetParam().spec));
  const auto bytes = reducer.bytes_sent();
  ASSERT_TRUE(bytes);
  EXPECT_EQ(bytes->without_hook > 0, group().size() > 1);
  EXPECT_LE(bytes->sent, 0.5 * bytes->without_hook);
}

constexpr std::size_t kTiny = 300, kDefault = std::size_t{25} << 20;
INSTANTIATE_TEST_SUITE_P(All, CommHooks,
                         ::testing::Values(Case{"bf16", kTiny}, Case{"bf16", kDefault}, Case{"bf16:exact", kDefault},
                                           Case{"fp16", kTiny}, Case{"fp16", kDefault}, Case{"powersgd:1", kTiny},
                                           Case{"powersgd:4", kDefault}, Case{"topk:2", kTiny},
                                           Case{"topk:5", kDefault}));

TEST(CommHookSpecs, AreRefusedWithTheNearestRightOne) {
  EXPECT_EQ(make_comm_hook("none"), nullptr);
  EXPECT_EQ(make_comm_hook("topk:0.5")->name(), "topk:0.5");
  EXPECT_REFUSED("bf16", make_comm_hook("bf15"));
  EXPECT_REFUSED("communication hook", make_comm_hook(""));
  EXPECT_REFUSED("none takes no :1", make_comm_hook("none:1"));
  EXPECT_REFUSED("bf16 takes :exact, not :exactly", make_comm_hook("bf16:exactly"));
  EXPECT_REFUSED("fp16 takes no :2", make_comm_hook("fp16:2"));
  EXPECT_REFUSED("without a rank", make_comm_hook("powersgd"));
  EXPECT_REFUSED("give powersgd:R", make_comm_hook("powersgd:"));
  for (const char* spec : {"powersgd:0", "powersgd:-1", "powersgd:1025", "powersgd:2.5", "powersgd:x"})
    EXPECT_REFUSED("powersgd:R with R from 1", make_comm_hook(spec)) << spec;
  for (const char* spec : {"topk:0", "topk:-1", "topk:100.1", "topk:nan", "topk:x", "topk:1%"})
    EXPECT_REFUSED("topk:P with P percent", make_comm_hook(spec)) << spec;
  EXPECT_THAT(comm_hook_placeholder(), HasSubstr("none|bf16[:exact]|fp16|powersgd:R|topk:P"));
}

// One step with gradients that the scale of the step before does not fit, and one with an infinity.
TEST(Fp16Hook, SendsABucketAgainThatDoesNotFit) {
  if (group().size() == 1) GTEST_SKIP() << "nothing is sent";
  Reducer reducer(group(), {{"w", 1000}, {"b", 3}}, {});
  const auto hook = make_comm_hook("fp16");
  reducer.register_comm_hook(hook);
  const auto step = [&](int number, float value) {
    reducer.begin_step(number);
    for (std::size_t slot = 0; slot < 2; ++slot) {
      std::ranges::fill(reducer.gradient<float>(slot), value);
      reducer.mark_ready(slot);
    }
    reducer.finish({}, [](auto) {});
    return std::pair{reducer.gradient<float>(0)[999], reducer.gradient<float>(1)[2]};
  };
  const auto n = static_cast<float>(group().size());
  EXPECT_EQ(step(1, 0x1p-10f).first, n * 0x1p-10f);
  EXPECT_EQ(hook->fallbacks(), 0);
  EXPECT_EQ(step(2, 0x1p-7f).first, n * 0x1p-7f);
  EXPECT_EQ(hook->fallbacks(), 0);
  EXPECT_EQ(step(3, 1234567.0f).second, n * 1234567.0f);
  EXPECT_EQ(hook->fallbacks(), 1);
  EXPECT_EQ(step(4, 0x1p+20f).first, n * 0x1p+20f);
  EXPECT_EQ(hook->fallbacks(), 1);
  const float headroom = hook->state().at(1).values[0];
  EXPECT_GT(headroom, 6) << "the slot that did not fit";
  EXPECT_EQ(step(5, std::numeric_limits<float>::infinity()).first, std::numeric_limits<float>::infinity());
  EXPECT_EQ(hook->fallbacks(), 2);
  EXPECT_EQ(hook->state().at(1).values[0], headroom) << "an infinity fits nowhere";
  EXPECT_EQ(step(6, 0x1p+20f).first, n * 0x1p+20f);
  // Gradients much smaller than the last ones keep what f16 has for them.
  EXPECT_EQ(step(7, 0x1p+4f).first, n * 0x1p+4f);
}

// Gradients that cancel are larger than their sum: the slot is scaled less, and stays in f16.
TEST(Fp16Hook, ScalesGradientsThatCancelLess) {
  if (group().size() != 2) GTEST_SKIP() << "of two ranks";
  Reducer reducer(group(), {{"w", 10}}, {});
  const auto hook = make_comm_hook("fp16");
  reducer.register_comm_hook(hook);
  for (int step = 1; step <= 8; ++step) {
    reducer.begin_step(step);
    std::ranges::fill(reducer.gradient<float>(0), group().rank() == 0 ? 1025.0f : -1024.0f);
    reducer.mark_ready(0);
    reducer.finish({}, [](auto) {});
    EXPECT_NEAR(reducer.gradient<float>(0)[0], 1.0f, 0.51f);
  }
  EXPECT_EQ(hook->fallbacks(), 1);
}

TEST(PowerSgdHook, MatricesOfItsRankAreExact) {
  constexpr std::size_t kRows = 40, kColumns = 30;
  Reducer reducer(group(), {{.name = "w", .count = kRows * kColumns, .rows = kRows}}, {});
  reducer.register_comm_hook(make_comm_hook("powersgd:2"));
  for (int step = 1; step <= 3; ++step) {
    reducer.begin_step(step);
    const auto g = reducer.gradient<float>(0);
    const auto value = [&](int rank, std::size_t i, std::size_t j) {
      const auto r = static_cast<double>(rank + step);
      return (r + 1) * std::sin(static_cast<double>(i)) * std::cos(static_cast<double>(j)) -
             r * static_cast<double>(i) * 0.01 * static_cast<double>(j % 7);
    };
    for (std::size_t i = 0; i < kRows; ++i)
      for (std::size_t j = 0; j < kColumns; ++j) g[i * kColumns + j] = static_cast<float>(value(group().rank(), i, j));
    reducer.mark_ready(0);
    reducer.finish({}, [](auto) {});
    std::vector<double> wanted(kRows * kColumns);
    for (int rank = 0; rank < group().size(); ++rank)
      for (std::size_t i = 0; i < wanted.size(); ++i) wanted[i] += value(rank, i / kColumns, i % kColumns);
    EXPECT_LT(distance(reducer, 0, wanted), 1e-5 * norm(wanted)) << "step " << step;
  }
}

// NaNs are not hidden by what compresses.
TEST(CommHooksOfNans, ArePropagated) {
  for (const char* spec : {"bf16", "fp16", "powersgd:1", "topk:1"}) {
    Reducer reducer(group(), {{.name = "w", .count = 400, .rows = 20}}, {});
    reducer.register_comm_hook(make_comm_hook(spec));
    for (int step = 1; step <= 2; ++step) {
      reducer.begin_step(step);
      std::ranges::fill(reducer.gradient<float>(0), 1.0f);
      if (step == 2 && group().rank() == group().size() - 1) reducer.gradient<float>(0)[7] = std::nanf("");
      reducer.mark_ready(0);
      reducer.finish({}, [](auto) {});
    }
    EXPECT_TRUE(std::ranges::any_of(reducer.gradient<float>(0), [](float value) { return std::isnan(value); })) << spec;
  }
}

}  // namespace
}  // namespace lockstep::ddp
