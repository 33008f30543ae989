// A custom training loop whose result has the same bits on any number of ranks: a step in shards.
//
//   in_shards; lockstep launch -n 3 -- in_shards      the same params_sha256, on 1 to 8 ranks
#include <cstdio>
#include <memory>

#include "lockstep/base/run_main.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/session/session.h"
#include "lockstep/trainer/forward.h"

using namespace lockstep;

namespace {

constexpr std::uint64_t kBatch = 64, kShards = 8;

class Net final : public nn::Module {
 public:
  explicit Net(nn::Context& context)
      : hidden_(register_module("hidden", std::make_unique<nn::Linear>(context, 64, 32))),
        out_(register_module("out", std::make_unique<nn::Linear>(context, 32, 10))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    return out_(tape, nn::relu(tape, hidden_(tape, nn::flatten(tape, x))));
  }

 private:
  nn::Linear& hidden_;
  nn::Linear& out_;
};

void train_in_shards() {
  session::SessionOptions options;
  options.threads = 1;  // of a shard, wherever it is computed
  session::Session session = session::open_session(options);
  comm::ProcessGroup& group = session.gradients();
  nn::Generator generator(/*seed=*/1);
  nn::Context context{*session.backend, generator};
  Net net(context);
  const comm::ReductionTree& tree = group.define_tree(kShards);
  parallel::DistributedDataParallel model(net, group, {.tree = &tree});
  const auto optimizer = nn::make_sgd(model.parameters(), {.momentum = 0.9});

  const std::shared_ptr<const data::Dataset> dataset = data::open_data("digits").train;
  const sampler::DistributedSampler sampler({.length = dataset->size(), .global_batch = kBatch, .shards = kShards},
                                            tree.position_of(group.rank()), group.size());
  data::Loader loader(dataset, sampler, {.workers = 1});

  nn::Tape tape(*session.backend);
  for (const data::Batch& batch : loader.epoch()) {
    const trainer::Inputs all = trainer::inputs_of(*session.backend, batch, trainer::format_of(*dataset));
    const auto count = static_cast<std::int64_t>(batch.plan.global_count);
    // Of the global batch, and of this rank's part of it.
    const auto samples_of = [&](std::uint32_t shard) {
      return static_cast<std::int64_t>(sampler::shard_of(sampler.config(), batch.plan.global_count, shard).count);
    };
    const auto rows_of = [&](std::uint32_t shard, const nn::Tensor& tensor) {
      const auto part = sampler::shard_of(sampler.config(), batch.plan.global_count, shard);
      const auto first = static_cast<std::int64_t>(part.begin + batch.plan.global_begin - batch.plan.local_begin);
      return tensor.slice(first, first + static_cast<std::int64_t>(part.count));
    };
    optimizer->zero_grad();
    model.run_shards(tape, count, samples_of, [&](const parallel::DistributedDataParallel::ShardPass& pass) {
      const nn::Var y = pass.module(pass.tape, pass.tape.input(rows_of(pass.shard, all.x)));
      const nn::Tensor labels = rows_of(pass.shard, all.targets);
      return nn::cross_entropy(pass.tape, y, labels, 1.0f / static_cast<float>(count)).value;
    });
    optimizer->step(0.1);
  }
  if (group.rank() == 0) std::printf("params_sha256 %s\n", nn::parameters_sha256(net).c_str());
  session.shutdown();
}

}  // namespace

int main() { return run_main(train_in_shards); }
