// Training steps of a multilayer perceptron of LibTorch's: what bench/peers/torch/worker.py measures in Python.
//   libtorch_step sgd|adamw STEPS WARMUP_STEPS BATCH
#include <lockstep/torch.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

namespace {

struct Mlp : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return fc3->forward(torch::relu(fc2->forward(torch::relu(fc1->forward(x.flatten(1))))));
  }
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(784, 1024));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(1024, 1024));
  torch::nn::Linear fc3 = register_module("fc3", torch::nn::Linear(1024, 10));
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        const std::vector<torch::Tensor>& parameters) {
  if (name == "sgd") return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(1e-3));
  if (name == "adamw")
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3).weight_decay(0));
  throw lockstep::UsageError("no optimizer " + name, "there are sgd and adamw");
}

void print(const char* name, const std::vector<float>& values, const char* end) {
  std::printf("\"%s\": [", name);
  for (std::size_t i = 0; i < values.size(); ++i) std::printf("%s%.4f", i > 0 ? ", " : "", values[i]);
  std::printf("]%s", end);
}

void measure(const std::string& optimizer_name, int steps, int warmup_steps, int batch) {
  torch::set_num_threads(1);
  const auto group = lockstep::comm::make_group();
  torch::manual_seed(static_cast<std::uint64_t>(1 + group->rank()));
  auto net = std::make_shared<Mlp>();
  lockstep::torch::DistributedDataParallel ddp(net, *group,
                                               {.average_gradients = true, .gradient_as_bucket_view = true});
  const auto optimizer = make_optimizer(optimizer_name, ddp.parameters());
  const auto images = torch::randn({batch, 1, 28, 28});
  const auto labels = torch::randint(10, {batch}, torch::kInt64);

  torch::Tensor loss;
  const auto timed = [&] {
    group->barrier().wait_host();
    const auto begin = std::chrono::steady_clock::now();
    optimizer->zero_grad();
    loss = torch::cross_entropy_loss(ddp(images), labels);
    loss.backward();
    optimizer->step();
    return std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - begin).count();
  };
  std::vector<float> step_ms, compute_ms;
  for (int i = 0; i < warmup_steps; ++i) timed();
  for (int i = 0; i < steps; ++i) step_ms.push_back(timed());
  {
    const auto guard = ddp.no_sync();
    timed();
    for (int i = 0; i < steps; ++i) compute_ms.push_back(timed());
  }
  if (!loss.isfinite().item<bool>())
    throw lockstep::DivergedError("the loss became NaN or infinite while it was measured");
  // What all do together takes as long as the slowest rank.
  group->all_reduce(std::span(step_ms), lockstep::comm::ReduceOp::kMax);
  group->all_reduce(std::span(compute_ms), lockstep::comm::ReduceOp::kMax);
  if (group->rank() == 0) {
    std::printf("{");
    print("step_ms", step_ms, ", ");
    print("compute_ms", compute_ms, "}\n");
  }
  group->shutdown();
}

}  // namespace

int main(int count, char** words) {
  return lockstep::run_main([&] {
    lockstep::check_usage(count == 5, "libtorch_step takes four words", "libtorch_step sgd|adamw STEPS WARMUP BATCH");
    measure(words[1], std::stoi(words[2]), std::stoi(words[3]), std::stoi(words[4]));
  });
}
