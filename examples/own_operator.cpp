// An operator of its own: the value as it is, and the gradient turned round (Ganin and Lempitsky, "Unsupervised Domain
// Adaptation by Backpropagation", 2015). Checks it against differences.
#include <lockstep/nn.h>

#include <array>
#include <cmath>
#include <cstdio>

using namespace lockstep;

namespace {

class ReversalNode final : public nn::Node {
 public:
  ReversalNode(nn::Var output, nn::Var x, float scale) : Node(output), x_(x), scale_(scale) {}
  void backward(nn::Tape& tape) override {
    const nn::Tensor& dy = tape.grad(output());
    nn::Tensor dx = tape.backend().empty(dy.shape(), dy.dtype());
    tape.backend().pointwise().fill(dx, 0.0f);
    tape.backend().pointwise().add_to(dy, -scale_, dx);
    tape.contribute(x_, std::move(dx));
  }

 private:
  nn::Var x_;
  float scale_;
};

nn::Var reverse_gradient(nn::Tape& tape, nn::Var x, float scale) {
  const nn::Tape::OpScope scope(tape, "reverse_gradient");
  const nn::Var y = tape.make_var(x.value(), x.needs_grad());
  tape.record<ReversalNode>(y, x, scale);
  return y;
}

// The sum of sin(x), through the operator.
double objective(nn::Backend& backend, float x, float* gradient = nullptr) {
  nn::Tape tape(backend);
  const nn::Var in = tape.differentiable_input(nn::tensor_of(backend, {1}, std::array{x}));
  const nn::Loss loss = nn::sum(tape, nn::sin(tape, reverse_gradient(tape, in, 0.5f)), 1.0f);
  const double value = static_cast<double>(nn::values_of(backend, loss.totals())[0]);
  if (gradient == nullptr) return value;
  tape.backward(loss.value);
  *gradient = nn::values_of(backend, tape.grad(in))[0];
  return value;
}

}  // namespace

int main() {
  const auto backend = nn::make_cpu_backend(1);
  constexpr float kX = 0.7f, kStep = 0.01f;
  float gradient = 0;
  objective(*backend, kX, &gradient);
  const double slope = (objective(*backend, kX + kStep) - objective(*backend, kX - kStep)) / (2 * double{kStep});
  std::printf("slope %.3f, gradient %.3f\n", slope, static_cast<double>(gradient));
  return std::abs(static_cast<double>(gradient) + 0.5 * slope) < 1e-3 ? 0 : 1;
}
