#include "nn/optim/orthogonal.h"

#include <algorithm>
#include <cmath>

#include "nn/ops/update_rules.h"

namespace lockstep::nn {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr int kIterations = 5;
constexpr double kSize = 0.2;

struct Extents {
  std::int64_t rows, columns;
  explicit Extents(const Tensor& of) : rows(of.size(0)), columns(rows > 0 ? of.count() / rows : 0) {}
  std::int64_t smaller() const { return std::min(rows, columns); }
  std::int64_t larger() const { return std::max(rows, columns); }
};

}  // namespace

Orthogonalizer::Orthogonalizer(const std::vector<NamedParameter>& parameters) {
  std::int64_t smallest = 0, most = 0;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter->is_matrix()) continue;
    backend_ = &parameter->backend();
    smallest = std::max(smallest, Extents(parameter->value()).smaller());
    most = std::max(most, parameter->value().count());
  }
  if (backend_ == nullptr) return;
  gram_ = backend_->empty({smallest * smallest});
  square_ = backend_->empty({smallest * smallest});
  product_ = backend_->empty({most});
}

void Orthogonalizer::blend(const Tensor& p, const Tensor& g, double keep, double add, const Tensor& control) {
  const UpdateArrays arrays{.count = p.count(), .gradient = g.f32(), .parameter = p.f32()};
  backend_->optim().update(BlendRule{.keep = static_cast<float>(keep), .add = static_cast<float>(add)}, control,
                           {&arrays, 1}, {});
}

void Orthogonalizer::run(const Tensor& x, const Tensor& control) {
  const Extents of(x);
  const std::int64_t n = of.smaller();
  if (n == 0) return;
  const bool tall = of.rows > of.columns;
  const auto view = [](const Tensor& memory, const Shape& shape) { return Tensor::view_of(memory.raw(), shape); };
  const Tensor matrix = view(x, {1, of.rows, of.columns}), product = view(product_, {1, of.rows, of.columns});
  const Tensor gram = view(gram_, {1, n, n}), square = view(square_, {1, n, n});
  LinearKernels& linear = backend_->linear();
  const double size = kSize * std::sqrt(static_cast<double>(of.larger()));
  for (int i = 1; i <= kIterations; ++i) {
    linear.multiply(matrix, tall, matrix, !tall, gram);
    linear.multiply(gram, false, gram, false, square);
    blend(gram, square, kB, kC, control);
    tall ? linear.multiply(matrix, false, gram, false, product) : linear.multiply(gram, false, matrix, false, product);
    const double last = i == kIterations ? size : 1;
    blend(matrix, product, kA * last, last, control);
  }
}

}  // namespace lockstep::nn
