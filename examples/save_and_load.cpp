// A linear layer, wrapped and plain, saved and loaded in each of the four ways.
//
//   save_and_load DIRECTORY      where the files go
#include <cstdio>

#include "lockstep/base/error.h"
#include "lockstep/base/run_main.h"
#include "lockstep/nn/io/onnx.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "lockstep/nn/layers/layers.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/nn/optim/optimizer.h"
#include "lockstep/parallel/data_parallel.h"

using namespace lockstep;

namespace {

// Learns the sum of ten numbers.
void train(parallel::DataParallel& model) {
  nn::Backend& device = model.output_backend();
  std::vector<float> values(20 * 10), sums(20);
  nn::Generator(/*seed=*/2).normal(values, 0, 1);
  for (std::size_t i = 0; i < values.size(); ++i) sums[i / 10] += values[i];
  const nn::Tensor x = nn::tensor_of(device, {20, 10}, values), target = nn::tensor_of(device, {20, 1}, sums);

  const auto optimizer = nn::make_sgd(model.named_parameters(), {.momentum = 0.9});
  nn::Tape tape(device);
  for (int step = 0; step < 50; ++step) {
    optimizer->zero_grad();
    const nn::Loss loss = nn::squared_error(tape, model(tape, tape.input(x)), target, 1.0f / 20);
    if (step % 49 == 0) std::printf("loss %.4f\n", double{nn::values_of(device, loss.totals())[0]} / 20);
    tape.backward(loss.value);
    optimizer->step(/*lr=*/0.01);
    tape.reset();
  }
}

void save(const nn::Module& module, const std::string& file) { nn::write_safetensors(file, nn::state_of(module)); }
void load(nn::Module& module, const std::string& file) { nn::load_state(module, nn::read_weights(file), file); }

void run(const std::string& directory) {
  parallel::Devices devices = parallel::Devices::cpu(2);
  nn::Generator generator(/*seed=*/1);
  nn::Context context{devices[0], generator};
  const auto make = [&] { return nn::build<nn::Linear>(context, 10, 1); };  // with other values each time

  parallel::DataParallel trained(make(), devices);
  train(trained);
  const std::string wrapped = directory + "/wrapped.safetensors", inner = directory + "/inner.safetensors",
                    plain = directory + "/plain.safetensors";
  save(trained, wrapped);
  save(trained.module(), inner);

  const auto compare = [&](const char* way, const nn::Module& loaded) {
    const bool equal = nn::parameters_sha256(loaded) == nn::parameters_sha256(trained.module());
    std::printf("%s: %s\n", way, equal ? "equal" : "different");
  };
  const auto from_wrapped = make();
  load(*from_wrapped, wrapped);
  compare("wrapped into plain", *from_wrapped);

  const auto from_inner = make();
  load(*from_inner, inner);
  compare("inner into plain", *from_inner);

  parallel::DataParallel again(make(), devices);
  load(again, wrapped);
  compare("wrapped into wrapped", again.module());

  save(*from_inner, plain);
  parallel::DataParallel from_plain(make(), devices);
  load(from_plain, plain);
  compare("plain into wrapped", from_plain.module());

  // In a file that torch.save() wrote of a wrapped model, each name starts with "module.".
  auto state = nn::state_of(trained);
  for (auto& tensor : state) tensor.name = "module." + tensor.name;
  const auto from_pytorch = make();
  nn::load_state(*from_pytorch, state, "a wrapped state dict");
  compare("PyTorch's wrapped into plain", *from_pytorch);
  try {
    nn::load_state(*from_pytorch, state, "a wrapped state dict", {.keep_prefix = true});
  } catch (const UsageError& error) {
    std::printf("by its word: %s\n", error.what());
  }

  from_inner->train(false);
  nn::export_onnx(devices[0], *from_inner, {{.shape = {1, 10}}}, directory + "/linear.onnx");
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] { run(argc > 1 ? argv[1] : "."); });
}
