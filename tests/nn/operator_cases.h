// A row for each operator of lockstep/nn/ops/operators.h, in their order. Tests take from it the operator's values, its
// gradient, and its kernels on all devices.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "lockstep/nn/ops/operators.h"
#include "tests/nn/elementwise_cases.h"

namespace lockstep::nn::testing {

using Numbers = std::vector<double>;

/// What `row` makes of each row of the last axis, one after the other.
template <class Row>
Numbers by_rows(const Numbers& x, const Shape& shape, const Row& row) {
  const auto columns = static_cast<std::size_t>(columns_of(shape));
  Numbers y;
  for (std::size_t i = 0; i < x.size(); i += columns)
    for (const double value : row(std::span(x).subspan(i, columns))) y.push_back(value);
  return y;
}
/// softmax, or its logarithm.
inline Numbers softmax_of(std::span<const double> row, bool logarithm) {
  const double largest = *std::ranges::max_element(row);
  double sum = 0;
  for (const double one : row) sum += std::exp(one - largest);
  Numbers y;
  for (const double one : row) y.push_back(logarithm ? one - largest - std::log(sum) : std::exp(one - largest) / sum);
  return y;
}
inline Numbers normalized(std::span<const double> row, bool centered, double eps) {
  const auto count = static_cast<double>(row.size());
  double mean = 0, squares = 0;
  for (const double one : row) mean += centered ? one / count : 0.0;
  for (const double one : row) squares += (one - mean) * (one - mean) / count;
  Numbers y;
  for (const double one : row) y.push_back((one - mean) / std::sqrt(squares + eps));
  return y;
}

struct OperatorCase {
  Operator op;
  std::vector<Shape> shapes;  // of x: one of the CPU's threads, several, a block of CUDA's, several
  Numbers (*value)(const Numbers& x, const Shape& shape);
  Apart forward = {}, backward = {};
  bool has_kinks = false;  // where its gradient is checked, numbers lie apart from each other
};
inline const OperatorCase kOperatorCases[] = {
    {Affine{-1.5f, 0.25f},
     {{0}, {1}, {3, 5}, {1025}, {20005}},
     [](const Numbers& x, const Shape&) {
       Numbers y;
       for (const double one : x) y.push_back(-1.5 * one + 0.25);
       return y;
     }},
    {SumLast(),
     {{3}, {0, 3}, {1, 1}, {4, 1}, {5, 7}, {2, 3, 300}, {3, 1000}, {1500, 2}},
     [](const Numbers& x, const Shape& shape) {
       const auto columns = static_cast<std::size_t>(columns_of(shape));
       Numbers y(x.size() / columns);
       for (std::size_t i = 0; i < x.size(); ++i) y[i / columns] += x[i];
       return y;
     },
     {1.0},
     {0.0}},
    {SpreadLast{4},
     {{}, {0}, {3}, {2, 3}, {1500}},
     [](const Numbers& x, const Shape&) {
       Numbers y;
       for (const double one : x) y.insert(y.end(), 4, one);
       return y;
     },
     {0.0},
     {1.0}},
    {MaxLast(),
     {{3}, {0, 3}, {4, 1}, {5, 7}, {2, 3, 300}, {9, 1000}},
     [](const Numbers& x, const Shape& shape) {
       return by_rows(x, shape, [](auto row) { return Numbers{*std::ranges::max_element(row)}; });
     },
     {0.0},
     {1.0},
     true},
    {SoftmaxLast(),
     {{3}, {0, 3}, {4, 1}, {5, 7}, {2, 3, 300}, {9, 1000}},
     [](const Numbers& x, const Shape& shape) {
       return by_rows(x, shape, [](auto row) { return softmax_of(row, false); });
     },
     {8.0},
     {16.0}},
    {LogSoftmaxLast(),
     {{3}, {0, 3}, {4, 1}, {5, 7}, {2, 3, 300}, {9, 1000}},
     [](const Numbers& x, const Shape& shape) {
       return by_rows(x, shape, [](auto row) { return softmax_of(row, true); });
     },
     {8.0, 8.0},
     {64.0}},
    {NormalizeLast{1e-2f, true},
     {{3}, {0, 3}, {4, 1}, {5, 7}, {2, 3, 300}, {9, 1000}},
     [](const Numbers& x, const Shape& shape) {
       return by_rows(x, shape, [](auto row) { return normalized(row, true, 1e-2); });
     },
     {16.0},
     {32.0, 8.0}},
    {Pow{3.0f},
     {{0}, {1}, {3, 5}, {1025}},
     [](const Numbers& x, const Shape&) {
       Numbers y;
       for (const double one : x) y.push_back(one * one * one);
       return y;
     }},
    {Clamp{-0.45f, 0.5f},
     {{0}, {1}, {3, 5}, {20005}},
     [](const Numbers& x, const Shape&) {
       Numbers y;
       for (const double one : x) y.push_back(std::clamp<double>(one, -0.45f, 0.5f));
       return y;
     },
     {0.0},
     {0.0},
     true},
};

/// Numbers in (-1, 1), all of them as far apart as they can be.
inline Tensor numbers_apart(Backend& backend, const Shape& shape) {
  const std::int64_t count = shape.count();
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i)
    values.push_back(static_cast<float>(2 * (i * 7919 % count) + 1) / static_cast<float>(count) - 1.0f);
  return backend.from_host(values.data(), shape, DType::kF32);
}

/// Calls body(row, the row's operator) for each.
template <class Body>
void for_operators(const Body& body) {
  for (const OperatorCase& each : kOperatorCases)
    std::visit(
        [&](const auto& op) {
          SCOPED_TRACE(op.kName);
          body(each, op);
        },
        each.op);
}

}  // namespace lockstep::nn::testing
