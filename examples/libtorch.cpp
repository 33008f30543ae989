// LibTorch's modules, lockstep's ranks: the convnet of PyTorch's MNIST tutorial on the digits (data/digits/digits.bin).
//   lockstep launch -n 2 -- libtorch digits.bin
// Any number of ranks trains on the same batches, and ends with the same parameters on each of them.
#include <lockstep/torch.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

namespace {

constexpr std::int64_t kSamples = 1797, kPixels = 64, kBatch = 60;

struct Net : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1->forward(x), 2));
    x = torch::relu(conv2->forward(x)).flatten(1);
    return torch::log_softmax(fc2->forward(torch::relu(fc1->forward(x))), 1);
  }
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 10, 3).padding(1)));
  torch::nn::Conv2d conv2 = register_module("conv2", torch::nn::Conv2d(10, 20, 3));
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(80, 50));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(50, 10));
};

// Each sample is 64 grey levels from 0 to 16 and its label.
std::pair<torch::Tensor, torch::Tensor> read_digits(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  if (bytes.size() != kSamples * (kPixels + 1))
    throw lockstep::IoError(std::string(path) + " is not the digits", "give data/digits/digits.bin");
  const auto rows = torch::from_blob(bytes.data(), {kSamples, kPixels + 1}, torch::kUInt8).to(torch::kInt64);
  return {rows.narrow(1, 0, kPixels).reshape({-1, 1, 8, 8}).to(torch::kFloat32) / 16, rows.select(1, kPixels)};
}

void train(const char* path) {
  torch::manual_seed(1);
  torch::set_num_threads(1);
  const auto group = lockstep::comm::make_group();
  const auto [images, labels] = read_digits(path);
  const auto is_test = torch::arange(kSamples).remainder(5).eq(0);
  const auto train_part = is_test.logical_not().nonzero().flatten();
  auto net = std::make_shared<Net>();
  lockstep::torch::DistributedDataParallel ddp(net, *group);  // every rank gets rank 0's parameters
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  for (int epoch = 1; epoch <= 5; ++epoch) {
    const auto order = train_part.index({torch::randperm(train_part.numel())});  // the same on all ranks
    double loss_sum = 0;
    for (const auto& batch : order.split(kBatch)) {
      const auto mine = batch.tensor_split(group->size())[group->rank()];
      optimizer.zero_grad();
      if (mine.numel() == 0) {
        ddp.contribute_nothing();  // fewer samples than ranks
      } else {
        // Gradients are summed over the ranks: each sample counts 1 / samples of all ranks.
        const auto loss = torch::nll_loss(ddp(images.index({mine})), labels.index({mine}), {}, torch::Reduction::Sum);
        ddp.scalars()[0] = loss.item<float>();  // summed along with the gradients
        (loss / batch.numel()).backward();      // collectives run while it does
      }
      optimizer.step();
      loss_sum += ddp.summed_scalars()[0].item<float>();
    }
    if (group->rank() == 0) std::printf("epoch %d: loss %.9f\n", epoch, loss_sum / static_cast<double>(order.numel()));
  }
  ddp.check();  // that all ranks have the same bits
  const torch::NoGradGuard guard;
  std::string bits;
  for (const auto& parameter : net->parameters())
    bits.append(static_cast<const char*>(parameter.data_ptr()), parameter.nbytes());
  const auto right = net->forward(images.index({is_test})).argmax(1).eq(labels.index({is_test}));
  std::printf("rank %d of %d: accuracy %.1f %%, parameters' hash %016zx\n", group->rank(), group->size(),
              100 * right.to(torch::kFloat32).mean().item<float>(), std::hash<std::string>()(bits));
  group->shutdown();
}

}  // namespace

int main(int count, char** words) {
  return lockstep::run_main([&] { train(count > 1 ? words[1] : "digits.bin"); });
}
