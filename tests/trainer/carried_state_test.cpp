// --stateful: on any number of ranks each row of a text begins with the state that the row before it has left, and what
// is carried moves between ranks as a whole.
#include "trainer/carried_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "base/error.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/ops/transfer.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_directory.h"
#include "trainer/step.h"

namespace lockstep::trainer {
namespace {

using lockstep::testing::group;

constexpr std::int64_t kRow = 7;       // tokens
constexpr std::uint64_t kColumns = 5;  // of a batch

// A model whose parameters stay as they are, and steps over its text.
class Carried : public ::testing::TestWithParam<std::string> {
 protected:
  Carried() {
    std::ofstream file(directory_.path("text"));
    for (int i = 0; i < 40; ++i) file << "row " << i * i % 31 << ", then. ";
    file.close();
    splits_ = data::open_data("text:" + directory_.path("text"), {.context = kRow});
  }

  std::unique_ptr<nn::Module> model(std::int64_t width = 9) {
    nn::Generator generator(1);
    nn::Context context{*backend_, generator};
    return nn::make_model(context, {.name = GetParam(),
                                    .sample_shape = splits_.train->sample_dims(),
                                    .classes = splits_.train->classes(),
                                    .settings = {{"layers", 2}, {"width", width}}});
  }

  // The loss of each of `steps` steps.
  std::vector<double> run(nn::Module& module, CarriedState& carried, const sampler::SamplerState& from, int steps) {
    sampler::DistributedSampler sampler(config(), group().rank(), group().size());
    sampler.restore(from);
    data::Loader loader(splits_.train, sampler, {.workers = 1});
    parallel::DistributedDataParallel ddp(module, group());
    TrainingStep step(*backend_, ddp, nn::make_sgd(ddp.parameters(), {}), format_of(*splits_.train),
                      {.carried = &carried});
    std::vector<double> losses;
    for (int i = 1; i <= steps; ++i) {
      step.run(i, loader.next(), /*lr=*/0.0);
      const auto outcome = step.take_outcome();
      losses.push_back(outcome.totals.loss / (outcome.totals.count * static_cast<double>(kRow)));
    }
    return losses;
  }

  sampler::SamplerConfig config() const {
    return {.length = splits_.train->size(), .global_batch = kColumns, .order = sampler::Order::kColumns};
  }

  // The loss of each row of the text where it is read from row `first` on, as one.
  std::vector<double> losses_of_rows(nn::Module& module, std::uint64_t first, std::uint64_t end) {
    const auto rows = static_cast<std::int64_t>(end - first);
    const nn::Tensor tokens = backend_->empty({rows * kRow}, DType::kI32);
    std::vector<std::int32_t> labels(static_cast<std::size_t>(tokens.count()));
    for (std::int64_t row = 0; row < rows; ++row)
      splits_.train->read_tokens(first + static_cast<std::uint64_t>(row),
                                 tokens.span<std::int32_t>().subspan(static_cast<std::size_t>(row * kRow), kRow),
                                 std::span(labels).subspan(static_cast<std::size_t>(row * kRow), kRow));
    nn::Tape tape(*backend_);
    tape.set_recording(false);
    const nn::Var logits = module.forward(tape, tape.input(tokens.reshaped({1, rows * kRow})));
    const auto values = nn::values_of(*backend_, logits.value());
    const auto classes = static_cast<std::size_t>(splits_.train->classes());
    std::vector<double> losses(static_cast<std::size_t>(rows));
    for (std::size_t t = 0; t < labels.size(); ++t) {
      double sum = 0;
      for (std::size_t c = 0; c < classes; ++c) sum += std::exp(static_cast<double>(values[t * classes + c]));
      losses[t / kRow] +=
          (std::log(sum) - static_cast<double>(values[t * classes + static_cast<std::size_t>(labels[t])])) / kRow;
    }
    return losses;
  }

  testing::TemporaryDirectory directory_;
  std::unique_ptr<nn::Backend> backend_ = nn::make_cpu_backend(1);
  data::DataSplits splits_;
};

// As if each place of the batch read its part of the text in one go; and again in the next epoch, from zeros.
TEST_P(Carried, RowsBeginWhereTheRowsBeforeHaveEnded) {
  const std::uint64_t length = splits_.train->size(), each = length / kColumns, longer = length % kColumns;
  ASSERT_GT(each, 3u);
  ASSERT_GT(longer, 0u);
  const auto module = model();
  std::vector<double> sums(each + 1);
  for (std::uint64_t column = 0; column < kColumns; ++column) {
    const std::uint64_t first = column * each + std::min(column, longer), rows = each + (column < longer ? 1 : 0);
    const auto losses = losses_of_rows(*module, first, first + rows);
    for (std::size_t row = 0; row < losses.size(); ++row) sums[row] += losses[row];
  }
  for (std::size_t row = 0; row < sums.size(); ++row) sums[row] /= static_cast<double>(row < each ? kColumns : longer);
  CarriedState carried(*module, group(), kColumns, DType::kF32);
  const auto losses = run(*module, carried, {}, static_cast<int>(sums.size()) + 3);
  for (std::size_t step = 0; step < losses.size(); ++step)
    EXPECT_NEAR(losses[step], sums[step % sums.size()], 1e-5 * losses[step]) << step;
  // Where nothing is carried, other losses come out.
  EXPECT_GT(std::abs(losses[2] - losses_of_rows(*module, 2, 3)[0]), 0.0);
}

// What is gathered after some steps continues in another module as if there had been no end.
TEST_P(Carried, ResumesFromGatheredState) {
  const auto module = model();
  CarriedState carried(*module, group(), kColumns, DType::kF32);
  const auto losses = run(*module, carried, {}, 3);
  const auto all = carried.gather();
  for (const auto& part : all) {
    EXPECT_EQ(part.shape, (std::vector<std::int64_t>{kColumns, 9})) << part.name;
    EXPECT_EQ(part.bytes.size(), kColumns * 9 * sizeof(float));
  }
  EXPECT_EQ(all.size(), group().rank() != 0 ? 0u : GetParam() == "lstm" ? 4u : 2u);
  const auto further = run(*module, carried, {0, 3 * kColumns}, 2);

  const auto other = model();
  CarriedState resumed(*other, group(), kColumns, DType::kF32);
  resumed.restore(all, "it");
  EXPECT_EQ(run(*other, resumed, {0, 3 * kColumns}, 2), further);
  // From zeros it is another loss.
  resumed.reset();
  EXPECT_NE(run(*other, resumed, {0, 3 * kColumns}, 2), further);
}

TEST_P(Carried, IsRefusedForAnotherModelOrBatch) {
  const auto module = model();
  CarriedState carried(*module, group(), kColumns, DType::kF32);
  auto all = carried.gather();
  const auto narrow = model(8);
  CarriedState other(*narrow, group(), kColumns, DType::kF32);
  EXPECT_THROW(other.restore(all, "it"), Error);
  const auto same = model();
  CarriedState larger(*same, group(), kColumns + 1, DType::kF32);
  EXPECT_THROW(larger.restore(all, "it"), Error);
  if (!all.empty()) all.pop_back();
  EXPECT_THROW(carried.restore(all, "it"), Error);
  const auto linear = [&] {
    nn::Generator generator(1);
    nn::Context context{*backend_, generator};
    return nn::make_model(context, {.name = "linear", .sample_shape = {3}});
  }();
  EXPECT_THROW(CarriedState(*linear, group(), kColumns, DType::kF32), UsageError);
}

INSTANTIATE_TEST_SUITE_P(Models, Carried, ::testing::Values("rnn", "lstm", "gru"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace lockstep::trainer
