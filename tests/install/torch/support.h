// Tests on the ranks of a job, with LibTorch and the installed package alone.
#pragma once

#include <gmock/gmock.h>
#include <lockstep/torch.h>
#include <torch/torch.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace adapter {

using lockstep::torch::DistributedDataParallel;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Of all ranks; tests run in the same order on each.
lockstep::comm::ProcessGroup& group();
inline int rank() { return group().rank(); }
inline int ranks() { return group().size(); }

/// The line of the UsageError that `work` ends with; another error's text, marked; or nothing.
template <class Work>
std::string refusal_of(const Work& work) {
  try {
    work();
  } catch (const lockstep::UsageError& error) {
    EXPECT_FALSE(error.remedy().empty()) << error.what();
    EXPECT_EQ(error.line().find('\n'), std::string::npos) << error.line();
    return error.line();
  } catch (const std::exception& error) {
    return std::string("no UsageError: ") + error.what();
  }
  return "";
}
/// Of a constructor's refusals, which end all ranks: the one that reports says why, the others that it did.
template <class Match>
auto refused_everywhere(Match match) {
  return AnyOf(match, HasSubstr("no UsageError: rank "));
}

inline std::shared_ptr<torch::nn::SequentialImpl> two_layers(torch::Dtype type = torch::kFloat64) {
  torch::manual_seed(1);
  auto net =
      std::make_shared<torch::nn::SequentialImpl>(torch::nn::Linear(4, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3));
  net->to(type);
  return net;
}

/// Samples of all ranks together, and this rank's: rank r has r + 1 of them.
inline torch::Tensor all_samples(torch::Dtype type = torch::kFloat64) {
  torch::manual_seed(2);
  return torch::randn({ranks() * (ranks() + 1) / 2, 4}, torch::kFloat64).to(type);
}
inline torch::Tensor own_samples(torch::Dtype type = torch::kFloat64) {
  return all_samples(type).narrow(0, rank() * (rank() + 1) / 2, rank() + 1);
}
inline torch::Tensor loss_of(const torch::Tensor& y) { return y.square().sum() / all_samples().size(0); }

inline std::vector<torch::Tensor> gradients_of(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad().clone());
  return gradients;
}

/// What one process computes from all samples.
template <class Module>
std::vector<torch::Tensor> gradients_of_one_process(const std::shared_ptr<Module>& net) {
  const auto copy = std::dynamic_pointer_cast<Module>(net->clone());
  for (auto& parameter : copy->parameters()) parameter.mutable_grad().reset();
  loss_of(copy->forward(all_samples())).backward();
  return gradients_of(copy->parameters());
}

inline void expect_close(const std::vector<torch::Tensor>& are, const std::vector<torch::Tensor>& wanted,
                         double factor = 1) {
  ASSERT_EQ(are.size(), wanted.size());
  for (std::size_t i = 0; i < are.size(); ++i)
    EXPECT_TRUE(torch::allclose(are[i], wanted[i] * factor, 1e-12, 1e-12)) << i << ": " << are[i] << wanted[i] * factor;
}

}  // namespace adapter
