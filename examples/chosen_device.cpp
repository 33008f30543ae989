// A tensor that moves from one device to another, and ResNet-50 on a device of one's choice.
//
//   chosen_device cpu 1                      of four CPU devices the second one
//   chosen_device cuda 3 resnet50.pth        GPU 3; with weights: torchvision's, or what lockstep train --save has
//   written
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "lockstep/base/run_main.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/ops/transfer.h"
#include "lockstep/parallel/devices.h"

using namespace lockstep;

namespace {

void move(parallel::Devices& devices, int there) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const nn::Tensor tensor = nn::tensor_of(devices[0], {2, 3}, values);
  const nn::Tensor moved = nn::to_device(devices[there], tensor, devices[0]);
  const nn::Tensor back = nn::to_device(devices[0], moved, devices[there]);
  std::printf("%s on %s, on %s, and back: %s\n", to_string(tensor.shape()).c_str(), devices.name_of(0).c_str(),
              devices.name_of(there).c_str(), nn::values_of(devices[0], back) == values ? "equal" : "different");
}

void infer(nn::Backend& device, const std::string& name, const std::string& weights) {
  nn::Generator generator(/*seed=*/1);
  nn::Context context{device, generator};
  const auto model = nn::make_model(context, {.name = "resnet50", .sample_shape = {224, 224, 3}, .classes = 1000});
  if (!weights.empty()) nn::load_state(*model, nn::read_weights(weights), weights);
  model->train(false);

  nn::Tape tape(device);
  tape.set_recording(false);
  const nn::Shape shape = {1, 224, 224, 3};
  std::vector<float> pixels(static_cast<std::size_t>(shape.count()));
  generator.normal(pixels, 0, 1);
  const nn::Var y = (*model)(tape, tape.input(nn::tensor_of(device, shape, pixels)));
  std::printf("%s, %s\n", to_string(y.shape()).c_str(), name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  return run_main([&] {
    const std::string_view kind = argc > 1 ? argv[1] : "cpu";
    const int id = argc > 2 ? std::atoi(argv[2]) : 0;
    parallel::Devices devices = kind == "cpu" ? parallel::Devices::cpu(4) : parallel::Devices::cuda();
    move(devices, id);
    infer(devices[id], devices.name_of(id), argc > 3 ? argv[3] : "");
  });
}
