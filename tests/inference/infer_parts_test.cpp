// What lockstep infer is made of, piece by piece.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <thread>

#include "base/error.h"
#include "inference/continuation.h"
#include "inference/model.h"
#include "inference/ordered_queue.h"
#include "inference/report.h"
#include "inference/streams.h"
#include "inference/workers.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::inference {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Read = OrderedQueue::Read;

constexpr auto kNoWait = std::chrono::milliseconds(0);
constexpr auto kLong = std::chrono::milliseconds(10'000);

std::string read(OrderedQueue& queue, Read expected, std::chrono::milliseconds patience = kNoWait) {
  std::string piece;
  EXPECT_EQ(queue.read(piece, patience), expected);
  return piece;
}

TEST(OrderedQueue, ResultsKeepTheOrderOfJobs) {
  OrderedQueue queue(3, 4);
  EXPECT_EQ(queue.take(), 0u);
  EXPECT_EQ(queue.take(), 1u);
  EXPECT_EQ(queue.take(), 2u);
  EXPECT_EQ(queue.take(), std::nullopt);
  EXPECT_TRUE(queue.put(2, "c"));
  queue.finish(2);
  EXPECT_EQ(read(queue, Read::kNothingYet), "");
  EXPECT_TRUE(queue.put(0, "a"));
  EXPECT_EQ(read(queue, Read::kPiece), "a");  // while it is still being worked on
  EXPECT_TRUE(queue.put(1, "b"));
  EXPECT_EQ(read(queue, Read::kNothingYet), "");
  EXPECT_TRUE(queue.put(0, "A"));
  queue.finish(0);
  EXPECT_EQ(read(queue, Read::kPiece), "Ab");
  queue.finish(1);
  EXPECT_EQ(read(queue, Read::kPiece), "c");
  EXPECT_EQ(read(queue, Read::kEnd), "");
}

TEST(OrderedQueue, IsBounded) {
  OrderedQueue queue(10, 2);
  EXPECT_EQ(queue.take(), 0u);
  EXPECT_EQ(queue.take(), 1u);
  queue.finish(1);
  std::optional<std::uint64_t> third;
  std::thread waiting([&] { third = queue.take(); });
  EXPECT_EQ(read(queue, Read::kNothingYet, std::chrono::milliseconds(30)), "");
  queue.put(0, "x");
  queue.finish(0);
  EXPECT_EQ(read(queue, Read::kPiece, kLong), "x");
  waiting.join();
  EXPECT_EQ(third, 2u);
}

TEST(OrderedQueue, ClosingEndsEverything) {
  OrderedQueue queue(10, 1);
  EXPECT_EQ(queue.take(), 0u);
  std::optional<std::uint64_t> next = 7;
  std::thread waiting([&] { next = queue.take(); });
  queue.close();
  waiting.join();
  EXPECT_EQ(next, std::nullopt);
  EXPECT_FALSE(queue.put(0, "late"));
}

TEST(OrderedQueue, EarlierResultsComeBeforeAFailure) {
  OrderedQueue queue(4, 4);
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(queue.take(), i);
  queue.put(0, "a");
  queue.finish(0);
  queue.put(1, "b");
  queue.finish(1);
  queue.fail(std::make_exception_ptr(IoError("first")));
  queue.fail(std::make_exception_ptr(IoError("second")));
  EXPECT_EQ(read(queue, Read::kPiece), "ab");
  std::string piece;
  try {
    queue.read(piece, kLong);
    ADD_FAILURE();
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(), "first");
  }
}

TEST(OrderedQueue, EndsWithoutJobs) {
  OrderedQueue queue(0, 1);
  EXPECT_EQ(queue.take(), std::nullopt);
  EXPECT_EQ(read(queue, Read::kEnd, kLong), "");
}

TEST(OrderedQueue, ManyThreads) {
  constexpr std::uint64_t kJobs = 2000;
  OrderedQueue queue(kJobs, 5);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      while (const auto job = queue.take()) {
        if (*job % 3 != 0) queue.put(*job, std::to_string(*job));
        queue.put(*job, " ");
        queue.finish(*job);
      }
    });
  std::string all, piece, expected;
  while (queue.read(piece, kLong) != Read::kEnd) all += piece;
  for (auto& thread : threads) thread.join();
  for (std::uint64_t i = 0; i < kJobs; ++i) expected += (i % 3 != 0 ? std::to_string(i) : "") + " ";
  EXPECT_EQ(all, expected);
}

TEST(TokenChooser, GreedyTakesTheFirstOfTheLargest) {
  TokenChooser greedy({.temperature = 0});
  const std::vector<float> logits = {1, 3, 3, -2};
  for (std::uint64_t i = 0; i < 5; ++i) EXPECT_EQ(greedy.choose(logits, i, i), 1);
}

TEST(TokenChooser, DrawsAsOftenAsSoftmaxSays) {
  const std::vector<float> logits = {0, 1, 2, -std::numeric_limits<float>::infinity()};
  for (const double temperature : {0.5, 1.0, 2.0}) {
    TokenChooser chooser({.temperature = temperature, .seed = 3});
    std::map<std::int32_t, int> counts;
    constexpr int kDraws = 20000;
    for (int i = 0; i < kDraws; ++i) ++counts[chooser.choose(logits, 1, static_cast<std::uint64_t>(i))];
    double sum = 0;
    for (int t = 0; t < 3; ++t) sum += std::exp(t / temperature);
    for (int t = 0; t < 3; ++t) {
      const double p = std::exp(t / temperature) / sum;
      // Five standard deviations.
      EXPECT_NEAR(counts[t], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p))) << t << " at " << temperature;
    }
    EXPECT_EQ(counts[3], 0);
  }
}

TEST(TokenChooser, TopKKeepsTheLikeliest) {
  const std::vector<float> logits = {5, 1, 4, 4, 4, 0};
  TokenChooser chooser({.temperature = 10, .top_k = 3, .seed = 1});
  std::map<std::int32_t, int> counts;
  for (std::uint64_t i = 0; i < 3000; ++i) ++counts[chooser.choose(logits, 0, i)];
  EXPECT_EQ(counts.size(), 3u);
  for (const std::int32_t token : {0, 2, 3}) EXPECT_GT(counts[token], 700) << token;
  TokenChooser one({.temperature = 10, .top_k = 1});
  EXPECT_EQ(one.choose(logits, 0, 0), 0);
  // More than there are, and all, is the same.
  TokenChooser all({.temperature = 1, .top_k = 0}), more({.temperature = 1, .top_k = 100});
  for (std::uint64_t i = 0; i < 50; ++i) EXPECT_EQ(all.choose(logits, 2, i), more.choose(logits, 2, i));
}

TEST(TokenChooser, DependsOnSeedTextAndPositionAlone) {
  const std::vector<float> logits(100, 0.0f);
  const auto draw = [&](std::uint64_t seed, std::uint64_t text) {
    TokenChooser chooser({.seed = seed});
    std::vector<std::int32_t> tokens;
    for (std::uint64_t i = 0; i < 20; ++i) tokens.push_back(chooser.choose(logits, text, i));
    return tokens;
  };
  EXPECT_EQ(draw(1, 0), draw(1, 0));
  EXPECT_NE(draw(1, 0), draw(2, 0));
  EXPECT_NE(draw(1, 0), draw(1, 1));
}

TEST(TokenChooser, ExtremesAreNumbersAndOthersAreRefused) {
  const float largest = std::numeric_limits<float>::max(), inf = std::numeric_limits<float>::infinity();
  TokenChooser cold({.temperature = 1e-300});
  EXPECT_EQ(cold.choose(std::vector{0.0f, largest, -largest}, 0, 0), 1);
  TokenChooser hot({.temperature = 1e300});
  EXPECT_NO_THROW(hot.choose(std::vector{0.0f, largest, -largest}, 0, 0));
  TokenChooser plain({});
  EXPECT_THROW(plain.choose(std::vector{0.0f, std::nanf("")}, 0, 0), DivergedError);
  EXPECT_THROW(plain.choose(std::vector{0.0f, inf}, 0, 0), DivergedError);
  EXPECT_THROW(plain.choose(std::vector{-inf, -inf}, 0, 0), DivergedError);
}

TEST(InferReport, PercentilesAreNearestRanks) {
  std::vector<double> values;
  EXPECT_EQ(percentile(values, 50), 0);
  for (int i = 100; i >= 1; --i) values.push_back(i);
  EXPECT_EQ(percentile(values, 50), 50);
  EXPECT_EQ(percentile(values, 90), 90);
  EXPECT_EQ(percentile(values, 99), 99);
  EXPECT_EQ(percentile(values, 100), 100);
  values = {3};
  EXPECT_EQ(percentile(values, 1), 3);
}

TEST(InferReport, ReportsRatesAndLatencies) {
  InferReport report{.kind = InferReport::Kind::kImages, .device = "cpu:0,1", .streams = 2, .wall_s = 2, .tally = {}};
  report.tally.results = 4;
  report.tally.corrupt = 1;
  report.tally.result_ms = {1, 2, 3, 4};
  EXPECT_EQ(text_of(report),
            "4 images in 2.00 s on cpu:0,1, 2 streams: 2.0 images/s, latency p50 2.00 ms  p90 4.00 ms  p99 4.00 ms, 1 "
            "corrupt");
  EXPECT_THAT(json_of(report), HasSubstr(R"("results_per_s":2.0)"));
  EXPECT_THAT(json_of(report), HasSubstr(R"("device":"cpu:0,1","streams":2,"batch":1)"));
  report.batch = 3;
  EXPECT_THAT(text_of(report), HasSubstr("2 streams, batches of 3: "));
  report.kind = InferReport::Kind::kTexts;
  report.tally.tokens = 10;
  EXPECT_THAT(text_of(report), HasSubstr("4 texts in"));
  EXPECT_THAT(text_of(report), HasSubstr("10 tokens, 5.0 tokens/s"));
}

TEST(Streams, AreSharedOutAmongDevices) {
  const auto devices_of = [](int streams, std::size_t devices) {
    std::vector<std::size_t> all;
    for (int i = 0; i < streams; ++i) all.push_back(device_of_stream(i, streams, devices));
    return all;
  };
  EXPECT_THAT(devices_of(4, 2), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(devices_of(5, 3), ElementsAre(0, 0, 1, 1, 2));
  EXPECT_THAT(devices_of(3, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(devices_of(2, 7), ElementsAre(0, 1));
  EXPECT_THAT(devices_of(1, 1), ElementsAre(0));
}

TEST(RandomInput, IsReadInPyTorchsOrder) {
  const RandomInput images = parse_random_input("random:2x3x224x160,7");
  EXPECT_EQ(images.batch, 2);
  EXPECT_THAT(images.sample, ElementsAre(224, 160, 3));
  EXPECT_EQ(images.count, 7u);
  EXPECT_THAT(parse_random_input("random:1x5").sample, ElementsAre(5));
  for (const char* bad : {"random:", "random:3x224x224", "random:1x3x0x4", "random:axb", "random:1x5,", "random:1x5,0",
                          "random:1x5,2,3", "random:1000000x1000000", "random:1x-5", "random:1x3x99999999999x9"})
    EXPECT_THROW(parse_random_input(bad), UsageError) << bad;
}

nn::HostTensor shaped(const std::string& name, std::vector<std::int64_t> shape) {
  return {.name = name, .dtype = DType::kF32, .shape = std::move(shape), .bytes = {}};
}

nn::ModelSpec spec_of(const char* name, const std::vector<nn::HostTensor>& tensors) {
  return nn::spec_of_tensors(name, {}, tensors);
}

TEST(SpecOf, ReadsSizesFromShapes) {
  const auto resnet = spec_of("resnet18", {shaped("conv1.weight", {64, 3, 7, 7}), shaped("fc.weight", {17, 512})});
  EXPECT_EQ(resnet.classes, 17);
  EXPECT_THAT(resnet.sample_shape, ElementsAre(224, 224, 3));
  const auto gpt2 =
      spec_of("gpt2", {shaped("transformer.wte.weight", {100, 128}), shaped("transformer.wpe.weight", {40, 128}),
                       shaped("transformer.h.0.ln_1.weight", {128}), shaped("transformer.h.1.ln_1.weight", {128})});
  EXPECT_EQ(gpt2.classes, 100);
  EXPECT_EQ(gpt2.settings.integer("width"), 128);
  EXPECT_EQ(gpt2.settings.integer("context"), 40);
  EXPECT_EQ(gpt2.settings.integer("layers"), 2);
  EXPECT_EQ(gpt2.settings.integer("heads"), 2);
  const auto bert = [](std::int64_t positions) {
    return spec_of("bert-base", {shaped("bert.embeddings.word_embeddings.weight", {100, 128}),
                                 shaped("bert.embeddings.position_embeddings.weight", {positions, 128})});
  };
  EXPECT_EQ(bert(40).settings.integer("context"), 40);
  EXPECT_THAT(bert(40).sample_shape, ElementsAre(40));  // not more than there are positions
  EXPECT_THAT(bert(512).sample_shape, ElementsAre(128));
  const auto mlp = spec_of("mlp", {shaped("module.fc1.weight", {30, 784}), shaped("module.fc2.weight", {4, 30})});
  EXPECT_THAT(mlp.settings.integers("hidden"), ElementsAre(30));
  EXPECT_THAT(mlp.sample_shape, ElementsAre(784));
  EXPECT_EQ(mlp.classes, 4);
  const auto cnn = spec_of("cnn", {shaped("conv1.weight", {32, 1, 3, 3}), shaped("fc1.weight", {128, 64 * 49}),
                                   shaped("fc2.weight", {10, 128})});
  EXPECT_THAT(cnn.sample_shape, ElementsAre(28, 28, 1));
  EXPECT_THROW(spec_of("gpt", {shaped("wte.weight", {10, 12})}), UsageError);
  const auto text = spec_of("lstm", {shaped("encoder.weight", {90, 24}), shaped("rnn.weight_ih_l0", {96, 24}),
                                     shaped("rnn.weight_hh_l0", {96, 24}), shaped("rnn.weight_ih_l1", {96, 24}),
                                     shaped("rnn.weight_ih_l2", {96, 24}), shaped("decoder.weight", {90, 24})});
  EXPECT_EQ(text.settings.integer("layers"), 3);
  EXPECT_EQ(text.settings.integer("width"), 24);
  EXPECT_EQ(text.classes, 90);
  EXPECT_EQ(text.sample_shape.size(), 1u);
  const auto rows = spec_of("lstm", {shaped("rnn.weight_ih_l0", {96, 28}), shaped("rnn.weight_hh_l0", {96, 24}),
                                     shaped("decoder.weight", {10, 24})});
  EXPECT_EQ(rows.settings.integer("layers"), 1);
  EXPECT_EQ(rows.classes, 10);
  EXPECT_THAT(rows.sample_shape, ElementsAre(28, 28, 1));
}

TEST(SpecOf, TheHeadStandsForATableThatIsMissing) {
  // As safetensors.torch.save_model() writes GPT2LMHeadModel.
  const auto once = spec_of("gpt2", {shaped("lm_head.weight", {100, 128}), shaped("transformer.wpe.weight", {40, 128}),
                                     shaped("transformer.h.0.ln_1.weight", {128})});
  EXPECT_EQ(once.classes, 100);
  EXPECT_EQ(once.settings.integer("width"), 128);
  EXPECT_EQ(once.settings.integer("layers"), 1);
  EXPECT_EQ(once.settings.integer("heads"), 2);
  EXPECT_TRUE(once.settings.flag("tied"));
}

TEST(SpecOf, UntiedHeadIsDetected) {
  auto table = shaped("transformer.wte.weight", {2, 256}), head = shaped("lm_head.weight", {2, 256});
  table.bytes.resize(2048);
  head.bytes.resize(2048);
  EXPECT_TRUE(spec_of("gpt", {table, head}).settings.flag("tied"));
  head.bytes.back() = std::byte{1};
  EXPECT_FALSE(spec_of("gpt", {table, head}).settings.flag("tied"));
}

TEST(SpecOf, CompiledModelsHaveTheNamesWithinTheirWrappers) {
  for (const char* prefix : {"_orig_mod.", "module._orig_mod.", "_orig_mod.module."})
    EXPECT_EQ(spec_of("linear", {shaped(std::string(prefix) + "fc.weight", {7, 9})}).classes, 7) << prefix;
}

// A model of three positions whose next token is the sum of those that it sees, modulo 10.
class Summing final : public nn::LanguageModel {
 public:
  struct Seen final : Memory {
    std::int64_t sum = 0, room = 0;
    void add(const nn::Tensor& tokens) {
      for (const std::int32_t token : tokens.span<std::int32_t>()) sum += token;
      seen_ += tokens.count();
    }
  };
  explicit Summing(std::optional<std::int64_t> positions) : positions_(positions) { train(false); }
  nn::Var forward(nn::Tape&, nn::Var x) override { return x; }
  std::int64_t vocabulary() const override { return 10; }
  std::optional<std::int64_t> positions() const override { return positions_; }
  std::unique_ptr<Memory> begin(nn::Tape&, std::int64_t batch, std::int64_t most) const override {
    EXPECT_EQ(batch, 1);
    EXPECT_LE(most, positions_.value_or(most));
    auto made = std::make_unique<Seen>();
    made->room = most;
    return made;
  }
  nn::Var next(nn::Tape& tape, const nn::Tensor& tokens, Memory& memory) const override {
    auto& seen = dynamic_cast<Seen&>(memory);
    seen.add(tokens);
    EXPECT_LE(seen.seen(), seen.room);
    nn::Tensor logits = tape.backend().zeros({1, 10});
    logits.f32()[seen.sum % 10] = 1;
    return tape.make_var(logits, false);
  }

 private:
  std::optional<std::int64_t> positions_;
};

std::vector<std::int32_t> go_on(const nn::LanguageModel& model, const std::vector<std::int32_t>& prompt, int count) {
  const auto backend = nn::make_cpu_backend(1);
  Continuation text(*backend, model, DType::kF32);
  TokenChooser greedy({.temperature = 0});
  std::vector<std::int32_t> made;
  text.begin(prompt, count);
  for (int i = 0; i < count; ++i) {
    made.push_back(greedy.choose(text.logits(), 0, static_cast<std::uint64_t>(i)));
    if (i + 1 < count) text.add(made.back());
  }
  return made;
}

TEST(Continuation, ContinuesWithAllEarlierTokens) {
  EXPECT_THAT(go_on(Summing(std::nullopt), {1, 2}, 5), ElementsAre(3, 6, 2, 4, 8));
  EXPECT_THAT(go_on(Summing(100), {1, 2}, 5), ElementsAre(3, 6, 2, 4, 8));
}

TEST(Continuation, DropsTheOlderHalfWhenPositionsAreUsedUp) {
  // Of four positions: 1 2 3 6 make 2, and that is one too many: it begins again with the last two, 6 and 2.
  EXPECT_THAT(go_on(Summing(4), {1, 2}, 6), ElementsAre(3, 6, 2, 8, 6, 2));
  // One position: each token follows from the one before alone.
  EXPECT_THAT(go_on(Summing(1), {4}, 3), ElementsAre(4, 4, 4));
  // A prompt that is longer: its end is seen.
  EXPECT_THAT(go_on(Summing(2), {9, 9, 9, 1, 2}, 2), ElementsAre(3, 3));
}

}  // namespace
}  // namespace lockstep::inference
