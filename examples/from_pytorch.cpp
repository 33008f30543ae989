// Lines of docs/from-pytorch.md that the other examples have no use for. Any number of ranks runs them.
//
//   from_pytorch DIRECTORY [DEVICE]      where a file goes; --device as lockstep train has it
#include <cstdio>
#include <cstdlib>

#include "lockstep/base/device.h"
#include "lockstep/base/run_main.h"
#include "lockstep/data/loader.h"
#include "lockstep/data/open.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/grad_scaler.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/data_parallel.h"
#include "lockstep/parallel/distributed_data_parallel.h"
#include "lockstep/session/session.h"

using namespace lockstep;

namespace {

class Net final : public nn::Module {
 public:
  explicit Net(nn::Context& context)
      : conv_(register_module(
            "conv", std::make_unique<nn::Conv2d>(context, 1, 4, nn::Window{.kernel = {3, 3}, .padding = {1, 1}}))),
        norm_(register_module("norm", std::make_unique<nn::BatchNorm>(context, 4))),
        fc_(register_module("fc", std::make_unique<nn::Linear>(context, 256, 10))),
        spare_(register_module("spare", std::make_unique<nn::Linear>(context, 256, 10))) {}
  nn::Var forward(nn::Tape& tape, nn::Var x) override {
    const nn::Var y = nn::flatten(tape, nn::relu(tape, norm_(tape, conv_(tape, x))));
    return use_spare ? nn::add(tape, fc_(tape, y), spare_(tape, y)) : fc_(tape, y);
  }
  bool use_spare = true;

 private:
  nn::Conv2d& conv_;
  nn::BatchNorm& norm_;
  nn::Linear& fc_;
  nn::Linear& spare_;
};

const nn::Shape kImages = {12, 8, 8, 1};

// DataParallel's arguments.
void several_devices() {
  parallel::Devices devices = parallel::Devices::cpu(3);
  nn::Generator generator(/*seed=*/1);
  nn::Context on_one{devices[1], generator};
  parallel::DataParallel two(nn::build<Net>(on_one), devices, {1, 2});
  parallel::DataParallel elsewhere(nn::build<Net>(on_one), devices, {1, 2}, /*output_device=*/0);

  const std::vector<float> pixels(static_cast<std::size_t>(kImages.count()), 1.0f);
  const nn::Tensor x = nn::tensor_of(devices[2], kImages, pixels);
  nn::Tape tape(two.output_backend());
  const nn::Var y = two.forward(tape, x, devices[2]);
  nn::Tape tape_elsewhere(elsewhere.output_backend());
  const nn::Var there = elsewhere.forward(tape_elsewhere, x, devices[2]);
  std::printf("%s on %s, %s on %s; there %s\n", to_string(y.shape()).c_str(),
              devices.name_of(two.output_device()).c_str(), to_string(there.shape()).c_str(),
              devices.name_of(elsewhere.output_device()).c_str(), devices.describe().c_str());
}

// A step whose samples come in two parts.
void accumulate(parallel::DistributedDataParallel& model, nn::Optimizer& optimizer, nn::Backend& device, int ranks) {
  const std::vector<float> pixels(static_cast<std::size_t>(kImages.count()), 1.0f);
  const nn::Tensor x = nn::tensor_of(device, kImages, pixels);
  const nn::Tensor labels = device.empty({kImages[0]}, DType::kI32);
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(kImages[0]), 1);
  device.upload(std::as_bytes(std::span(ones)), labels);
  const float scale = 1.0f / static_cast<float>(2 * kImages[0] * ranks);

  nn::Tape tape(device);
  optimizer.zero_grad();
  {
    const auto guard = model.no_sync();
    tape.backward(nn::cross_entropy(tape, model(tape, tape.input(x)), labels, scale).value);
    tape.reset();
  }
  tape.backward(nn::cross_entropy(tape, model(tape, tape.input(x)), labels, scale).value);
  optimizer.step(/*lr=*/0.01);
}

// A step with scaled losses.
void scaled_step(parallel::DistributedDataParallel& model, nn::Optimizer& optimizer, nn::Backend& device, int ranks) {
  const nn::Tensor x = nn::tensor_of(device, kImages, std::vector<float>(12 * 8 * 8, 1.0f));
  const nn::Tensor targets = nn::tensor_of(device, {kImages[0], 10}, std::vector<float>(12 * 10, 0.5f));
  nn::Tape tape(device);
  nn::GradScaler scaler(device);
  optimizer.set_scaler(&scaler);
  tape.set_loss_scale(scaler.scale());

  optimizer.zero_grad();
  const nn::Var y = model(tape, tape.input(x));
  tape.backward(nn::squared_error(tape, y, targets, 1.0f / static_cast<float>(kImages[0] * ranks)).value);
  optimizer.step({.lr = 0.01, .clip_norm = 1});
  scaler.update();
  optimizer.set_scaler(nullptr);
}

// DistributedDataParallel's arguments, and what stands around it.
void several_ranks(const std::string& directory, const std::string& device) {
  session::Session session = session::open_session(device);
  const int rank = session.world.rank, world_size = session.world.size, local_rank = session.world.local_rank;
  const Device place = session.backend->device();
  nn::Generator generator(/*seed=*/1);
  nn::Context context{*session.backend, generator};
  comm::ProcessGroup& process_group = session.gradients();

  Net net(context), other(context), third(context), fourth(context);
  parallel::convert_sync_batchnorm(net, process_group);
  parallel::DistributedDataParallel model(net, process_group,
                                          {.broadcast_buffers = false, .find_unused_parameters = true});
  net.use_spare = false;
  accumulate(model, *nn::make_adamw(model.parameters(), {}), *session.backend, world_size);
  parallel::DistributedDataParallel placed(other, process_group,
                                           {.device_ids = {place.index}, .output_device = place.index});
  accumulate(placed, *nn::make_sgd(placed.parameters(), {.momentum = 0.9}), *session.backend, world_size);
  parallel::DistributedDataParallel small_buckets(third, process_group, {.bucket_mb = 0.1});
  accumulate(small_buckets, *nn::make_sgd(third.named_parameters(), {}), *session.backend, world_size);
  scaled_step(small_buckets, *nn::make_sgd(third.named_parameters(), {}), *session.backend, world_size);
  parallel::DistributedDataParallel sharded(fourth, process_group, {.zero = 1});
  const auto optimizer = nn::make_adamw(sharded.parameters(), {}, {}, sharded.share());
  accumulate(sharded, *optimizer, *session.backend, world_size);

  const auto dataset = data::open_data("digits").train;
  const sampler::DistributedSampler whole_batches(
      {.length = dataset->size(), .seed = 1, .global_batch = 64, .tail = sampler::Tail::kDrop}, rank, world_size);
  data::Loader loader(dataset, whole_batches, {.workers = 2, .memory = session.backend->staging_memory()});
  std::int64_t seen = 0;
  for (const data::Batch& batch : loader.epoch()) seen += static_cast<std::int64_t>(batch.count);

  const std::string file = directory + "/net.safetensors";
  if (rank == 0) nn::write_safetensors(file, nn::state_of(model));
  session.group->barrier().wait_host();
  const nn::LoadReport report = nn::load_state(model, nn::read_weights(file), file, {.strict = false});
  model.module().train(false);

  const auto lines = session.group->all_gather_text(
      "rank " + std::to_string(rank) + " of " + std::to_string(world_size) + ", local rank " +
      std::to_string(local_rank) + ", " + to_string(place) + ": " + std::to_string(seen) + " samples, " +
      std::to_string(report.missing.size()) + " parameters missing");
  for (const auto& line : lines)
    if (rank == 0) std::printf("%s\n", line.c_str());
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    const bool is_available = probe_cuda().devices > 0;
    several_devices();
    several_ranks(argc > 1 ? argv[1] : ".", argc > 2 ? argv[2] : is_available ? "cuda" : "cpu");
  });
}
