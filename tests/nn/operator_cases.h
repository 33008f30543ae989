// A row for each operator of lockstep/nn/ops/operators.h, in their order. Tests take from it the operator's values, its
// gradient, and its kernels on all devices.
#pragma once

#include <vector>

#include "lockstep/nn/ops/operators.h"
#include "tests/nn/elementwise_cases.h"

namespace lockstep::nn::testing {

using Numbers = std::vector<double>;

struct OperatorCase {
  Operator op;
  std::vector<Shape> shapes;  // of x: one of the CPU's threads, several, a block of CUDA's, several
  Numbers (*value)(const Numbers& x, const Shape& shape);
  Apart forward = {}, backward = {};
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
};

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
